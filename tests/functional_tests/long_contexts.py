"""Options of long contexts, alone and together, in parallel layouts beside the same layout without
them:

    python -m tests.functional_tests.long_contexts --write PAGE [--only TEXT] [--together]

Each row of the page is a layout; each column the largest difference of loss, gradients and weights
over two steps, relative as the oracle measures it. The layouts without these options are compared
with sequences one by one by `make layouts` and `make trees`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from tests.functional_tests.layouts import MODELS, Layout
from tests.functional_tests.oracle import Step, assemble, largest_difference, train_packed
from tests.functional_tests.ranks import run_ranks
from tests.functional_tests.test_layouts import BATCHES
from tests.functional_tests.trees import batches_of_trees

LIMIT = 1e-12
FULL = "--recompute-granularity full"
LORA = "--lora --lora-rank 4"
ONE_GROUP = "--group-query-attention --num-query-groups 1"
BY_GROUPS = "by groups"
MLP, PRODUCTS, ON_HOST = "tiled MLP", "tiled products", "inputs on host"
ATTENTION = "attention on host"
OPTIONS = {
    BY_GROUPS: "--query-groups-per-gather 1",
    MLP: "--mlp-chunks-for-training 3",
    PRODUCTS: "--attention-chunks-for-training 3",
    ON_HOST: "--fine-grained-activation-offloading",
    ATTENTION: "--fine-grained-activation-offloading "
    "--offload-modules layer_input core_attn_output",
}
TREES = ("forest", "deep", "prefixes", "star", "wide", "sequence", "weights", "equal")


class Row(NamedTuple):
    """A layout, further options, and whether its data are trees."""

    layout: Layout
    more: str = ""
    has_trees: bool = False

    def __str__(self) -> str:
        more = self.more.replace("--", "")
        return " ".join(filter(None, (str(self.layout), more, "trees" * self.has_trees)))

    def names(self) -> list[str]:
        """Returns the options that this layout may have."""
        is_idle = {
            PRODUCTS: not self.layout.sequence,
            ON_HOST: FULL not in self.more,
            ATTENTION: FULL not in self.more,
        }
        return [name for name in OPTIONS if not is_idle.get(name)]

    def limit(self, name: str) -> float:
        """Returns the largest difference that an option may make."""
        num_groups = 2 if self.layout.model in ("grouped", "gemma") else 4
        num_groups = 1 if ONE_GROUP in self.more else num_groups // self.layout.tensor
        is_alone = self.layout.context == 1 and not self.has_trees  # then other kernels compute it
        is_by_rank = self.layout.context > 1 and num_groups == 1
        is_same = not (is_alone or is_by_rank or self.layout.model == "deepseek")
        return 0.0 if name == BY_GROUPS and is_same else LIMIT

    def run(self, options: str) -> list[Step]:
        """Returns the steps with these options."""
        batches = batches_of_trees(7, TREES, 2) if self.has_trees else BATCHES
        layout = self.layout
        depth = layout.depth if layout.model in MODELS else ""
        flags = f"{layout.flags} {depth} {self.more} {options}"
        return assemble(run_ranks(train_packed, layout.world_size, flags, batches))


ROWS = [
    Row(Layout(model="grouped")),
    Row(Layout(model="grouped"), FULL, has_trees=True),
    Row(Layout(model="learned"), LORA),
    Row(Layout(data=2, model="tied", optimizer="sharded"), FULL),
    Row(Layout(data=2, model="experts", optimizer="overlapped"), FULL),
    Row(Layout(data=2, model="grouped", optimizer="overlapped"), has_trees=True),
    Row(Layout(tensor=2, model="grouped"), FULL),
    Row(Layout(tensor=2, sequence=True, model="tied"), FULL),
    Row(Layout(tensor=2, sequence=True, model="grouped"), f"{LORA} {FULL}"),
    Row(Layout(tensor=2, sequence=True, model="experts", optimizer="sharded"), FULL),
    Row(Layout(tensor=4, sequence=True, model="learned"), FULL),
    Row(Layout(pipeline=2, model="grouped"), FULL),
    Row(Layout(pipeline=2, interleaved=True, data=2, model="tied", optimizer="sharded"), FULL),
    Row(Layout(pipeline=4, model="learned")),
    Row(Layout(context=2, model="grouped")),
    Row(Layout(context=2, model="grouped"), FULL, has_trees=True),
    Row(Layout(context=2, model="gemma"), FULL),
    Row(Layout(context=2, model="gpt-oss"), FULL),
    Row(Layout(context=2, model="grouped"), f"{LORA} {FULL}"),
    Row(Layout(context=3, data=2, model="tied", optimizer="overlapped"), FULL),
    Row(Layout(context=4, model="gemma")),
    Row(Layout(context=4, model="gpt-oss", optimizer="sharded"), FULL),
    Row(Layout(context=4, model="grouped"), FULL, has_trees=True),
    Row(Layout(context=2, data=2, model="experts"), FULL),
    Row(Layout(tensor=2, sequence=True, context=2, model="grouped"), FULL),
    Row(Layout(tensor=2, sequence=True, context=2, model="gemma", optimizer="sharded"), FULL),
    Row(Layout(tensor=2, sequence=True, context=2, model="grouped"), FULL, has_trees=True),
    Row(Layout(tensor=2, sequence=True, pipeline=2, context=2, model="grouped"), FULL),
    Row(Layout(tensor=2, sequence=True, pipeline=2, model="gpt-oss", optimizer="overlapped"), FULL),
    Row(Layout(pipeline=2, context=2, data=2, model="tied", optimizer="sharded"), FULL),
    Row(Layout(context=2, model="deepseek"), FULL),
    Row(Layout(tensor=2, sequence=True, context=2, model="deepseek"), f"{LORA} {FULL}"),
    Row(Layout(context=2, model="deepseek", optimizer="sharded"), FULL, has_trees=True),
    Row(Layout(context=3, model="gpt-oss"), f"{ONE_GROUP} {FULL}"),
    Row(Layout(context=4, model="grouped"), f"{ONE_GROUP} {FULL}", has_trees=True),
    Row(Layout(context=2, model="qwen3.5"), FULL),
]


def measured(only: str, *, together: bool) -> Iterator[tuple[Row, dict[str, float]]]:
    """Yields each layout with the difference that each option makes, and all together.

    together: no option alone.
    """
    for row in ROWS:
        if only not in str(row):
            continue
        plain, names = row.run(""), row.names()
        alone = {name: OPTIONS[name] for name in names}
        asked = alone | ({"together": " ".join(alone.values())} if len(names) > 1 else {})
        if together:
            asked = dict([asked.popitem()])
        found = {}
        for name, options in asked.items():
            steps = row.run(options)
            found[name] = largest_difference(steps, plain)
            is_exact = found[name] <= row.limit(name)
            print(f"{found[name]:.1e} {name}: {row}{'' if is_exact else ' FAILED'}", flush=True)
        yield row, found


def page(found: list[tuple[Row, dict[str, float]]]) -> str:
    """Returns the page in Markdown."""
    measured_names = {name for _, values in found for name in values}
    names = [name for name in (*OPTIONS, "together") if name in measured_names]
    command = "make long-contexts"
    if names == ["together"]:
        command = "python -m tests.functional_tests.long_contexts --together"
    lines = [
        "# Options of long contexts in parallel layouts",
        "",
        f"`{command}` on {time.strftime('%Y-%m-%d')}, torch {version('torch')}, "
        f"megatron-core {version('megatron-core')}, float64 on CPU.",
        "",
        "Two steps with each option, and with all, beside the same layout without: the largest "
        "difference of loss, gradients and weights, relative to the loss, to the largest gradient "
        "of the module and to the largest weight. `0` is equal to the bit. An empty cell is an "
        "option that does nothing in that layout, or is refused there.",
        "",
        f"| layout | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    for row, values in found:
        cells = [f"{values[name]:.1e}" if values.get(name) else "" for name in names]
        cells = ["0" if values.get(name) == 0 else cell for name, cell in zip(names, cells)]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measures, and writes the page; status 1 where a difference is too large."""
    parser = argparse.ArgumentParser(description="Options of long contexts in layouts.")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--together", action="store_true", help="no option alone")
    options = parser.parse_args()
    found = list(measured(options.only, together=options.together))
    if options.write is not None:
        options.write.write_text(page(found))
    exact = [value <= row.limit(name) for row, values in found for name, value in values.items()]
    if not exact or not all(exact):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
