"""Mutants of packing code: one line each, patched into the functions of a module."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Mutant(NamedTuple):
    """One line of a module, changed."""

    name: str
    module: str
    old: str
    new: str
    case: tuple[str, str, str, str] = ("grouped", "", "float32", "")
    """Run in which it shows; see `doctor_runs.Case`."""


_CELL = ("__class__",)
"""Variables of a method that calls `super`."""


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """Gives the module's functions the code of the changed source, wherever they are imported."""
    module = importlib.import_module(mutant.module)
    source = inspect.getsource(module)
    assert source.count(mutant.old) == 1, f"{mutant.name}: {source.count(mutant.old)} places"
    changed = types.ModuleType(mutant.module)
    changed.__file__ = module.__file__
    code = compile(source.replace(mutant.old, mutant.new), str(module.__file__), "exec")
    exec(code, changed.__dict__)
    restored = []
    for function, other in _pairs(module, changed):
        restored.append((function, function.__code__))
        function.__code__ = other.__code__
    try:
        yield
    finally:
        for function, before in restored:
            function.__code__ = before


def _pairs(module: Any, changed: Any) -> Iterator[tuple[types.FunctionType, types.FunctionType]]:
    for name, value in list(vars(module).items()):
        other = vars(changed).get(name)
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, type):
            yield from _pairs_of_class(value, other)
        elif (function := _plain(value)) is not None and (twin := _plain(other)) is not None:
            yield function, twin


def _pairs_of_class(
    value: type, other: Any
) -> Iterator[tuple[types.FunctionType, types.FunctionType]]:
    for name, method in vars(value).items():
        function, twin = _plain(method), _plain(vars(other).get(name))
        if function is not None and twin is not None:
            yield function, twin


def _plain(value: Any) -> types.FunctionType | None:
    value = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", value)))
    if isinstance(value, types.FunctionType) and value.__code__.co_freevars in ((), _CELL):
        return value
    return None


_SQUARE = "return self._computed(query, key, value, Segments.square(lengths))"
_MODEL, _STEP, _SFT = "megatron.packing.model", "megatron.packing.step", "megatron.sft"
_ATTENTION = f"{_MODEL}.attention.core_attention"


def _run(model: str, layout: str = "", more: str = "") -> tuple[str, str, str, str]:
    return model, layout, "float32", more


