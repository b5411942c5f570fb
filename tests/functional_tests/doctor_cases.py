"""Faults put back into the toy trainer one by one, and what the doctor has to call them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.packing.doctor.subject import Sample, Step, Subject, draw_weights
from tests.functional_tests.doctor_toy import VOCABULARY, Fault, Toy, lay_out

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
Targets = Callable[[list[Sample]], list[Tensor]]


@dataclass(frozen=True, kw_only=True)
class StepFault:
    """What a trainer's step does wrong, beside a loss that is right; nothing by default."""

    weights_lost: bool = False
    mean_per_rank: bool = False
    factor: float = 1.0
    """Of gradients alone, the reported loss is right."""
    norm_factor: float = 1.0
    loses: int | None = None
    """Sequence that no rank trains."""
    repeats: int | None = None
    """Sequence that two ranks train."""
    keeps_gradients: bool = False
    """Adds the gradients of the step before."""
    loss_of_all: bool = False
    """Fused loss that trains prompts."""


@dataclass(frozen=True, kw_only=True)
class LossFault:
    """What a trainer's loss does wrong; nothing by default."""

    shift: int = 1
    crosses: bool = False
    """Labels run on over borders."""
    trains_prompt: bool = False
    trains_padding: bool = False
    loses_last: bool = False
    mean_per: str = "step"
    """What sums are divided by the tokens of: step, pack, sequence, slots."""
    factor: float = 1.0
    balances: bool = False
    """Adds a balancing loss over the pack."""
    fused: bool = False
    """No module puts out its logits."""
    step: StepFault | None = None
    """Takes steps on two data-parallel replicas; None leaves steps to the doctor."""


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    expected: tuple[str, ...] = ()
    """Names of all findings."""
    is_fault: bool = True
    fault: Fault = field(default_factory=Fault)
    loss: LossFault = field(default_factory=LossFault)
    module: str = ""
    """Part of the name of the module in which it is born."""
    options: dict = field(default_factory=dict)
    """Of Subject."""


def subject_of(case: Case, dtype: torch.dtype) -> Subject:
    """Returns the toy trainer with the fault of a case."""
    torch.manual_seed(0)
    model = Toy(case.fault)
    draw_weights(model)
    model = model.to(dtype).train()
    fault = case.fault

    def run(sequences: Sequence[Tensor], fill: int) -> tuple[Tensor, list[Tensor]]:
        layout, rows, size = lay_out(fault, sequences)
        stream = torch.full((size,), fill)
        for each, places in zip(sequences, rows):
            stream[places] = each
        return model(stream, layout), rows

    def logits(sequences: Sequence[Tensor], fill: int) -> list[Tensor]:
        out, rows = run(sequences, fill)
        return [out[each] for each in rows]

    def loss(packs: Sequence[Sequence[Sample]]) -> Tensor:
        return toy_loss(case.loss, packs, run, lambda: model.balance)

    kept: dict[str, Tensor] = {}
    stepping: dict[str, Any] = {}
    if (step := case.loss.step) is not None:
        stepping = {
            "step": lambda packs: toy_step(step, packs, model, run, kept),
            "takes_weights": True,
            "num_copies": {"data-parallel ranks": 2},
        }
    return Subject(
        name=case.name,
        model=model,
        vocab_size=VOCABULARY,
        logits=logits,
        places=lambda sequences: lay_out(fault, sequences)[1],
        num_slots=lambda sequences: lay_out(fault, sequences)[2],
        loss=None if case.loss.step is not None else loss,
        head=None if case.loss.fused else model.head,
        windows={
            f"layers.{index}": 6 for index, kind in enumerate(fault.kinds) if kind == "window"
        },
        **stepping,
        **case.options,
    )


