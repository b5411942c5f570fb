"""One microbatch for one rank: the fields of its stage, its shard, its layout."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.packing.batch.layout import Alignment, PackLayout
from megatron.packing.batch.microbatches import layout_microbatches, pack
from megatron.packing.batch.reading import read_samples
from megatron.packing.batch.samples import Samples
from megatron.packing.model import get_batch as get_batch_module
from megatron.packing.model.attention.zigzag import shard_index
from megatron.packing.model.get_batch import (
    Batch,
    get_batch_on_this_rank_for_sequence_packing,
    sources_of_tokens,
)
from megatron.packing.model.get_batch import transformer_engine_installed as installed
from tests.unit_tests.packing.batch.test_samples import Sequence, samples_of
from tests.unit_tests.packing.stubs import Ranks

CPU = torch.device("cpu")
FIELDS = ("tokens", "position_ids", "labels", "loss_mask")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """Stub groups have no backend to ask for a device."""
    monkeypatch.setattr(get_batch_module, "device_of", lambda group: CPU)
    monkeypatch.setattr(get_batch_module, "transformer_engine_installed", lambda: False)


def microbatch(lengths=(3, 5), sequence=4, unit=8) -> dict[str, Any]:
    """Segments of 4, 8 and, as tail, 4 tokens; token t, label 100 + t, weight t / 8."""
    parts: list[Sequence] = []
    for length in lengths:
        tokens = [1 + sum(len(part[0]) for part in parts) + i for i in range(length)]
        parts.append(
            (
                tokens,
                [token + 100 for token in tokens],
                [token / 8 for token in tokens],
                [*range(length)],
            )
        )
    return packed(samples_of(parts), Alignment(sequence=sequence, pack=unit))


def packed(samples: Samples, alignment: Alignment) -> dict[str, Any]:
    """All samples in one microbatch."""
    (only,) = pack(
        samples, np.array([samples.lengths.size]), [PackLayout.of(samples.lengths, alignment)]
    )
    return only


def get_batch(source: dict[str, Any], *, cp=None, pp=None, **options) -> Batch:
    groups = ProcessGroupCollection()
    groups.tp, groups.cp, groups.pp = Ranks(), cp or Ranks(), pp or Ranks()
    return get_batch_on_this_rank_for_sequence_packing(
        iter([source]), pg_collection=groups, **options
    )


def has(batch: Batch) -> tuple[str, ...]:
    return tuple(name for name in FIELDS if getattr(batch, name) is not None)


INPUTS, TARGETS = ("tokens", "position_ids"), ("labels", "loss_mask")


@pytest.mark.parametrize(
    ("pp", "options", "fields"),
    [
        (Ranks(1, 0), {}, FIELDS),
        (Ranks(3, 0), {}, INPUTS),
        (Ranks(3, 1), {}, ()),
        (Ranks(3, 2), {}, TARGETS),
        (Ranks(3, 2), {"mtp_on_this_rank": True}, FIELDS),
        (Ranks(2, 0), {"vpp_size": 2, "vp_stage": 0}, INPUTS),
        (Ranks(2, 0), {"vpp_size": 2, "vp_stage": 1}, ()),
        (Ranks(2, 1), {"vpp_size": 2, "vp_stage": 0}, ()),
        (Ranks(2, 1), {"vpp_size": 2, "vp_stage": 1}, TARGETS),
    ],
)
def test_fields_of_each_stage(pp, options, fields):
    """A virtual stage in the middle that gets tokens embeds them again; a last one without labels
    has no loss.
    """
    batch = get_batch(microbatch(), pp=pp, **options)
    assert has(batch) == fields
    assert batch.attention_mask is None
    assert all(getattr(batch, name).shape == (1, 16) for name in (*fields, "padding_mask"))


@pytest.mark.parametrize("cp", [Ranks(1, 0), Ranks(2, 0), Ranks(2, 1)])
def test_sources_stand_where_their_tokens_do(cp):
    """Losses would be added up under another source's name, and still sum to the right whole."""
    groups = ProcessGroupCollection()
    groups.tp, groups.cp, groups.pp = Ranks(), cp, Ranks()
    parts = [([n] * n, [0] * n, [1.0] * n, [*range(n)]) for n in (3, 5)]
    source = packed(samples_of(parts, sources=[3, 5]), Alignment(sequence=4, pack=8))
    sources = sources_of_tokens(source, groups)
    tokens = get_batch(source, cp=cp).tokens
    assert tokens is not None
    assert sources.shape == tokens.shape == (1, 16 // cp.size())
    assert torch.equal(sources[tokens != 0], tokens[tokens != 0])


def test_middle_stage_needs_no_tokens():
    """Stages in the middle get layouts only, and must find all they need there."""
    layout = PackLayout.of((3, 5), Alignment(sequence=4, pack=8))
    batch = get_batch(layout_microbatches([layout])[0], pp=Ranks(3, 1))
    expected = get_batch(microbatch(), pp=Ranks(3, 1))
    assert has(batch) == ()
    assert torch.equal(batch.padding_mask, expected.padding_mask)
    assert torch.equal(
        batch.packed_seq_params.cu_seqlens_q, expected.packed_seq_params.cu_seqlens_q
    )
    with pytest.raises(ValueError, match=r"by its pipeline_model_parallel_layout, or pass mtp_on"):
        get_batch(layout_microbatches([layout])[0], pp=Ranks(3, 1), mtp_on_this_rank=True)


def test_whole_pack_without_context_parallel():
    """The fields are the microbatch's own; two swapped by name would train on positions or labels
    as tokens.
    """
    source = microbatch()
    batch = get_batch(source)
    for name in FIELDS:
        assert torch.equal(getattr(batch, name), source[name].unsqueeze(0)), name


def test_padding_mask():
    """The router of experts balances over tokens that this calls real: padding among them skews it,
    real ones left out are not counted.
    """
    batch = get_batch(microbatch((2, 1), sequence=3, unit=8))
    assert batch.padding_mask.dtype == torch.bool
    expected = [False, False, True, False, True, True, True, True]
    assert batch.padding_mask.tolist() == [expected]


def test_padding_mask_of_a_dummy_pack():
    """No token of a dummy pack is real."""
    batch = get_batch(microbatch(()))
    assert batch.padding_mask.tolist() == [[True] * 8]


@pytest.mark.parametrize("size", [2, 4])
def test_shards_make_up_the_pack(size):
    """All fields must be cut alike, each token to one rank: labels of other tokens still give a
    falling loss.
    """
    source = microbatch((5, 11), sequence=2 * size, unit=6 * size)
    lengths = tuple(source["cu_seqlens_padded"].diff().tolist())
    batches = [get_batch(source, cp=Ranks(size, rank)) for rank in range(size)]
    is_padding = torch.ones(sum(lengths), dtype=torch.bool)
    for start, end in zip(
        source["cu_seqlens_padded"].tolist(), source["cu_seqlens"].diff().tolist()
    ):
        is_padding[start : start + end] = False
    for name, whole in {
        **{name: source[name] for name in FIELDS},
        "padding_mask": is_padding,
    }.items():
        again = torch.full_like(whole, -1)
        for rank, batch in enumerate(batches):
            again[shard_index(lengths, size, rank)] = getattr(batch, name).squeeze(0)
        assert torch.equal(again, whole), name
    for batch in batches:
        assert batch.packed_seq_params.cu_seqlens_q.tolist() == source["cu_seqlens_padded"].tolist()


@pytest.mark.parametrize("has_transformer_engine", [False, True])
@pytest.mark.parametrize("options", [{}, {"mtp_on_this_rank": True}])
def test_packed_seq_params(monkeypatch, has_transformer_engine, options):
    """Padded lengths alone: Transformer Engine that is given both overlooks padding after the last
    sequence, and with context parallelism leaves a token unattended; multi-token prediction cuts
    the pack by `cu_seqlens_q`.

    int32, and on the host where megatron-core's RoPE reads them; a tensor as `max_seqlen` breaks
    its comparison.
    """
    monkeypatch.setattr(
        get_batch_module, "transformer_engine_installed", lambda: has_transformer_engine
    )
    params = get_batch(microbatch(), **options).packed_seq_params
    assert params.qkv_format == "thd"
    for value in (params.cu_seqlens_q, params.cu_seqlens_kv):
        assert value.tolist() == [0, 4, 12, 16]
        assert value.dtype == torch.int32
        assert value.device == CPU
    assert params.cu_seqlens_q_padded is params.cu_seqlens_kv_padded is None
    assert params.max_seqlen_q == params.max_seqlen_kv == 8
    assert type(params.max_seqlen_q) is type(params.max_seqlen_kv) is int


@pytest.mark.parametrize(("has_transformer_engine", "device"), [(False, "cpu"), (True, "meta")])
def test_device_of_packed_seq_params(monkeypatch, has_transformer_engine, device):
    """Transformer Engine reads them in kernels; without it a device tensor is one host sync per
    layer.
    """
    monkeypatch.setattr(
        get_batch_module, "transformer_engine_installed", lambda: has_transformer_engine
    )
    params = get_batch_module.packed_seq_params(microbatch(), torch.device("meta"))
    assert params.cu_seqlens_q.device.type == params.cu_seqlens_kv.device.type == device


def test_each_call_draws_one_microbatch():
    """Interleaved stages each have an iterator: a second draw in one call would skip every other
    microbatch.
    """
    groups = ProcessGroupCollection()
    groups.tp, groups.cp, groups.pp = Ranks(), Ranks(), Ranks()
    iterator = iter([microbatch((3,)), microbatch((5,)), microbatch((7,))])
    drawn = [
        get_batch_on_this_rank_for_sequence_packing(iterator, pg_collection=groups)
        for _ in range(3)
    ]
    assert [int(batch.padding_mask.logical_not().sum()) for batch in drawn] == [3, 5, 7]


def test_missing_iterator_is_named():
    """None is what Megatron's own code passes to most ranks; here it would fail later, as a
    TypeError of `next`.
    """
    with pytest.raises(ValueError, match="must have a data iterator from wrap_dataloader"):
        get_batch_on_this_rank_for_sequence_packing(None)


@pytest.mark.parametrize("source", [{"tokens": torch.zeros(2)}, [{"tokens": torch.zeros(2)}]])
def test_refuses_what_is_not_packed(source):
    """Where the plug-in's install was forgotten it would be a KeyError of a name that the script
    never heard of.
    """
    with pytest.raises(
        ValueError, match=r"call plugin\.install\(config, arguments\) before get_forward"
    ):
        get_batch(source)


@pytest.mark.parametrize(
    ("version", "is_refused"), [("2.8.0", True), ("2.9.0", False), ("2.10", False)]
)
def test_transformer_engine_that_is_too_old_is_refused(version, is_refused, monkeypatch):
    """Packs are known not to converge under it, and nothing else tells."""
    stub = ModuleType("transformer_engine")
    vars(stub)["__version__"] = version
    stub.__spec__ = ModuleSpec("transformer_engine", None)
    monkeypatch.setitem(sys.modules, "transformer_engine", stub)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if not is_refused:
        assert installed.__wrapped__()
        return
    with pytest.raises(
        ValueError, match=rf"2\.9 or later, but {version} is installed; pip install"
    ):
        installed.__wrapped__()


def test_a_context_parallel_size_for_each_pack_is_refused():
    """A script of Megatron-LM's that asks for it would train with one size for all, and never
    know."""
    assert get_batch(microbatch(), dynamic_cp=False, config=object()).tokens is not None
    with pytest.raises(
        ValueError,
        match="dynamic_cp=True is not supported: all packs have one context-parallel size",
    ):
        get_batch(microbatch(), dynamic_cp=True)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_positions_along_axes_are_on_each_stage_and_whole(stage):
    """Each stage's layers make their rotary embedding of them, and cut it over context ranks."""
    positions = np.arange(24).reshape(3, 8)
    samples = read_samples({"tokens": [*range(8)], "position_ids": positions})
    source = packed(samples, Alignment(sequence=4, pack=4))
    batch = get_batch(source, cp=Ranks(2, 1), pp=Ranks(3, stage))
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == positions[:, None].tolist()
    assert batch.packed_seq_params.has_axes
    assert (batch.tokens is not None) == (stage == 0)
    assert not get_batch(microbatch()).packed_seq_params.has_axes
