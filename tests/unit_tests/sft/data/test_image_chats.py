"""Chats with images as tokens, by a template and a tokenizer of transformers."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.tiny_images.make_data import PROCESSOR, SPECIAL, TEXT, TOWER
from megatron.blending.metadatasets.metadataset import load_metadataset
from megatron.blending.metadatasets.tree import source_entries
from megatron.sft.data.chat_encoder import ChatEncoder, ChatTokens, Dropped, EncodedSample
from megatron.sft.data.chats import open_chats
from megatron.sft.data.image_chats import ImageChats
from megatron.sft.data.records.content import Conversation
from megatron.sft.data.records.values import SampleError
from megatron.sft.images.vision import Vision, read_vision
from tests.unit_tests.blending.folders import CRUDE, write_folder
from tests.unit_tests.sft.images.test_sizes import write

Image = pytest.importorskip("PIL.Image")
START, END, PAD, VIDEO = 3, 4, 5, 6
IDS = {
    "image_token_id": PAD,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}


class Words:
    """A tokenizer whose template leaves out the images of system prompts: a letter is a token."""

    vocab_size = 200
    contexts = "differ"

    def encode_chat(self, conversation: Conversation) -> ChatTokens:
        assert conversation.placeholder in ("", "<|image_pad|>")
        assert conversation.placeholder or not any(one.images for one in conversation.messages)
        ids: list[int] = []
        weights: list[float] = []
        for message in conversation.messages:
            for number, piece in enumerate(message.pieces):
                if number and message.role != "system":
                    ids += [START, PAD, END]
                ids += [ord(letter) for letter in piece]
            weights += [float(message.role == "assistant")] * (len(ids) - len(weights))
        return ChatTokens(np.array(ids, np.int32), np.array(weights, np.float32))

    def encode_turns(self, conversation: Conversation) -> list[ChatTokens]:
        return [
            self.encode_chat(conversation._replace(messages=conversation.messages[: number + 1]))
            for number, one in enumerate(conversation.messages)
            if one.role == "assistant"
        ]

    def show(self, ids: Any) -> str:
        return "".join(SPECIAL[one] if one < len(SPECIAL) else chr(one) for one in ids)


@pytest.fixture
def vision(tmp_path: Path) -> Vision:
    config = {"model_type": "qwen3_vl", "vision_config": TOWER, "text_config": TEXT, **IDS}
    return read_vision(write(tmp_path, config, preprocessor_config=PROCESSOR), 1 << 20)


def encoder(vision: Vision, seq_length: int = 64, **options: Any) -> ChatEncoder:
    words: Any = Words()
    chats = ImageChats(vision, tuple(words.show([one]) for one in vision.reserved_tokens))
    return ChatEncoder(words, seq_length, options.pop("policy", "error"), images=chats, **options)


def picture(width: int, height: int) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (width, height)).save(content, "png")
    return content.getvalue()


def chat(*turns: str) -> list[dict[str, str]]:
    return [
        {"role": "assistant" if number % 2 else "user", "content": turn}
        for number, turn in enumerate(turns)
    ]


def made(found: EncodedSample | Dropped) -> EncodedSample:
    assert isinstance(found, EncodedSample)
    return found


def test_each_token_of_an_image_has_a_placeholder(vision: Vision) -> None:
    record = {"messages": chat("q<image>r", "yz"), "images": [picture(48, 32)]}
    sample = made(encoder(vision).encode(record))
    image = [START, *[PAD] * 6, END]
    assert [*sample.tokens.tolist(), ord("z")] == [ord("q"), *image, ord("r"), ord("y"), ord("z")]
    assert sample.loss_mask.tolist() == [0] * 9 + [1, 1]
    assert sample.images is not None
    assert sample.images.starts == (2,)
    assert sample.images.num_patches.tolist() == [24]
    assert sample.images.positions[:, 1:10].tolist() == [
        [1, 2, 2, 2, 2, 2, 2, 5, 6],
        [1, 2, 2, 2, 3, 3, 3, 5, 6],
        [1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


def test_a_chat_of_words_has_no_images(vision: Vision) -> None:
    assert made(encoder(vision).encode({"messages": chat("q", "a")})).images is None


def test_marks_of_images_that_are_text_are_said(
    vision: Vision, caplog: pytest.LogCaptureFixture
) -> None:
    """A data set whose images are under another key would train on words alone."""
    chats = encoder(vision)
    assert made(chats.encode({"messages": chat("q", "a")})).images is None
    assert not caplog.messages
    for _ in range(2):
        assert made(chats.encode({"messages": chat("<image>q", "a")})).images is None
    (note,) = caplog.messages
    assert note.startswith("a text holds <image>, but the record has no list of images for it")


def test_turns_are_sequences_of_their_own(vision: Vision) -> None:
    """Trees have no place for images: the first turn does not see the second one's."""
    pictures = [picture(32, 32), picture(48, 32)]
    record = {"messages": chat("<image>q", "a", "<image>r", "b"), "images": pictures}
    sample = made(encoder(vision, train_turns="served").encode(record))
    counts = [one.images.num_tokens.tolist() for one in sample.parts if one.images is not None]
    assert counts == [[4], [4, 6]]
    assert [int(one.loss_mask.sum()) for one in sample.parts] == [1, 2]
    named = [
        one.images.images[0].source.name for one in sample.named("f record 3").parts if one.images
    ]
    assert named == ["f record 3: images[0]"] * 2