def toy_step(
    fault: StepFault,
    packs: Sequence[Sequence[Sample]],
    model: Toy,
    run: Callable[[Sequence[Tensor], int], tuple[Tensor, list[Tensor]]],
    kept: dict[str, Tensor],
) -> Step:
    """Returns one step of the toy trainer on two replicas, which take sequences in turn."""
    samples = [sample for pack in packs for sample in pack]
    owners = [index % 2 for index in range(len(samples))]
    counts = [int(sample.trained.sum()) for sample in samples]
    of_rank = [sum(n for n, owner in zip(counts, owners) if owner == rank) for rank in (0, 1)]
    losses, whole = [], torch.zeros((), dtype=torch.float64)
    for index, (sample, owner) in enumerate(zip(samples, owners)):
        out, (rows,) = run([sample.tokens], 0)
        own = sample.trained[1:] | torch.tensor(fault.loss_of_all)
        targets = torch.where(own, sample.tokens[1:], -100)
        part = F.cross_entropy(out[rows][:-1].double(), targets, reduction="sum")
        part = part if fault.weights_lost else sample.weight * part
        count = sum(of_rank)
        if fault.mean_per_rank and len(samples) > 1:
            count = of_rank[owner] * 2
        if fault.loss_of_all:
            count = sum(len(each.tokens) - 1 for each in samples)
        losses.append(part / count)
        times = 0 if index == fault.loses and len(samples) > 1 else 1
        times += index == fault.repeats and len(samples) > 1
        whole = whole + times * part / count
    model.zero_grad(set_to_none=True)
    (fault.factor * whole).backward()
    change = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    if fault.keeps_gradients:
        for name, gradient in change.items():
            before = kept.get(name, torch.zeros_like(gradient))
            kept[name] = gradient.clone()
            change[name] = gradient + before
    norm = torch.stack([x.double().norm() for x in change.values()]).norm()
    numbers = iter(owners)
    return Step(
        change=change,
        loss=sum(part.item() for part in losses),
        norm=fault.norm_factor * float(norm),
        replicas=tuple(tuple(next(numbers) for _ in pack) for pack in packs),
    )


def toy_loss(
    fault: LossFault,
    packs: Sequence[Sequence[Sample]],
    run: Callable[[Sequence[Tensor], int], tuple[Tensor, list[Tensor]]],
    balance: Callable[[], Tensor],
) -> Tensor:
    """Returns the loss of one step of the toy trainer, with a fault of the loss."""
    total = torch.zeros((), dtype=torch.float64)
    count = sum(int(each.trained.sum()) for pack in packs for each in pack)
    num_sequences = sum(map(len, packs))
    for pack in packs:
        out, rows = run([each.tokens for each in pack], 0)
        labels = torch.full((len(out),), -100)
        for index, (sample, places) in enumerate(zip(pack, rows)):
            targets = sample.tokens.clone()
            if not fault.trains_prompt:
                targets[~sample.trained] = -100
            if fault.loses_last:
                targets[-1] = -100
            length = len(targets) - fault.shift
            labels[places[:length]] = targets[fault.shift :]
            if fault.crosses and index + 1 < len(pack):
                labels[places[-1]] = pack[index + 1].tokens[0]
        used = torch.zeros(len(out), dtype=torch.bool)
        used[torch.cat(rows)] = True
        if fault.trains_padding:
            labels[~used] = 0
        each = F.cross_entropy(out.float(), labels, reduction="none", ignore_index=-100).double()
        if fault.mean_per == "pack":
            part = each.sum() / (labels >= 0).sum() / len(packs)
        elif fault.mean_per == "sequence":
            part = torch.as_tensor(
                sum(each[places].sum() / (labels[places] >= 0).sum() for places in rows)
                / num_sequences
            )
        elif fault.mean_per == "place":  # later tokens weigh more
            part = (each * torch.linspace(0.5, 1.5, len(each))).sum() / count
        elif fault.mean_per == "slots":
            slots = sum(len(sample.tokens) for pack in packs for sample in pack)
            part = each.sum() / slots
        else:
            part = each.sum() / count
        if fault.balances:
            part = part + balance()
        total = total + fault.factor * part
    return total


def _later(by: int, only: int | None = None) -> Callable[[int, Tensor], Tensor]:
    """Moves borders by some rows to the right; of one sequence only, if asked for."""

    def move(layer: int, segments: Tensor) -> Tensor:
        moved = segments.roll(by)
        if by > 0:
            moved[:by] = segments[0]
        else:
            moved[by:] = segments[-1]
        return moved

    return move


def _joined(layers: Sequence[int] = range(9), first: int = 0) -> Callable[[int, Tensor], Tensor]:
    """Joins all sequences from one on to that one, in some layers."""
    return lambda layer, segments: segments.clamp(max=first) if layer in layers else segments


