"""mcore. One microbatch -> the arguments of GPTModel.forward: this rank's context-parallel shard,
and PackedSeqParams. No collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron.packing.batch.paths import PATH_TOKENS
from megatron.packing.device import to_device
from megatron.packing.model.attention.tree_keys import PackTree
from megatron.packing.model.attention.zigzag import shard_index
from megatron.packing.model.embeddings import BatchPayloads
from megatron.packing.step.groups import device_of
from megatron.packing.step.transformer_engine import transformer_engine_installed


class BatchFields(NamedTuple):
    """Arguments of GPTModel.forward for one microbatch of T tokens; each tensor [1, T /
    context-parallel size].

    `tokens` and `position_ids` on the first stage (and where multi-token prediction is), `labels`
    and `loss_mask` on the last, None elsewhere. Positions along axes are [3, 1, T] on each stage,
    of the whole pack: its layers make their rotary embedding of them, and then cut that.
    `attention_mask` is None: the packs' layout says who attends to whom. `padding_mask` is bool,
    True where there is no real token (for the router of experts).
    """

    tokens: Tensor | None
    labels: Tensor | None
    loss_mask: Tensor | None
    attention_mask: None
    position_ids: Tensor | None
    packed_seq_params: PackedSeqParams
    padding_mask: Tensor


class PackPaths(NamedTuple):
    """Pairs of token and path that trains it, n in all, of a pack with fields per path."""

    token: Tensor
    """int64 [m]: place in this rank's shard of a token that some path trains."""
    path: Tensor
    """int64 [m]: number of the path, in the order of `Batch.extra`."""
    num_tokens: Tensor
    """int64 [n]: tokens of each path that are trained, on all context-parallel ranks."""
    are_whole: bool
    """True if the pack has all trained tokens of its paths. Trees larger than a pack are cut, and
    where prefixes are not shared, each path is a sequence of its own: neither is whole.
    """


class Batch(BatchFields):
    """The seven values of `BatchFields`, and the further fields of the user's samples."""

    num_paths: Tensor | None = None
    """int32 [1, T / context-parallel size], where `labels` are: how often each token counts in the
    number of tokens; None where all that have a loss count once.
    """

    payloads: BatchPayloads | None = None
    """Payloads of the microbatch's sequences, on the first stage; None where no sequence of the
    global batch has any.
    """

    extra: Mapping[str, Tensor] = MappingProxyType({})
    """Extra columns by name, where `labels` are. Per token [1, T / context-parallel size, ...]; per
    sequence [segments, ...], in the order of the pack, with zeros for padding at its end; per path
    [n, ...].
    """
    paths: PackPaths | None = None
    """Paths of samples with fields per path, on stages with `labels` (see `path_log_probs`)."""