@pytest.mark.parametrize(("seq_length", "kept"), [(7, None), (8, None), (9, 9), (11, 11), (64, 12)])
def test_truncation_never_cuts_an_image(vision: Vision, seq_length: int, kept: int | None) -> None:
    """What is left of an image has no place in the tower's rows; a cut behind it is sound."""
    messages = chat("q", "a<image>", "bcd")
    messages[2]["role"] = "assistant"
    record = {"messages": messages, "images": [picture(48, 32)]}
    found = encoder(vision, seq_length, policy="truncate").encode(record)
    # q a <s>, six placeholders up to token 8, </s> b c d: 13 tokens, of which 12 have a label
    if kept is None:
        assert found == Dropped("over length")
    else:
        assert len(made(found).tokens) == kept


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        (
            {"messages": [{"role": "system", "content": "<image>s"}, *chat("q", "a")]},
            "the chat template writes 0 placeholders for 1 images",
        ),
        ({"messages": chat("<image>q<|image_pad|>", "a")}, "text holds '<|image_pad|>', which"),
        ({"messages": chat("<image>q", "<|vision_end|>")}, "text holds '<|vision_end|>'"),
        ({"tokens": [70, PAD, 71], "images": None}, "tokens hold one of .*, but no image belongs"),
        ({"messages": chat("<image>q", "a"), "images": [b"x"]}, "it is no image that Pillow knows"),
        (
            {"messages": chat("<image>q", "a"), "images": ["https://a.org/b.png"]},
            r"images\[0\] 'https://a.org/b.png' is not fetched; pass --image-url-cache FOLDER",
        ),
        (
            {"messages": chat("<image>q", "a"), "images": [picture(600, 2)]},
            r"images\[0\] is 2 x 600 pixels, but one side must be at most 200 times",
        ),
    ],
)
def test_what_does_not_fit_is_refused(vision: Vision, record: dict[str, Any], fault: str) -> None:
    """A placeholder that is no image takes the rows of one, and moves all others."""
    with pytest.raises(SampleError, match=fault):
        encoder(vision).encode({"images": [picture(32, 32)], **record})


def test_damaged_pixels_are_found_where_records_may_be_skipped(vision: Vision) -> None:
    """Where the schedule is made, it is too late to leave a record out."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(noise).save(content, "jpeg")
    half = content.getvalue()[:-600]
    record = {"messages": chat("<image>q", "a"), "images": [half]}
    assert made(encoder(vision).encode(record)).images is not None
    checking = ImageChats(vision, (), decodes=True)
    words: Any = Words()
    with pytest.raises(SampleError, match="truncated"):
        ChatEncoder(words, 64, "error", images=checking).encode(record)


def image_sizes(path: str, vision: Vision) -> list[list[int]]:
    """Tokens of the images of each sample of a file or folder."""
    (entry,) = source_entries(load_metadataset(path, "train"))
    opened = open_chats(entry, encoder(vision))
    assert opened.load is not None
    found = []
    for number in range(len(opened.source)):
        images = opened.load(opened.source[number], ("", 0, number))[1].images
        found.append(images.num_tokens.tolist())
        assert images.images[0].source.name.startswith(f"{path} record {number}: ")
    return found


def test_files_of_images(tmp_path: Path, vision: Vision) -> None:
    """A table's bytes, and files beside a line, are images like any other."""
    pyarrow, parquet = (pytest.importorskip(f"pyarrow{name}") for name in ("", ".parquet"))
    small, wide = {"bytes": picture(32, 32), "path": None}, {"bytes": None, "path": "w.png"}
    (tmp_path / "w.png").write_bytes(picture(48, 32))
    rows = [
        {"messages": chat("<image>q", "a"), "images": [small]},
        {"messages": chat("<image>q<image>", "a"), "images": [wide, small]},
    ]
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    assert image_sizes(str(file), vision) == [[4], [6, 4]]


def test_images_in_archives(tmp_path: Path, vision: Vision) -> None:
    """Of energon's crude folders: the parts of a sample beside its chat."""
    messages = json.dumps({"messages": chat("<image>q<image>", "a")}).encode()
    parts = {"json": messages, "0.png": picture(32, 32), "1.png": picture(48, 32)}
    folder = write_folder(tmp_path / "folder", {"s.tar": [("key", parts)]}, CRUDE)
    assert image_sizes(str(folder), vision) == [[4, 6]]