def _case(name: str, *expected: str, is_fault: bool = True, **fields: object) -> Case:
    fault_names = {each.name for each in dataclasses.fields(Fault)}
    loss_names = {each.name for each in dataclasses.fields(LossFault)}
    fault = {key: value for key, value in fields.items() if key in fault_names}
    loss = {key: value for key, value in fields.items() if key in loss_names}
    own = {key: value for key, value in fields.items() if key not in fault_names | loss_names}
    return Case(
        name=name,
        expected=expected,
        is_fault=is_fault and bool(expected),
        fault=Fault(**fault),  # type: ignore[arg-type]
        loss=LossFault(**loss),  # type: ignore[arg-type]
        **own,  # type: ignore[arg-type]
    )


WINDOWS = ("window", "attention", "window", "attention")
LINEAR = ("linear", "attention")
EXPERTS = ("attention", "experts", "attention")
ALL = _joined()
_FORGETS = "attention forgets borders"
_CONV = "short convolution without borders"
_STATE = "recurrent state is kept"
_RUN_ON = "positions run on over the pack"
SOUND = (
    _case("attention"),
    _case("windows", kinds=WINDOWS),
    _case("chunks", kinds=("chunk", "attention")),
    _case("linear attention", kinds=LINEAR),
    _case("short convolutions", kinds=("conv", "attention")),
    _case("token shift in attention", kinds=("shifted", "attention")),
    _case("experts", kinds=EXPERTS),
    _case("learned positions", learned_positions=True),
    _case("temperature by position", temperature=True),
    _case("padding behind sequences", align=8),
    _case("padding before sequences", align=8, pads_left=True),
    _case("context-parallel order", zigzag=True),
    _case("dropout", "dropout", is_fault=False, dropout=0.2),
    _case(
        "experts with a capacity",
        "experts with a capacity",
        is_fault=False,
        kinds=EXPERTS,
        capacity=0.7,
        module="experts",
    ),
    _case("balancing loss", "loss couples sequences", is_fault=False, balances=True),
    _case("mean per sequence, as declared", mean_per="sequence", options={"reduction": "sequence"}),
)
FORWARD = (
    _case("borders forgotten", _FORGETS, segments=ALL, module="layers.0.self_attn"),
    _case(
        "borders forgotten in layers 1 and 3",
        _FORGETS,
        segments=_joined((1, 3)),
        module="layers.1.self_attn",
    ),
    _case(
        "borders forgotten in the last layer",
        _FORGETS,
        segments=_joined((3,)),
        module="layers.3.self_attn",
    ),
    _case("one border forgotten", _FORGETS, segments=_joined(first=1), module="layers.0.self_attn"),
    _case("borders one too late", "border too late", segments=_later(1)),
    _case("borders two too late", "border too late", segments=_later(2)),
    _case("borders one too early", "border too early", segments=_later(-1)),
    _case("borders two too early", "border too early", segments=_later(-2)),
    _case(
        "borders one too late in the last layer",
        "border too late",
        segments=lambda layer, s: _later(1)(layer, s) if layer == 3 else s,
        module="layers.3.self_attn",
    ),
    _case(
        "convolution in front of attention",
        _CONV,
        kinds=("shifted", "attention"),
        conv_segments=ALL,
        module="layers.0.self_attn",
    ),
    _case(
        "windows without borders",
        "windowed attention without borders",
        kinds=WINDOWS,
        segments=_joined((0, 2)),
        module="layers.0.self_attn",
    ),
    _case(
        "recurrent state",
        _STATE,
        kinds=LINEAR,
        segments=_joined((0,)),
        conv_segments=ALL,
        module="linear_attn",
    ),
    _case(
        "recurrent state alone", _STATE, kinds=LINEAR, segments=_joined((0,)), module="linear_attn"
    ),
    _case(
        "convolution of linear attention",
        _CONV,
        kinds=LINEAR,
        conv_segments=ALL,
        module="linear_attn",
    ),
    _case(
        "pure convolution",
        _CONV,
        kinds=("conv", "attention"),
        conv_segments=ALL,
        module="layers.0.conv",
    ),
    _case("mask added as booleans", "attention mask is no mask", is_mask_added=True),
    _case("causal mask lost", "future is seen", mask=lambda mask: mask | mask.T),
    _case("norm over the pack", "sequences are mixed", norm_over_pack=True, module="norm"),
    _case("window one too wide", "window of the wrong width", kinds=WINDOWS, window=7),
    _case("window one too narrow", "window of the wrong width", kinds=WINDOWS, window=5),
    _case("window lost", "window of the wrong width", kinds=WINDOWS, window=99),
    _case("window lost in packs", "window is another in packs", kinds=WINDOWS, window_in_packs=99),
    _case(
        "window other by one in packs",
        "window is another in packs",
        kinds=WINDOWS,
        window_in_packs=7,
    ),
    _case(
        "chunks lost in packs",
        "window is another in packs",
        kinds=("chunk", "attention"),
        window_in_packs=99,
    ),
    _case(
        "learned positions run on",
        _RUN_ON,
        learned_positions=True,
        positions=lambda positions, order: order,
    ),
    _case(
        "temperature runs on", _RUN_ON, temperature=True, positions=lambda positions, order: order
    ),
    _case(
        "positions begin at 1 behind the first",
        "positions begin elsewhere",
        learned_positions=True,
        positions=lambda positions, order: positions + 3 * ((positions == 0).cumsum(0) > 1),
    ),
    _case(
        "padding between sequences seen",
        "padding is seen",
        align=8,
        padding_joins=True,
        pads_left=True,
    ),
    _case("halves swapped", "order of tokens is changed", zigzag_swapped=True),
    _case("state between calls", "state between calls", keeps_state=True),
    _case("backward pass crosses", "backward pass crosses", backward_crosses=True),
)
LOSS = (
    _case("labels across borders", "label across a border", crosses=True),
    _case("prompts trained", "prompt is trained", trains_prompt=True),
    _case("padding trained", "padding is trained", trains_padding=True, align=8),
    _case("last target lost", "target is lost", loses_last=True),
    _case("labels not shifted", "labels are not shifted", shift=0),
    _case("labels shifted twice", "labels are not shifted", shift=2),
    _case("mean per pack", "mean per pack", mean_per="pack"),
    _case("mean per sequence", "mean per sequence", mean_per="sequence"),
    _case(
        "mean over tokens, though sequences are declared",
        "mean over tokens",
        options={"reduction": "sequence"},
    ),
    _case("later tokens weigh more", "weights of tokens differ", mean_per="place"),
    _case("divided by slots", "divided by slots", mean_per="slots"),
    _case("times context-parallel ranks", "scale of the loss", factor=2.0),
    _case("divided by accumulated steps", "scale of the loss", factor=0.25),
)
STEPS = (
    _case("step on two replicas", step=StepFault()),
    _case("norm over copies", "norm counts copies", step=StepFault(norm_factor=2**0.5)),
    _case("sample weights lost", "sample weights are lost", step=StepFault(weights_lost=True)),
    _case("mean per rank", "mean per rank", step=StepFault(mean_per_rank=True)),
    _case("gradients times ranks", "gradient is scaled", step=StepFault(factor=2.0)),
    _case("gradients averaged twice", "gradient is scaled", step=StepFault(factor=0.5)),
    _case("sequence lost", "sequence is lost", step=StepFault(loses=3)),
    _case("sequence trained twice", "sequences weigh differently", step=StepFault(repeats=2)),
    _case(
        "gradients of the step before",
        "sequences weigh differently",
        step=StepFault(keeps_gradients=True),
    ),
    _case("fused loss trains prompts", "loss is another", step=StepFault(loss_of_all=True)),
)
FUSED = (
    _case("fused loss", fused=True),
    _case("fused loss across borders", "label across a border", fused=True, crosses=True),
    _case("fused loss with prompts", "prompt is trained", fused=True, trains_prompt=True),
    _case("fused loss without last targets", "target is lost", fused=True, loses_last=True),
    _case("fused loss not shifted", "labels are not shifted", fused=True, shift=0),
    _case("fused loss shifted twice", "labels are not shifted", fused=True, shift=2),
    _case("fused loss, mean per pack", "mean per pack", fused=True, mean_per="pack"),
)
FAULTS = (*FORWARD, *LOSS)
CASES = (*SOUND, *FAULTS, *STEPS, *FUSED)
