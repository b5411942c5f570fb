"""A layout that forgets the borders of a pack, for faults that are patched into scripts."""

import copy

from megatron.core import parallel_state


def joined(params, only_last=False):
    """The layout of one sequence as long as the pack; with only_last, on the last stage alone."""
    if only_last and not parallel_state.is_pipeline_last_stage():
        return params
    changed = copy.copy(params)
    changed.padded_lengths = (sum(params.padded_lengths),)
    changed.max_seqlen_q = changed.max_seqlen_kv = sum(params.padded_lengths)
    changed.cu_seqlens_q = changed.cu_seqlens_kv = params.cu_seqlens_q[[0, -1]]
    return changed
