"""Images of records, in the forms of common data sets."""

from typing import Any

import pytest

from megatron.sft.data.records.content import messages_of
from megatron.sft.data.records.formats import read_record
from megatron.sft.data.records.values import SampleError
from megatron.sft.images.source import ImageSource

ANSWER = {"role": "assistant", "content": "a"}
A, B = "a.png", "b.png"


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}, ANSWER]


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def placed(record: dict[str, Any]) -> list[tuple[str, list[tuple[int, str | bytes]]]]:
    """Text of each message, and the place and the file of each of its images."""
    found = []
    for message in messages_of(read_record(record, {}, takes_images=True).content):
        images = []
        for image in message.images:
            assert isinstance(image.source, ImageSource)
            images.append((image.at, image.source.path or image.source.content))
        found.append((message.content, images))
    return found


@pytest.mark.parametrize(
    "record",
    [
        {"messages": user([text("x"), {"type": "image", "image": A}, text("y")])},
        {"messages": user([text("x"), {"type": "image", "url": A}, text("y")])},
        {"messages": user([text("x"), {"type": "image_url", "image_url": {"url": A}}, text("y")])},
        {"messages": user([{"text": "x"}, {"image": A}, {"text": "y"}])},
        {"messages": user([{"text": "x", "image": None}, {"image": A, "text": None}, text("y")])},
        {
            "messages": user(
                [
                    {"type": "input_text", "text": "x"},
                    {"type": "input_image", "image_url": A},
                    text("y"),
                ]
            )
        },
        {"messages": user([text("x"), {"type": "image"}, text("y")]), "images": [A]},
        {"messages": user([text("x"), {"type": "image", "index": 0}, text("y")]), "images": A},
        {"messages": user("x<image>y"), "images": [{"bytes": None, "path": A}]},
        {"messages": user("x<image>y"), "images": f'["{A}"]'},
        {
            "conversations": [
                {"from": "human", "value": "x<image>y"},
                {"from": "gpt", "value": "a"},
            ],
            "image": A,
        },
        {"instruction": "x<image>y", "output": "a", "images": [A]},
        {"query": "x<image>y", "response": "a", "images": [A]},
    ],
)
def test_forms_in_use(record: dict[str, Any]) -> None:
    """Each of them is the same chat; a form that is read as text trains on words alone."""
    assert placed(record) == [("xy", [(1, A)]), ("a", [])]


def test_bytes_and_several_images() -> None:
    record = {"messages": user("<image><image>x"), "images": [{"bytes": b"1", "path": A}, b"2"]}
    assert placed(record)[0] == ("x", [(0, b"1"), (0, b"2")])
    parts = [{"type": "image", "base64": "MQ=="}, {"type": "image", "index": 0}, text("x")]
    assert placed({"messages": user(parts), "images": [b"2"]})[0] == ("x", [(0, b"1"), (0, b"2")])


def test_parts_of_an_archive() -> None:
    """They lie beside the record, by the names of its files."""
    record = {"messages": user("<image> x <image>"), "0.jpg": b"1", "1.png": b"2", "cls": b"3"}
    reading = read_record(record, {}, takes_images=True)
    assert reading.unread == {"cls"}
    assert placed(record)[0] == (" x ", [(0, b"1"), (3, b"2")])
    swapped = record | {"images": ["1.png", "0.jpg"]}
    assert placed(swapped)[0][1] == [(0, b"2"), (3, b"1")]


def test_numbered_parts_are_in_the_order_of_their_numbers() -> None:
    """Sorted by name, 10.png would be the second image of the chat."""
    parts = {f"{number}.png": str(number).encode() for number in (0, 1, 10, 2)}
    assert [part for _, part in placed({"messages": user("<image>" * 4), **parts})[0][1]] == [
        *(b"0", b"1", b"2", b"10")
    ]


def test_a_place_takes_the_first_image_without_one() -> None:
    parts = [{"type": "image", "index": 1}, {"type": "image"}, text("x")]
    images = placed({"messages": user(parts), "images": [A, B]})[0][1]
    assert images == [(0, B), (0, A)]


def test_a_mark_without_images_is_text() -> None:
    assert placed({"messages": user("<image> is a tag")})[0] == ("<image> is a tag", [])
    record = {"messages": user("<image> is a tag"), "images": []}
    assert read_record(record, {"images": "none"}, takes_images=True).unread == set()


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ({"messages": user("x"), "images": [A]}, "record has 1 images, but .* places for 0"),
        ({"messages": user("<image>"), "images": [A, B]}, "record has 2 images, but .* for 1"),
        (
            {"messages": user("<image><image>"), "images": [A]},
            "message 0 has a place for image 1, but the record has 1 in images",
        ),
        ({"messages": user([{"type": "image"}])}, "message 0 has a place for image 0"),
        ({"messages": user("<image>"), "images": []}, "holds <image>, but images .* is empty"),
        ({"messages": user("<image>"), "images": [3]}, r"images\[0\] must be an image: a path"),
        ({"messages": user("<image>"), "images": A, "image": B}, "has images and image"),
        (
            {"messages": user([{"type": "image", "image": A, "url": B}])},
            r"messages\[0\].content image 0 has image and url; keep one",
        ),
        (
            {"messages": user([{"type": "image", "image": "s3://a/b.png"}])},
            "is not read from a server",
        ),
        ({"text": "<image>", "images": [A]}, "record has images, but no conversation"),
        (
            {"messages": [*user("<image>")[:1], [ANSWER, ANSWER]], "images": [A]},
            "record has images, but no conversation, or several answers",
        ),
        ({"messages": user([{"type": "video", "video": A}])}, "must hold parts .* holds .*video"),
    ],
)
def test_what_is_missing_is_said(record: dict[str, Any], fault: str) -> None:
    """An image too few trains on another one's place."""
    with pytest.raises(SampleError, match=fault):
        read_record(record, {}, takes_images=True)


def test_without_images_they_are_refused() -> None:
    for record in ({"messages": user([{"image": A}])}, {"messages": user("x"), "images": [A]}):
        with pytest.raises(SampleError, match="record has images, which would be lost"):
            read_record(record, {})