MUTANTS = (
    Mutant(
        "first border one too late",
        _ATTENTION,
        _SQUARE,
        "return self._computed(query, key, value, Segments.square("
        "(lengths[0] + 1, lengths[1] - 1, *lengths[2:]) if len(lengths) > 1 else lengths))",
    ),
    Mutant(
        "attention of the second stage joins sequences",
        _ATTENTION,
        _SQUARE,
        "return self._computed(query, key, value, Segments.square("
        "(sum(lengths),) if torch.distributed.get_rank() else lengths))",
        _run("grouped", "pp2"),
    ),
    Mutant(
        "attention joins sequences",
        _ATTENTION,
        _SQUARE,
        "return self._computed(query, key, value, Segments.square((sum(lengths),)))",
        _run("experts"),
    ),
    Mutant(
        "window one too narrow",
        f"{_MODEL}.attention.core_attention",
        "window=window[0] + 1 if",
        "window=window[0] if",
        _run("gemma"),
    ),
    Mutant(
        "causal mask is lost",
        f"{_MODEL}.attention.kernels",
        "q1, k1, v1, is_causal=True,",
        "q1, k1, v1, is_causal=False,",
    ),
    Mutant(
        "pieces of context-parallel ranks attend as one another",
        f"{_MODEL}.attention.zigzag",
        "np.column_stack(((rank + 1) * pieces, segments - rank * pieces))",
        "np.column_stack((segments - rank * pieces, (rank + 1) * pieces))",
        _run("grouped", "cp2"),
    ),
    Mutant(
        "keys of context-parallel ranks one too far",
        f"{_MODEL}.attention.zigzag",
        "gathered[expand_ranges(ends - num_keys, num_keys)]",
        "gathered[(expand_ranges(ends - num_keys, num_keys) + 1) % gathered.size]",
        _run("grouped", "cp2"),
    ),
    Mutant(
        "convolution runs over borders",
        f"{_MODEL}.parts.delta_rule",
        "- distance >= starts[distance:]",
        "- distance >= 0 * starts[distance:]",
        _run("qwen3.5"),
    ),
    Mutant(
        "state of delta nets is kept",
        f"{_MODEL}.parts.delta_rule",
        "return _in_chunks(inputs, lengths)",
        "return _in_chunks(inputs, (sum(lengths),))",
        _run("qwen3.5"),
    ),
    Mutant(
        "further predictions run over borders",
        f"{_MODEL}.loss.packed_roll",
        "rolled.index_fill_(-1, lasts, 0)",
        "pass",
        _run("further"),
    ),
    Mutant(
        "positions run on",
        "megatron.packing.batch.columns",
        "*(longest[:length] for length in lengths.tolist())",
        "np.arange(int(lengths.sum()), dtype=np.int32)",
        _run("learned"),
    ),
    Mutant(
        "last target is lost",
        f"{_MODEL}.loss.head",
        "else (of_tokens != MASKED_LABEL).nonzero().squeeze(1)",
        "else (of_tokens != MASKED_LABEL).nonzero().squeeze(1)[:-1]",
    ),
    Mutant(
        "labels are the tokens themselves",
        f"{_MODEL}.get_batch",
        'for name in ("labels", "loss_mask")}',
        'for name in ("labels", "loss_mask")} | {"labels": to_shard(microbatch["tokens"])}',
    ),
    Mutant(
        "padding is trained",
        "megatron.packing.batch.microbatches",
        "ids[:, padding] = loss_mask[padding] = 0",
        "ids[:, padding], loss_mask[padding] = 0, 1",
        _run("grouped", "cp2"),
    ),
    Mutant(
        "sample weights are lost",
        "megatron.packing.batch.samples",
        "weights = np.maximum.reduceat(loss_mask, ends - lengths)",
        "weights, loss_mask = weights, flags.astype(np.float32)",
    ),
    Mutant(
        "divided by all slots",
        f"{_SFT}.model.forward",
        "counts = (loss_mask != 0) if",
        "counts = torch.ones_like(loss_mask) if",
    ),
    Mutant(
        "weights count in the number of tokens",
        f"{_SFT}.model.forward",
        "num_tokens = counts.sum().to(torch.int32)",
        "num_tokens = loss_mask.sum().to(torch.int32)",
    ),
    Mutant(
        "tokens of context-parallel ranks are not counted",
        f"{_SFT}.model.optimizer",
        "with_context_parallel=True",
        "with_context_parallel=False",
        _run("grouped", "cp2"),
    ),
    Mutant(
        "gradient is scaled",
        f"{_SFT}.model.optimizer",
        "chunk.scale_gradients(1.0 / num_tokens",
        "chunk.scale_gradients(2.0 / num_tokens",
        _run("grouped", "dp2"),
    ),
    Mutant(
        "last words of tensor-parallel ranks are none",
        f"{_MODEL}.loss.cross_entropy",
        "is_here = (labels >= first) & (labels < first + num_here)",
        "is_here = (labels >= first) & (labels < first + num_here - 8)",
        _run("grouped", "tp2-sp"),
    ),
    Mutant(
        "last sample of a rank is lost",
        f"{_STEP}.load",
        "samples = reader.samples()",
        "samples = reader.samples(); samples = samples.take(np.arange(samples.lengths.size)[:4])",
    ),
    Mutant(
        "norms of sequence-parallel ranks are not summed",
        f"{_MODEL}.layers.norms",
        "weight.sequence_parallel = config.sequence_parallel",
        "weight.sequence_parallel = False",
        _run("grouped", "tp2-sp"),
    ),
    Mutant(
        "gated norms of tensor-parallel ranks are not summed",
        f"{_MODEL}.parts.delta_net_module",
        "weight = copy_to_tensor_model_parallel_region(self.weight, self.tp_group)",
        "weight = self.weight",
        _run("qwen3.5", "tp2-sp-ep2"),
    ),
    Mutant(
        "gradient of keys over context parallel is not summed",
        f"{_MODEL}.attention.core_attention",
        "x, tensor_parallel_output_grad=True, group=self.cp_group",
        "x, tensor_parallel_output_grad=False, group=self.cp_group",
        _run("grouped", "cp2"),
    ),
)
