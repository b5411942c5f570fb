"""The matrix of parallel layouts, models, optimizers, rank orders and schedulers that must all
train alike.

`MATRIX` takes every tensor x sequence x pipeline x interleaving x context x data parallel layout of
up to 8 processes, each with two choices of the rest, and some of 9, 12 and 16 processes. `COVERING`
is the part of it that every test run does: each pair of parallel sizes, and of one of them and an
optimizer, that occurs together in worlds of up to four processes, of up to three with more than two
data-parallel ranks, occurs in it, and so does each model and scheduler. `CHOSEN`
is what this run does: the matrix where the environment says LAYOUTS=all, the smallest of `COVERING`
where it says LAYOUTS=few.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import NamedTuple

ROPE = (
    "--position-embedding-type rope --swiglu --normalization RMSNorm "
    "--untie-embeddings-and-output-weights --disable-bias-linear"
)
MODELS = {
    "learned": "",
    "grouped": ROPE + " --group-query-attention --num-query-groups 2",
    "tied": "--position-embedding-type rope --qk-layernorm",
    "experts": ROPE + " --num-experts 4 --moe-router-topk 2",
    "further": ROPE + " --mtp-num-layers 1",
    "further-tied": "--position-embedding-type rope --mtp-num-layers 1",
}
BEHIND = ROPE + " --group-query-attention --num-query-groups 2 --norm-position"
MECHANISMS = {
    "gemma": f"{BEHIND} both --apply-layernorm-1p --qk-layernorm --window-size 7 0 "
    "--window-attn-skip-freq 1 0 1 1 --window-rotary-base 100 --attn-logit-softcapping 2 "
    "--final-logit-softcapping 1 --scale-embeddings --softmax-scale 0.3",
    "olmo": f"{BEHIND} behind --qk-layernorm --qk-layernorm-over-heads --residual-multiplier 0.5 "
    "--embedding-multiplier 2 --logits-scaling 3 --no-rope-freq 0 1 0 1 --rotary-interleaved",
    "gpt-oss": ROPE.replace("--disable-bias-linear", "").replace("--swiglu", "--quick-geglu")
    + " --num-experts 4 --moe-router-topk 2 --window-size 15 0 --window-attn-skip-freq 1 0 1 0 "
    "--softmax-type learnable --activation-func-clamp-value 1 --glu-linear-offset 1",
    "minimax": ROPE + " --num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-topk-scaling-factor 1.5 --rotary-percent 0.5",
    "qwen3.5": ROPE + " --num-experts 4 --moe-router-topk 2 --apply-layernorm-1p --qk-layernorm "
    "--attention-output-gate --linear-attention-freq 1 0 1 1 --linear-num-key-heads 4 "
    "--linear-num-value-heads 8 --linear-key-head-dim 8 --linear-value-head-dim 6 "
    "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate --rotary-percent 0.5",
    "deepseek": ROPE + " --no-add-qkv-bias --kv-lora-rank 10 --q-lora-rank 12 --qk-head-dim 6 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 5 --rotary-interleaved --softmax-scale 0.4 "
    "--query-scale-beta 0.1 --rope-scaling "
    '{"rope_type":"yarn","factor":4,"original_max_position_embeddings":16}',
}
"""Models after released ones, each with several mechanisms that megatron-core's own layers lack, or
get wrong where they are cut; of every layer kind at least one on each of two stages.
"""
OPTIMIZERS = {
    "plain": "",
    "sharded": "--use-distributed-optimizer",
    "overlapped": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
}
SCHEDULERS = ("default", "empty", "dp_balanced")


class Layout(NamedTuple):
    """One entry of the matrix."""

    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    interleaved: bool = False
    context: int = 1
    data: int = 1
    model: str = "learned"
    optimizer: str = "plain"
    pipeline_before_data: bool = False
    scheduler: str = "default"

    @property
    def world_size(self) -> int:
        """Processes."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def experts(self) -> int:
        """Expert-parallel size: 2 wherever the ranks of a stage divide by it."""
        return 2 if self._has_experts and (self.world_size // self.pipeline) % 2 == 0 else 1

    @property
    def _has_experts(self) -> bool:
        return "--num-experts" in (MODELS | MECHANISMS)[self.model]

    @property
    def depth(self) -> str:
        """Options of as few layers as it needs, for `MODELS`: two where no pipeline has more
        stages. With LAYOUTS=all it has the oracle's four.
        """
        stages = self.pipeline * (2 if self.interleaved else 1)
        return "--num-layers 2" if stages <= 2 and CHOSEN is not MATRIX else ""

    @property
    def flags(self) -> str:
        """The options that make it."""
        parts = [
            (MODELS | MECHANISMS)[self.model],
            OPTIMIZERS[self.optimizer],
            f"--tensor-model-parallel-size {self.tensor} --pipeline-model-parallel-size "
            f"{self.pipeline}",
            f"--context-parallel-size {self.context} --expert-model-parallel-size {self.experts}",
            f"--sequence-packing --sequence-packing-scheduler {self.scheduler}",
        ]
        parts += ["--sequence-parallel"] * self.sequence
        parts += ["--num-layers-per-virtual-pipeline-stage 1"] * self.interleaved
        parts += ["--use-tp-pp-dp-mapping"] * self.pipeline_before_data
        together = self._has_experts and self.optimizer != "plain"  # in others one after another
        parts += ["--moe-grouped-gemm", "--moe-permute-fusion"] * together
        return " ".join(parts)

    def __str__(self) -> str:
        sizes = [
            f"tp{self.tensor}{'sp' * self.sequence}",
            f"pp{self.pipeline}{'i' * self.interleaved}",
        ]
        sizes += [f"cp{self.context}", f"dp{self.data}", self.model, self.optimizer, self.scheduler]
        return "-".join(sizes + ["pp-first"] * self.pipeline_before_data)


def _parallel(largest_world: int) -> Iterator[Layout]:
    for tensor, pipeline, context, data in product((1, 2), (1, 2, 4), (1, 2), (1, 2, 3, 4)):
        for sequence, interleaved in product((False, True), repeat=2):
            layout = Layout(tensor, sequence, pipeline, interleaved, context, data)
            if (
                layout.world_size > largest_world
                or (sequence and tensor == 1)
                or (interleaved and pipeline != 2)
            ):
                continue
            yield layout


def _may_swap(layout: Layout, model: str) -> bool:
    """Whether the order tp-pp-dp makes a difference, and megatron-core can make its groups."""
    experts = layout._replace(model=model).experts if model == "experts" else layout.tensor
    return layout.pipeline > 1 and layout.data > 1 and experts == layout.tensor * layout.context


def _matrix() -> list[Layout]:
    layouts = []
    models, optimizers = [model for model in MODELS if model != "further-tied"], list(OPTIMIZERS)
    for number, layout in enumerate(_parallel(8)):
        for turn in (0, 1):
            model = models[(number + turn * 2) % len(models)]
            if model == "experts" and layout.tensor > 1 and not layout.sequence:
                model = "grouped"  # megatron-core refuses experts there
            layouts.append(
                layout._replace(
                    model=model,
                    optimizer=optimizers[(number // 2 + turn) % len(optimizers)],
                    scheduler=SCHEDULERS[(number // 3 + turn) % len(SCHEDULERS)],
                    pipeline_before_data=(number + turn) % 4 == 0 and _may_swap(layout, model),
                )
            )
    layouts += [
        Layout(context=3, model="grouped"),
        Layout(context=3, data=2, model="tied", scheduler="dp_balanced"),
        Layout(context=3, data=3, model="grouped", optimizer="sharded"),
        Layout(tensor=2, sequence=True, context=3, model="further"),
        Layout(tensor=4, sequence=True, model="learned"),
        Layout(tensor=4, sequence=True, context=2, model="tied", optimizer="sharded"),
        Layout(tensor=2, pipeline=2, data=3, sequence=True, model="experts", optimizer="sharded"),
        Layout(
            tensor=2,
            pipeline=2,
            context=2,
            data=2,
            sequence=True,
            interleaved=True,
            model="grouped",
        ),
        Layout(
            tensor=2,
            pipeline=2,
            context=2,
            data=2,
            sequence=True,
            model="experts",
            optimizer="overlapped",
        ),
        Layout(pipeline=4, context=2, data=2, model="further", scheduler="empty"),
        Layout(
            tensor=2, sequence=True, pipeline=2, data=2, model="experts", pipeline_before_data=True
        ),
        Layout(pipeline=2, data=3, model="tied", pipeline_before_data=True),
        Layout(
            pipeline=2, model="further-tied"
        ),  # the last stage computes logits with a copy of the embedding
        Layout(pipeline=2, interleaved=True, data=2, model="further-tied", optimizer="overlapped"),
        Layout(
            tensor=2,
            sequence=True,
            pipeline=2,
            context=2,
            model="further-tied",
            optimizer="sharded",
        ),
    ]
    return list(dict.fromkeys(layouts))


PARALLEL = {"tensor", "sequence", "pipeline", "interleaved", "context", "data"}


def covering(layouts: Sequence[Layout], *, pairs: bool) -> list[Layout]:
    """Select few layouts that hold every feature in `layouts`, small worlds first; with `pairs`
    every pair of parallel sizes, and of one of them and an optimizer, too.
    """

    def combinations_of(layout: Layout) -> set[tuple[tuple[str, object], ...]]:
        features = layout._asdict().items()
        sizes = [feature for feature in features if feature[0] in PARALLEL]
        found: set[tuple[tuple[str, object], ...]] = {(feature,) for feature in features}
        if pairs:
            found |= {*combinations(sizes, 2), *product(sizes, [("optimizer", layout.optimizer)])}
        return found

    missing = set().union(*(combinations_of(layout) for layout in layouts))
    chosen = []
    while missing:
        best = max(
            layouts,
            key=lambda layout: len(combinations_of(layout) & missing) / (2 + layout.world_size),
        )
        chosen.append(best)
        missing -= combinations_of(best)
    # What came later may hold all that an earlier choice was made for.
    for layout in sorted(chosen, key=lambda layout: -layout.world_size):
        others = [other for other in chosen if other is not layout]
        if combinations_of(layout) <= set().union(*map(combinations_of, others)):
            chosen = others
    return chosen


MATRIX = _matrix()
COVERING = covering(
    [layout for layout in MATRIX if layout.world_size <= (4 if layout.data <= 2 else 3)], pairs=True
)
FEW = covering([layout for layout in MATRIX if layout.world_size <= 3], pairs=False)
CHOSEN = {"all": MATRIX, "few": FEW, None: COVERING}[os.environ.get("LAYOUTS")]


MECHANISM_LAYOUTS = [
    Layout(tensor=2, sequence=True, pipeline=2, interleaved=True, optimizer="sharded"),
    Layout(tensor=2, sequence=True, context=2),  # several sequences in a pack, unlike `empty`
    Layout(),
    Layout(pipeline=2, data=2, optimizer="overlapped", scheduler="dp_balanced"),
    Layout(context=2, optimizer="sharded"),
    Layout(context=4),
    Layout(data=3, scheduler="empty"),
    Layout(pipeline=4),
    Layout(tensor=2, sequence=True, pipeline=2, context=2, optimizer="overlapped"),
]
MECHANISM_CASES = {
    "all": list(product(MECHANISM_LAYOUTS, MECHANISMS)),
    "few": list(product(MECHANISM_LAYOUTS[:1], ("gemma", "gpt-oss", "qwen3.5"))),
    # What layers compute, `test_families` has over two tensor-parallel ranks; of latents
    # `test_mechanisms` has the layer, of states under context parallel `test_lora`.
    None: [
        *product(MECHANISM_LAYOUTS[:1], ("gemma", "qwen3.5")),
        *product(MECHANISM_LAYOUTS[1:2], ("gpt-oss",)),
    ],
}[os.environ.get("LAYOUTS")]
"""Layouts with each of `MECHANISMS` that this run does."""


class Uneven(NamedTuple):
    """A pipeline whose stages have unequal numbers of layers."""

    model: str
    num_layers: int
    num_stages: int
    split: str

    @property
    def flags(self) -> str:
        """The options that make it."""
        return f"--sequence-packing --pipeline-model-parallel-size {self.num_stages} {self.split}"


FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
EMBEDDING = "--account-for-embedding-in-pipeline-split"
LOSS = "--account-for-loss-in-pipeline-split"
MOE = "--recompute-granularity selective --recompute-modules moe"
UNEVEN = [
    Uneven("qwen3.5", 4, 2, f"{FIRST} 1 --recompute-granularity full --use-distributed-optimizer"),
    Uneven("experts", 6, 4, f"{EMBEDDING} {LOSS} --moe-grouped-gemm --moe-permute-fusion {MOE}"),
    Uneven("grouped", 6, 2, f"{FIRST} 4 {LAST} 2 --num-virtual-stages-per-pipeline-rank 2"),
    Uneven("tied", 2, 4, f"{EMBEDDING} {LOSS}"),  # no layer on the first stage and on the last
    Uneven("gemma", 4, 3, f"{EMBEDDING} {LOSS}"),
    Uneven("grouped", 6, 2, f"{EMBEDDING} {LOSS} --num-layers-per-virtual-pipeline-stage 2"),
    Uneven("further", 3, 2, LOSS),
    Uneven("grouped", 9, 4, f"{FIRST} 1 {LAST} 2"),
]
"""Every run does the first four, with LAYOUTS=all it does all."""
