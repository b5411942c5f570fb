"""Writes four small data sets of images and text, and a metadataset that blends them.

    python examples/multimodal/make_data.py --output-dir /tmp/images

They are in energon's formats: folders of tar shards with `.nv-meta`, as `energon prepare` and
`python -m megatron.blending prepare` make them. Needs Pillow.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from megatron.blending.energon import BaseWebdatasetFactory

Random = np.random.Generator
Record = dict[str, bytes]
"""Content by part name."""
WORDS = "a red green blue small large square circle left right of two three".split()
_TYPE = "sample_type: {{__module__: megatron.energon, __class__: {}}}\n"
_MAPPED = _TYPE + "field_map: {{{}}}\n"
_CRUDE = "__module__: megatron.energon\n__class__: CrudeWebdataset\nsubflavors: {{kind: {}}}\n"


def image(random: Random) -> bytes:
    """An image whose sides are 8 to 32 pixels."""
    height, width = 8 * random.integers(1, 5, 2)
    pixels = random.integers(0, 256, (height, width, 3), np.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "png")
    return written.getvalue()


def text(random: Random, num_words: int = 12) -> str:
    """Up to so many words."""
    return " ".join(random.choice(WORDS, random.integers(1, num_words)))


def caption(random: Random) -> Record:
    """An image and its caption."""
    return {"png": image(random), "txt": text(random).encode()}


def question(random: Random) -> Record:
    """An image, a question and its answers."""
    asked = {"question": text(random) + "?", "answers": [text(random, 4)]}
    return {"png": image(random), "json": json.dumps(asked).encode()}


def page(random: Random) -> Record:
    """Text and images in turn."""
    names = [f"{i}.png" for i in range(random.integers(0, 4))]
    sequence: list[object] = [text(random, 40)]
    for name in names:
        sequence += [{"image": name}, text(random, 30)]
    return {
        "json": json.dumps({"sequence": sequence}).encode(),
        **{name: image(random) for name in names},
    }


def several(random: Random) -> Record:
    """A question about two to four images."""
    names = [f"{i}.png" for i in range(random.integers(2, 5))]
    asked = {"images": names, "question": text(random) + "?", "answer": text(random, 4)}
    return {"json": json.dumps(asked).encode(), **{name: image(random) for name in names}}


KINDS: dict[str, tuple[Callable[[Random], Record], str]] = {
    "captions": (caption, _MAPPED.format("CaptioningSample", "image: png, caption: txt")),
    "questions": (
        question,
        _MAPPED.format(
            "VQASample", "image: png, context: 'json[question]', answers: 'json[answers]'"
        ),
    ),
    "pages": (page, _CRUDE.format("page")),
    "several": (several, _CRUDE.format("several images")),
}


def make(folder: Path, num_samples: int, seed: int) -> Path:
    """Writes the data sets; returns the path of the metadataset."""
    random = np.random.default_rng(seed)
    for name, (record, dataset) in KINDS.items():
        place = folder / name
        place.mkdir(parents=True)
        with tarfile.open(place / "shard_000.tar", "w") as shard:
            for number in range(num_samples):
                for part, content in record(random).items():
                    member = tarfile.TarInfo(f"{name}_{number:05d}.{part}")
                    member.size = len(content)
                    shard.addfile(member, io.BytesIO(content))
        BaseWebdatasetFactory.prepare_dataset(place, ["shard_000.tar"])
        (place / ".nv-meta" / "dataset.yaml").write_text(dataset)
    blend = "\n".join(f"      - {{path: {name}, weight: 1}}" for name in KINDS)
    path = folder / "blend.yaml"
    path.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\n"
        f"splits:\n  train:\n    blend:\n{blend}\n"
    )
    return path


def main() -> None:
    """Writes what the arguments say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--num-samples", type=int, default=200, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for name in KINDS:
        if (arguments.output_dir / name).exists():
            parser.error(
                f"{arguments.output_dir / name} is there already; remove it, or name another "
                "--output-dir"
            )
    print(make(arguments.output_dir, arguments.num_samples, arguments.seed))


if __name__ == "__main__":
    main()
