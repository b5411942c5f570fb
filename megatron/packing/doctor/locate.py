"""tensor. Finds the module in which a crossing is born, what it mixes, and layers that cross."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron.packing.doctor.evidence import Evidence, LayerReach, Mixing
from megatron.packing.doctor.experiments import Examination
from megatron.packing.doctor.module_kinds import kind_of
from megatron.packing.doctor.probe import Probe, Trace, changed_rows

EXPERT_ULPS = 64
"""Rounding of experts' products, which depends on how many rows each is given, and these on where
other tokens are routed.
"""

MAX_LAYERS = 32
"""Layers that are examined one by one; of deeper models the first ones."""


def layer_names(model: nn.Module) -> list[str]:
    """Returns the layers that are examined one by one: the first MAX_LAYERS."""
    return every_layer_name(model)[:MAX_LAYERS]


def every_layer_name(model: nn.Module) -> list[str]:
    """Returns the layers: children of the first list of modules that are of a depth, in each stage.

    The list with most parameters is it: experts are lists, too, but below a layer.
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and not re.search(r"\.\d+\.", name)
    ]
    names: list[str] = []
    for stage in dict.fromkeys(stage_of(name) for name, _ in found):
        name, layers = max(
            (listed for listed in found if stage_of(listed[0]) == stage),
            key=lambda listed: sum(weight.numel() for weight in listed[1].parameters()),
        )
        names += [f"{name}.{index}" for index in range(len(layers))]
    return names


