"""pure. `python -m megatron.blending prepare DIR|FILE`: the options are energon's; nothing is ever
asked for.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from megatron.blending.energon._prepare import (
    Preparation,
    prepare_jsonl,
    prepare_webdataset,
)
from megatron.blending.formats.jsonl import Progress
from megatron.blending.formats.prepared.nv_meta import FOLDER

_LISTED_PARTS = 10


def main(
    arguments: Sequence[str] | None = None, program: str = "python -m megatron.blending"
) -> int:
    """Runs the command; 0 if it went well, else 1 and one line on stderr."""
    options = _parser(program).parse_args(arguments)
    try:
        print(_prepare(options))
    except (ValueError, OSError) as error:
        print(f"{program} {options.command}: error: {error!s:.1000}", file=sys.stderr)
        return 1
    return 0


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program)
    prepare = parser.add_subparsers(dest="command", required=True).add_parser(
        "prepare",
        help="index a folder of tar shards, or a JSONL file, for reading in any order",
        description="Index a folder of tar shards, or a JSONL file, for reading in any order.",
    )
    prepare.add_argument("--help-all", action="help", help=argparse.SUPPRESS)
    add = prepare.add_argument
    add("path", help="folder of .tar shards, at any depth; or a .jsonl file")
    add(
        "--split-ratio",
        default="1,0,0",
        metavar="8,1,1",
        help="shares of the shards for train, val and test; default: all for train",
    )
    add(
        "--split-parts",
        action="append",
        default=[],
        metavar="PART:REGEX",
        help="shards of a part, instead of shares",
    )
    add("--exclude", metavar="REGEX", help="leave out shards in whose name this is found")
    add(
        "--shuffle-tars", action="store_true", help="deal the shards to the parts in a random order"
    )
    add(
        "--sample-type",
        metavar="CLASS",
        help="class of the samples, such as TextSample, or CrudeWebdataset",
    )
    add(
        "--field-map",
        default="{}",
        metavar="JSON",
        help="""field -> part, such as '{"text": "txt", "label": "json[class]"}'""",
    )
    add(
        "--dataset-yaml-name",
        default="dataset.yaml",
        metavar="NAME",
        help="name of the file that says how samples are read",
    )
    add("--skip-dataset-yaml", action="store_true", help="leave dataset.yaml as it is")
    add(
        "--tar-index-only",
        action="store_true",
        help="write the indexes of a prepared folder again, and nothing else",
    )
    add("--force-overwrite", action="store_true", help="prepare a prepared folder again")
    add(
        "--num-workers",
        type=int,
        default=min(16, os.cpu_count() or 1),
        help="processes that read shards",
    )
    add(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="show a progress bar",
    )
    add("--non-interactive", action="store_true", help="accepted; nothing is ever asked")
    return parser


def _prepare(options: argparse.Namespace) -> str:
    path = options.path
    if path.endswith((".jsonl", ".ndjson")) and os.path.isfile(path):
        return (
            f"{path}: {prepare_jsonl(path, _progress_bar(options.progress, ' blocks'))} records "
            f"indexed in {path}.idx"
        )
    if not os.path.isdir(path):
        fault = (
            "needs no preparation"
            if os.path.isfile(path)
            else "no such file or folder; check the path"
        )
        raise ValueError(f"{path}: {fault}")
    done = prepare_webdataset(
        path, _preparation(options), _progress_bar(options.progress, " shards")
    )
    lines = [f"{path}: {sum(done.counts.values())} samples in {len(done.counts)} shards"]
    lines += [f"  {part}: {len(shards)} shards" for part, shards in done.split_parts.items()]
    lines += [f"  left out, as it has no samples: {shard}" for shard in done.empty_shards]
    more = len(done.part_names) - _LISTED_PARTS
    lines.append(
        f"  parts: {', '.join(done.part_names[:_LISTED_PARTS])}"
        + (f" and {more} more" if more > 0 else "")
    )
    config = os.path.join(path, FOLDER, options.dataset_yaml_name)
    if not os.path.isfile(config):
        lines.append(
            f"  {config} is to be written: pass --sample-type and --field-map, with "
            "--force-overwrite"
        )
    return "\n".join(lines)


def _preparation(options: argparse.Namespace) -> Preparation:
    asked = {
        field.name: getattr(options, field.name)
        for field in fields(Preparation)
        if hasattr(options, field.name)
    }
    try:
        asked["field_map"] = json.loads(options.field_map)
    except json.JSONDecodeError as error:
        raise ValueError(f"--field-map is not JSON: {error}") from None
    if not isinstance(asked["field_map"], dict) or not all(
        isinstance(part, str) for part in asked["field_map"].values()
    ):
        raise ValueError(f"--field-map must map fields to parts, but is {options.field_map}")
    try:
        asked["split_ratio"] = tuple(float(share) for share in options.split_ratio.split(","))
    except ValueError:
        raise ValueError(
            f"--split-ratio must be 3 shares like 8,1,1, but is {options.split_ratio}"
        ) from None
    return Preparation(
        **{**asked, **({"sample_type": None, "field_map": {}} if options.skip_dataset_yaml else {})}
    )


def _progress_bar(is_shown: bool, unit: str) -> Progress:
    def shown(steps: Iterable[Any], total: int) -> Iterable[Any]:
        from tqdm import tqdm

        # None: shown on a terminal, silent in a log.
        return tqdm(steps, total=total, unit=unit, disable=None if is_shown else True)

    return shown


if __name__ == "__main__":
    sys.exit(main())