def get_batch_on_this_rank_for_sequence_packing(
    data_iterator: Iterator[dict[str, Any]] | None,
    vpp_size: int | None = None,
    mtp_on_this_rank: bool = False,
    vp_stage: int | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    *,
    dynamic_cp: bool = False,
    config: object = None,
) -> Batch:
    """Returns the next microbatch of an iterator from `wrap_dataloader`, cut for this rank.

    Args:
        vpp_size, vp_stage: number of virtual stages on this rank, and which one asks (interleaving
            only).
        mtp_on_this_rank: whether layers here predict further tokens, which takes all fields. A
            stage between the first and the last has them where `pipeline_model_parallel_layout` of
            `wrap_dataloader`'s config places these layers there.
        dynamic_cp, config: as scripts of Megatron-LM's dev branch pass them. A context-parallel
            size for each pack is not supported: dynamic_cp=True raises ValueError, and config is
            ignored.
    """
    if dynamic_cp:
        raise ValueError(
            "dynamic_cp=True is not supported: all packs have one context-parallel size; pass "
            "dynamic_cp=False and --context-parallel-size"
        )
    microbatch = _next_microbatch(data_iterator, mtp_on_this_rank=mtp_on_this_rank)
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp"])
    device = device_of(groups.tp)
    params = packed_seq_params(microbatch, device)
    host_index = shard_index(params.padded_lengths, groups.cp.size(), groups.cp.rank())
    # Fields may be on the device already (`copied_ahead`), or still on the host.
    fields_device = microbatch["padding_mask"].device
    fields_index = None if host_index is None else to_device(host_index, fields_device)

    def to_shard(values: Tensor) -> Tensor:
        local = values if fields_index is None else values.index_select(0, fields_index)
        return to_device(local, device).unsqueeze(0)

    is_first = groups.pp.rank() == 0 and vp_stage in (None, 0)
    is_last = groups.pp.rank() == groups.pp.size() - 1 and (
        vpp_size is None or vp_stage == vpp_size - 1
    )
    fields: dict[str, Tensor | None] = dict.fromkeys(
        ("tokens", "labels", "loss_mask", "position_ids")
    )
    if is_first or mtp_on_this_rank:
        fields |= {name: to_shard(microbatch[name]) for name in ("tokens", "position_ids")}
    if is_last or mtp_on_this_rank:
        fields |= {name: to_shard(microbatch[name]) for name in ("labels", "loss_mask")}
        params.loss_rows = _loss_rows(microbatch, host_index, device)
    if "axis_positions" in microbatch:
        # [T, 3] -> [3, 1, T], uncut: the rotary embedding is made for the whole pack, then cut.
        fields["position_ids"] = to_device(microbatch["axis_positions"], device).T.unsqueeze(1)
    params.padding_mask = to_shard(microbatch["padding_mask"])  # see `layers.routers`
    batch = Batch(
        **fields,
        attention_mask=None,
        packed_seq_params=params,
        padding_mask=params.padding_mask,
    )
    if is_first and "payloads" in microbatch:
        batch.payloads = BatchPayloads.of(microbatch, host_index, device)
    if fields["labels"] is not None:
        batch.extra = _extra_columns(microbatch, host_index, device)
        if "num_paths" in microbatch:
            batch.num_paths = params.num_paths = to_shard(microbatch["num_paths"])
        if "path_pairs" in microbatch:
            batch.paths = _paths_of(microbatch, host_index, device)
    return batch


def _next_microbatch(
    data_iterator: Iterator[Any] | None, *, mtp_on_this_rank: bool
) -> dict[str, Any]:
    """Returns the next one; ValueError where the iterator gives none of ours, or one without the
    tokens that multi-token prediction needs.
    """
    if data_iterator is None:
        raise ValueError(
            "every rank must have a data iterator from wrap_dataloader, but this one has None; "
            "wrap_dataloader returns one on all ranks"
        )
    microbatch = next(data_iterator)
    needed = {"cu_seqlens_padded", "padding_mask"}
    if not (isinstance(microbatch, dict) and microbatch.keys() >= needed):
        raise ValueError(
            "the data iterator gave something else than a packed microbatch; call "
            "plugin.install(config, arguments) before get_forward_backward_func(), or pass the "
            "iterator through wrap_dataloader"
        )
    if mtp_on_this_rank and "tokens" not in microbatch:
        raise ValueError(
            "mtp_on_this_rank=True needs tokens, but this pipeline stage has none: the config that "
            "wrap_dataloader was given has no multi-token prediction here; place it here by its "
            "pipeline_model_parallel_layout, or pass mtp_on_this_rank=False"
        )
    return microbatch


def _loss_rows(
    microbatch: dict[str, Any], host_index: Tensor | None, device: torch.device
) -> Tensor | None:
    """Returns the tokens of this rank that count, int64 [n], found on the host: `head` must not
    wait for the device to find them. None where the mask is on the model's device alone.
    """
    mask: Tensor | None = microbatch.get("host_loss_mask", microbatch.get("loss_mask"))
    if mask is None or mask.device == device:
        return None
    local = mask if host_index is None else mask[host_index]
    return to_device(local.nonzero().squeeze(1), device)