def victim_rows(examination: Examination, one: int, other: int) -> Tensor:
    """Returns rows that must not change when tokens of `one` do from its middle on."""
    rows = examination.subject.rows(examination.pack)
    return rows[other] if one != other else rows[one][: len(rows[one]) // 2]


def find_birth(examination: Examination, evidence: Evidence) -> str | None:
    """Returns the module that is the first to let a sequence see what it must not.

    Modules are taken in the order in which they end, so that children come before parents; the
    one that counts has changed outputs from unchanged inputs.
    """
    pairs = evidence.crossings or [
        (index, index)
        for index, value in enumerate(evidence.early)
        if examination.subject.is_causal and not value <= evidence.exact
    ]
    if not pairs:
        return None
    one, other = pairs[0]
    after = examination.probe.trace(examination.disturbed(one))
    return _birth(examination, evidence, after, victim_rows(examination, one, other))


def find_birth_of_padding(examination: Examination, evidence: Evidence) -> str | None:
    """Returns the module that is the first to let real tokens see padding, or None."""
    fill = examination.subject.vocab_size - 1
    after = examination.probe.trace(examination.pack, fill=fill)
    real = torch.cat(examination.subject.rows(examination.pack))
    return _birth(examination, evidence, after, real)


def _birth(
    examination: Examination, evidence: Evidence, after: Trace, victims: Tensor
) -> str | None:
    """Returns the first module whose outputs differ in rows of victims, and not its inputs."""
    before = examination.probe.trace(examination.pack)
    slots = examination.subject.slots(examination.pack)
    births = [
        birth
        for birth in examination.probe.gather(
            _first_birth(before, after, victims, slots, evidence.exact)
        )
        if birth is not None
    ]
    if not births:
        return None
    _, _, name = min(births)
    return str(name)


def _first_birth(
    before: Trace, after: Trace, victims: Tensor, slots: int, exact: float
) -> tuple[int, int, str] | None:
    """Returns stage, number and name of this rank's first module that lets victims see others."""
    for number, (name, (inputs, outputs)) in enumerate(before.items()):
        if name not in after or not outputs:
            continue
        changed = changed_rows(outputs, after[name][1], slots, exact)
        if not len(changed) or not bool(changed[victims].any()):
            continue
        came_in = changed_rows(inputs, after[name][0], slots, exact)
        if not len(came_in) or not bool(came_in[victims].any()):
            return stage_of(name), number, name
    return None


def stage_of(name: str) -> int:
    """Returns the number of the pipeline stage in a module's name: 2 in "stage2.decoder", 0 where
    it has none.
    """
    match = re.match(r"stage(\d+)\.", name)
    return int(match[1]) if match else 0


def class_of(probe: Probe, name: str) -> str:
    """Returns the class of a module, which another rank may have."""
    module = probe.modules.get(name)
    names = probe.gather("" if module is None else type(module).__name__)
    return str(next(filter(None, names), ""))


def seen_rows(
    examination: Examination, name: str, exact: float, columns: Iterable[int]
) -> Tensor | None:
    """Returns which rows of a module's output see which of its input, bool [rows, rows].

    One run for each column: other columns stay False. None if the module has no such rows, or
    they do not even see themselves.
    """
    pack = examination.pack
    base = examination.probe.output(pack, name)
    slots = examination.subject.slots(pack)
    if not any(examination.probe.gather(bool(base))):
        return None
    seen = torch.zeros(slots, slots, dtype=torch.bool)
    for column in columns:
        changed = examination.probe.output(pack, name, torch.tensor([column]))
        rows = examination.probe.changed(base, changed, slots, exact)
        if len(rows) != slots:
            return None
        seen[:, column] = rows
    return seen if bool(seen.any()) else None


def describe(examination: Examination, evidence: Evidence, name: str) -> Mixing:
    """Returns what the module mixes, for the pair of sequences that shows it best.

    Without sources and targets where its rows could not be told apart.
    """
    rows = examination.subject.rows(examination.pack)
    pairs = sorted(
        evidence.crossings or [(i, i) for i, value in enumerate(evidence.early) if value],
        key=lambda pair: (pair[1] != pair[0] + 1, pair),
    )  # neighbours in order tell most
    mixing = Mixing(
        module=name,
        module_class=class_of(examination.probe, name),
        disturbed=pairs[0][0],
        changed=pairs[0][1],
        length_disturbed=len(rows[pairs[0][0]]),
        length_changed=len(rows[pairs[0][1]]),
    )
    seen = seen_rows(examination, name, evidence.exact, torch.cat(rows).tolist())
    if seen is None:
        evidence.notes.append(f"{name}: rows that it mixes could not be told apart")
        return mixing
    one, other = next(
        (pair for pair in pairs if _crosses(seen, rows[pair[0]], rows[pair[1]])), pairs[0]
    )
    own = [seen[places][:, places] for places in rows]
    cross = seen[rows[other]][:, rows[one]] if one != other else own[one].triu(1)
    sources = cross.any(0).nonzero().flatten().tolist()
    targets = cross.any(1).nonzero().flatten().tolist()
    return replace(
        mixing,
        disturbed=one,
        changed=other,
        sources=tuple(sources),
        targets=tuple(targets),
        length_disturbed=len(rows[one]),
        length_changed=len(rows[other]),
        reach=max(map(reach_of, own)),
        is_causal=not any(bool(of_sequence.triu(1).any()) for of_sequence in own),
        is_reordered=_is_reordered(own[one]),
        num_late=_num_late(own[other], targets),
        num_early=_num_early(own[one], sources),
    )


def _num_late(own: Tensor, targets: list[int]) -> int:
    """Returns how many first tokens of B are taken for the end of A: those that see A, if no other
    token of B sees them; else 0.
    """
    count = len(targets)
    is_head = targets == list(range(count)) and 0 < count < len(own)
    return count if is_head and not bool(own[count:, :count].any()) else 0


def _num_early(own: Tensor, sources: list[int]) -> int:
    """Returns how many last tokens of A are taken for the beginning of B: those that B sees, if
    they see no other token of A; else 0.
    """
    count, size = len(sources), len(own)
    is_tail = sources == list(range(size - count, size)) and 0 < count < size
    return count if is_tail and not bool(own[size - count :, : size - count].any()) else 0


def _crosses(seen: Tensor, source: Tensor, target: Tensor) -> bool:
    if torch.equal(source, target):
        return bool(seen[target][:, source].triu(1).any())
    return bool(seen[target][:, source].any())


def _is_reordered(own: Tensor) -> bool:
    counts = own.sum(1)
    in_order = torch.arange(1, len(own) + 1)
    return bool(torch.equal(counts.sort().values, in_order)) and not torch.equal(counts, in_order)


def reach_of(own: Tensor) -> int:
    """Returns the tokens that a row sees at most, back from itself; 0 for an empty matrix."""
    found = own.tril().nonzero()
    return int((found[:, 0] - found[:, 1]).max()) + 1 if len(found) else 0


def find_layers(examination: Examination, evidence: Evidence) -> None:
    """Disturbs one sequence at a time in front of each layer, and watches the others behind it."""
    pack, probe = examination.pack, examination.probe
    rows = examination.subject.rows(pack)
    slots = examination.subject.slots(pack)
    examined, crossing = [], []
    for name in all_layers(probe):
        base = probe.output(pack, name)
        changed = [
            probe.changed(base, probe.output(pack, name, part), slots, evidence.exact)
            for part in _middle_parts(rows)
        ]
        if any(len(mask) != slots or not bool(mask.any()) for mask in changed):
            continue
        examined.append(name)
        if any(
            bool(mask[other].any())
            for index, mask in enumerate(changed)
            for place, other in enumerate(rows)
            if place != index
        ):
            crossing.append(name)
    evidence.examined_layers, evidence.crossing_layers = tuple(examined), tuple(crossing)


def all_layers(probe: Probe) -> list[str]:
    """Returns the layers of all ranks, in the order of stages."""
    names = dict.fromkeys(
        name for of_rank in probe.gather(layer_names(probe.subject.model)) for name in of_rank
    )
    return sorted(names, key=lambda name: (stage_of(name), int(name.rpartition(".")[2])))


def _middle_parts(rows: Sequence[Tensor]) -> list[Tensor]:
    """Returns the later half of the rows of each sequence."""
    return [places[len(places) // 2 :] for places in rows]


def measure_reach(examination: Examination, evidence: Evidence) -> None:
    """Measures how far each layer sees, in the pack and alone.

    The first token of the longest sequence is disturbed in front of the layer: the last row that
    changes is as far as the layer sees.
    """
    pack = examination.pack
    longest = max(range(len(pack)), key=lambda index: len(pack[index]))
    found = []
    exact = _exact_for_layers(examination, evidence)
    windows = declared_windows(examination.probe)
    for name in all_layers(examination.probe):
        packed = layer_reach(examination.probe, pack, longest, name, exact)
        alone = layer_reach(examination.probe, [pack[longest]], 0, name, exact)
        if packed is None or alone is None:
            continue
        declared = windows.get(name)
        found.append(LayerReach(layer=name, packed=packed, alone=alone, declared=declared))
    evidence.reach = tuple(found)


def declared_windows(probe: Probe) -> dict[str, int]:
    """Returns the windows of the layers of all ranks, as declared."""
    return {
        name: width
        for of_rank in probe.gather(dict(probe.subject.windows))
        for name, width in of_rank.items()
    }


def _exact_for_layers(examination: Examination, evidence: Evidence) -> float:
    """Returns what outputs of whole layers may differ by, relative to the largest value: where one
    has experts, their rounding, which is far below what a token sees in float32 and float64.
    """
    probe, eps = examination.probe, torch.finfo(examination.dtype).eps
    has_experts = any(
        probe.gather(
            any(
                kind_of(name, type(one).__name__) == "experts"
                for name, one in probe.modules.items()
            )
        )
    )
    is_fine = eps <= torch.finfo(torch.float32).eps
    return max(evidence.exact, EXPERT_ULPS * eps) if has_experts and is_fine else evidence.exact


def layer_reach(
    probe: Probe, pack: Sequence[Tensor], index: int, name: str, exact: float
) -> int | None:
    """Returns how many tokens of a sequence a layer carries its first token to, itself included;
    None if its rows cannot be told apart.
    """
    rows, slots = probe.subject.rows(pack)[index], probe.subject.slots(pack)
    base = probe.output(pack, name)
    changed = probe.changed(base, probe.output(pack, name, rows[:1]), slots, exact)
    if len(changed) != slots:
        return None
    own = changed[rows].nonzero().flatten()
    return int(own.max()) + 1 if len(own) else None
