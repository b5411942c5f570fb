"""pure. Draws pictures, asks about them in chats, and makes a tiny vision model of random weights.

    model/            a Qwen3-VL of 0.9 million parameters, with tokenizer and image processor
    train.jsonl       chats of one to six questions, with none, one or two pictures
    held_out.jsonl    questions about pictures that no chat had
    pictures/         PNG and JPEG files of odd sizes

python examples/tiny_images/make_data.py --output-dir data/tiny_images
"""

import argparse
import json
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

NUM_CHATS, NUM_HELD_OUT = 2400, 120
COLOURS = {
    "red": (220, 30, 30),
    "green": (20, 160, 60),
    "blue": (30, 60, 220),
    "yellow": (235, 205, 30),
}
SHAPES = ("circle", "square", "triangle")
NUMBERS = ("one", "two", "three", "four")
CELL = 32
"""Pixels of the place of one shape."""
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|> ' ~ message.role ~ ' : ' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|> assistant : ' }}{% endif %}"
)
TEXT = {
    "vocab_size": 64,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 4]},
}
TOWER = {
    "depth": 2,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_heads": 4,
    "patch_size": 8,
    "out_hidden_size": 96,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": 1024, "longest_edge": 65536},
    "patch_size": 8,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


class Picture(NamedTuple):
    """One to four equal shapes."""

    shape: str
    colour: str
    number: int

    def draw(self, path: Path, random: Random) -> None:
        """Writes a picture of odd size, with the shapes in places at random."""
        from PIL import Image, ImageDraw

        columns, rows = random.choice(((2, 2), (3, 2), (2, 3), (4, 1)))
        size = (columns * CELL + random.randrange(6), rows * CELL + random.randrange(6))
        image = Image.new("RGB", size, tuple(random.randrange(225, 256) for _ in range(3)))
        pencil = ImageDraw.Draw(image)
        for place in random.sample(range(rows * columns), self.number):
            side = random.randrange(20, 27)
            left = place % columns * CELL + random.randrange(CELL - side)
            top = place // columns * CELL + random.randrange(CELL - side)
            box = (left, top, left + side, top + side)
            fill = COLOURS[self.colour]
            if self.shape == "circle":
                pencil.ellipse(box, fill=fill)
            elif self.shape == "square":
                pencil.rectangle(box, fill=fill)
            else:
                corners = ((left + side // 2, top), (left, top + side), (left + side, top + side))
                pencil.polygon(corners, fill=fill)
        image.save(path, quality=92)

    def questions(self) -> list[tuple[str, str]]:
        """What can be asked about it, and the answers."""
        return [
            ("what shape is it ?", f"it is a {self.shape} ."),
            ("what colour is it ?", f"it is {self.colour} ."),
            ("how many are there ?", f"there are {NUMBERS[self.number - 1]} ."),
        ]


def drawn(folder: Path, number: int, random: Random) -> tuple[str, Picture]:
    """Draws a picture; returns its path from the data's folder, and what it shows."""
    picture = Picture(random.choice(SHAPES), random.choice(list(COLOURS)), random.randint(1, 4))
    name = f"pictures/{number:05d}.{random.choice(('png', 'jpg'))}"
    picture.draw(folder / name, random)
    return name, picture


def chat(folder: Path, number: int, random: Random) -> dict[str, Any]:
    """Questions about one picture or two, or none at all, in one of two forms."""
    if random.random() < 0.1:
        return {
            "messages": [
                {"role": "user", "content": "what do you see ?"},
                {"role": "assistant", "content": "nothing ."},
            ]
        }
    messages: list[dict[str, Any]] = []
    images: list[str] = []
    for part in range(random.choice((1, 1, 2))):
        name, picture = drawn(folder, 2 * number + part, random)
        images.append(name)
        asked = random.sample(picture.questions(), random.randint(1, 3))
        for turn, (question, answer) in enumerate(asked):
            mark = "" if turn else "<image> "
            messages.append({"role": "user", "content": mark + question})
            messages.append({"role": "assistant", "content": answer})
    if random.random() < 0.5:
        return {"messages": messages, "images": images}
    left = iter(images)
    for message in messages:
        if message["content"].startswith("<image> "):
            text = message["content"].removeprefix("<image> ")
            message["content"] = [
                {"type": "image", "image": next(left)},
                {"type": "text", "text": text},
            ]
    return {"messages": messages}


def write_tokenizer(folder: Path) -> dict[str, int]:
    """Writes a tokenizer of whole words, with the settings of an image processor; returns the ids
    of its tokens for images by their keys in config.json.
    """
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = (
        "system user assistant : it is a there are what shape colour how many do you see nothing"
    )
    words += " ? . " + " ".join((*COLOURS, *SHAPES, *NUMBERS))
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, "<unk>", *words.split()))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library: Any = transformers
    library.logging.set_verbosity_error()
    tokenizer = library.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=SPECIAL[2], pad_token=SPECIAL[0], unk_token="<unk>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n")
    return {
        f"{name}_token_id": vocabulary[f"<|{token}|>"]
        for name, token in (
            ("image", "image_pad"),
            ("video", "video_pad"),
            ("vision_start", "vision_start"),
            ("vision_end", "vision_end"),
        )
    }


def write_model(folder: Path) -> None:
    """Writes a Qwen3-VL with random weights, as transformers writes it."""
    import torch
    import transformers

    library: Any = transformers
    ids = write_tokenizer(folder)
    config = library.Qwen3VLConfig(
        text_config=TEXT, vision_config=TOWER, tie_word_embeddings=False, **ids
    )
    torch.manual_seed(1)
    model = library.Qwen3VLForConditionalGeneration(config)
    for parameter in model.parameters():  # so narrow a model learns slowly from 0.02
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.08)
    model.save_pretrained(folder)


def main() -> None:
    """Reads the command line, writes all, prints one line."""
    parser = argparse.ArgumentParser(description="Makes pictures, chats and a tiny vision model.")
    parser.add_argument("--output-dir", type=Path, required=True)
    folder = parser.parse_args().output_dir
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    random = Random(1)
    chats = [chat(folder, number, random) for number in range(NUM_CHATS)]
    held_out = []
    for number in range(2 * NUM_CHATS, 2 * NUM_CHATS + NUM_HELD_OUT):
        name, picture = drawn(folder, number, random)
        question, answer = random.choice(picture.questions())
        held_out.append({"image": name, "question": question, "answer": answer})
    for name, records in (("train", chats), ("held_out", held_out)):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    write_model(folder / "model")
    print(f"wrote {len(chats)} chats, {len(held_out)} held-out questions and a model to {folder}")


if __name__ == "__main__":
    main()