def _extra_columns(
    microbatch: dict[str, Any], host_index: Tensor | None, device: torch.device
) -> dict[str, Tensor]:
    """Returns `Batch.extra`.

    host_index: the tokens of this context-parallel rank, on the host; None for all.
    """
    found: dict[str, Tensor] = {}
    for kind, columns in microbatch.items():
        for name, values in columns.items() if kind.startswith("extra_per_") else ():
            if kind != "extra_per_token":
                found[name] = to_device(values, device)
                continue
            local = values if host_index is None else values.index_select(0, host_index)
            found[name] = to_device(local, device).unsqueeze(0)
    return found


def _paths_of(
    microbatch: dict[str, Any], host_index: Tensor | None, device: torch.device
) -> PackPaths:
    """Returns `Batch.paths`.

    host_index: the tokens of this context-parallel rank, on the host; None for all.
    """
    token, path = microbatch["path_pairs"]
    expected = microbatch["extra_per_path"][PATH_TOKENS.name].long()
    num_tokens = torch.bincount(path, minlength=expected.numel())
    if host_index is not None:
        # Where each token of the pack is in this rank's shard; -1 if another rank holds it.
        # 4 tokens, host_index 0 3    ->    0 -1 -1 1
        local_index = torch.full((microbatch["padding_mask"].numel(),), -1)
        local_index[host_index] = torch.arange(host_index.numel())
        pair_local = local_index[token]
        token, path = pair_local[pair_local >= 0], path[pair_local >= 0]
    are_whole = torch.equal(num_tokens, expected)
    return PackPaths(
        token=to_device(token, device),
        path=to_device(path, device),
        num_tokens=to_device(num_tokens, device),
        are_whole=are_whole,
    )


def sources_of_tokens(microbatch: dict[str, Any], groups: ProcessGroupCollection) -> Tensor:
    """Returns the source of each token of this rank's shard: int64 [1, T / context-parallel size];
    padding is from 0 or from its sequence's, and masked. No collective.
    """
    lengths = microbatch["cu_seqlens_padded"].diff()
    host_index = shard_index(tuple(lengths.tolist()), groups.cp.size(), groups.cp.rank())
    sources = microbatch["sources"].repeat_interleave(lengths.long())
    local = sources if host_index is None else sources[host_index]
    return to_device(local, device_of(groups.tp)).unsqueeze(0)


def packed_seq_params(microbatch: dict[str, Any], device: torch.device) -> Any:
    """Returns the layout as megatron-core's modules take it: only the padded `cu_seqlens`, as if
    packs had no padding.

    The real ones are left out because

    - causal attention never reads padding, which follows its sequence;
    - Transformer Engine, given both, ignores padding after the last sequence, divides real lengths
      by the context-parallel size even if they are not multiples of it, and compares both on the
      host in every layer;
    - multi-token prediction would shift tokens by the real lengths.

    For Transformer Engine they are on the device. Without it, multi-token prediction reads them on
    the host, and a device tensor would cost host syncs.
    """
    on_host = microbatch["cu_seqlens_padded"]
    padded = to_device(on_host, device) if transformer_engine_installed() else on_host
    params: Any = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=padded,
        cu_seqlens_kv=padded,
        max_seqlen_q=microbatch["max_seqlen"],
        max_seqlen_kv=microbatch["max_seqlen"],
    )
    # `zigzag.padded_lengths` takes these: reading `cu_seqlens` from the device would sync.
    params.padded_lengths = tuple(end - start for start, end in pairwise(on_host.tolist()))
    params.has_axes = "axis_positions" in microbatch
    if microbatch.get("parents") is not None:
        params.tree = PackTree(
            params.padded_lengths,
            tuple(microbatch["cu_seqlens"].diff().tolist()),
            tuple(microbatch["parents"].tolist()),
            tuple(microbatch["depths"].tolist()),
        )
    return params
