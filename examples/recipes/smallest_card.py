"""The smallest GPU for each recipe, by `megatron-sft fit`, and the options that it takes there:

    python examples/recipes/smallest_card.py examples/recipes/*.yaml --write PAGE

The number of GPUs is the recipe's. Options are those that `--fit-to-memory` chooses; where a host's
memory is the limit, it chooses others.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from examples.benchmarks.image_balance import PROCESSOR
from examples.recipes.try_recipe import model_config

GIB = 2**30
CARDS = {"16 GB": 15.6, "24 GB": 23.5, "32 GB": 31.3, "48 GB": 47.4, "80 GB": 79.1, "141 GB": 139.8}
"""GiB that a program finds on a GPU sold with that memory."""


def request_of(path: Path, place: Path) -> Any:
    """Returns the recipe's request to `fit`; writes its model's config.json into `place`."""
    from megatron.sft.arguments.parse import parse_config
    from megatron.sft.fit.estimate import Request
    from megatron.sft.fit.vocabulary import vocab_size_of

    recipe = yaml.safe_load(path.read_text())
    folder = place / recipe["pretrained_checkpoint"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model_config(recipe)))
    if recipe.get("images"):
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    num_gpus = int(re.findall(r"^# GPUs: (\d+)$", path.read_text(), re.MULTILINE)[0])
    os.chdir(place)
    config = parse_config(["--config", str(path)], num_gpus)
    return Request(config=config, vocab_size=vocab_size_of(config), world_size=num_gpus)


def row_of(path: Path) -> str:
    """Returns a row of the table."""
    from megatron.sft.fit.estimate import estimates
    from megatron.sft.fit.fewer_bytes import flags_between, ladder
    from megatron.sft.fit.report import with_margin

    with TemporaryDirectory() as place:
        request = request_of(path, Path(place))
        steps = []
        for config in ladder(request.config, request.world_size):
            stages = estimates(replace(request, config=config))
            needed = with_margin(max(stage.peak for stage in stages)) / GIB
            steps.append((config, needed))
    least = min(needed for _, needed in steps)
    card = next((name for name, size in CARDS.items() if least <= size), None)
    if card is None:
        raise ValueError(f"{path}: no card of {', '.join(CARDS)} holds it")
    config, needed = next(step for step in steps if step[1] <= CARDS[card])
    flags = flags_between(request.config, config)
    cells = [path.stem, f"{request.world_size}", f"{steps[0][1]:.1f}", card, f"{needed:.1f}"]
    line = f"| {' | '.join(cells)} | {f'`{flags}`' if flags else ''} |"
    print(line, flush=True)
    return line


def main() -> None:
    """Estimates, and writes the page."""
    parser = argparse.ArgumentParser(description="The smallest GPU for recipes.")
    parser.add_argument("recipes", nargs="+", type=Path)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch: estimates run on the CPU
    write = None if options.write is None else options.write.resolve()
    paths = [path.resolve() for path in options.recipes]
    lines = [row_of(path) for path in paths]
    if write is None:
        return
    head = [
        "# The smallest GPU for each recipe, by estimate",
        "",
        f"`python examples/recipes/smallest_card.py examples/recipes/*.yaml`, "
        f"{time.strftime('%Y-%m-%d')}, torch {version('torch')}, megatron-core "
        f"{version('megatron-core')}.",
        "",
        "As many GPUs as the recipe names. The recipe's own options take the first figure; those "
        "that `--fit-to-memory` adds on the smallest card are the last column. GiB are those of "
        "the fullest GPU with the margin of `fit`. No row has run on a GPU.",
        "",
        "| recipe | GPUs | GiB as given | smallest card | GiB there | options there |",
        "|---|---|---|---|---|---|",
    ]
    write.write_text("\n".join([*head, *lines, ""]))


if __name__ == "__main__":
    main()
