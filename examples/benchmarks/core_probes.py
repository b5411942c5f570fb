"""Prints what an installed megatron-core does in each point that this project relies on, as JSON.

    python core_probes.py

It needs torch and megatron-core alone, no GPU and none of this project.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import tempfile
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any


def _fields(module: str, name: str) -> set[str]:
    return {field.name for field in dataclasses.fields(getattr(import_module(module), name))}


def fields_of_packs() -> str:
    """Returns the fields of PackedSeqParams beside those of 0.16.1."""
    known = {f"{name}_{side}" for name in ("cu_seqlens", "max_seqlen") for side in ("q", "kv")}
    known |= {f"cu_seqlens_{side}_padded" for side in ("q", "kv")}
    known |= {"qkv_format", "local_cp_size", "cp_group"}
    found = _fields("megatron.core.packed_seq_params", "PackedSeqParams")
    missing = sorted(known - found)
    return ", ".join(sorted(found - known)) + (f"; without {missing}" if missing else "") or "none"


def rope_of_packs() -> str:
    """Returns for which number of frequencies positions run on over the sequences of a pack."""
    import torch
    import torch.distributed as dist
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd

    borders = torch.tensor([0, 5, 8], dtype=torch.int32)
    angles = torch.outer(torch.arange(32.0), 1 / 10000 ** (torch.arange(0, 8, 2) / 8))
    frequencies = torch.cat([angles, angles], -1)[:, None, None]
    run_on = []
    for count in (5, 7, 8, 9):
        rotated = _apply_rotary_pos_emb_thd(
            torch.ones(8, 1, 8), borders, frequencies[:count], cp_group=dist.group.WORLD
        )
        if not torch.equal(rotated[5], rotated[0]):
            run_on.append(count)
    return f"run on with {run_on} frequencies for 8 tokens" if run_on else "restart"


def uninitialized_weights() -> str:
    """Returns whether weights that are not initialized are marked as shards."""
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    layer = ColumnParallelLinear(
        8, 8, config=config, init_method=config.init_method, bias=False, skip_bias_add=False
    )
    return "marked" if getattr(layer.weight, "tensor_model_parallel", False) else "not marked"


def loss_and_logits() -> str:
    """Returns whether the loss changes float32 logits."""
    import torch
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    logits = torch.randn(4, 1, 16)
    before = logits.clone()
    vocab_parallel_cross_entropy(logits, torch.arange(4)[:, None])
    return "kept" if torch.equal(logits, before) else "overwritten"


def labels_outside() -> str:
    """Returns what becomes of a label of -100."""
    import torch
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    logits = torch.randn(1, 1, 16).requires_grad_()
    vocab_parallel_cross_entropy(logits * 1.0, torch.tensor([[-100]])).sum().backward()
    assert logits.grad is not None
    return "trained" if logits.grad.abs().sum() > 0 else "ignored"


def optimizer_groups() -> str:
    """Returns by what a checkpoint finds groups of parameters."""
    module = import_module("megatron.core.optimizer.optimizer")
    keys = getattr(module, "param_group_identifier_keys", None)
    return "none" if keys is None else ", ".join(keys)


def prediction_loss() -> str:
    """Returns where the loss of multi-token prediction is computed."""
    module = import_module("megatron.core.transformer.multi_token_prediction")
    return "process_mtp_loss" if hasattr(module, "process_mtp_loss") else "in GPTModel"


def expert_gemm() -> str:
    """Returns what moe_utils has without Transformer Engine."""
    module = import_module("megatron.core.transformer.moe.moe_utils")
    return str(getattr(module, "te_general_gemm", "undefined"))


def routers_know_padding() -> str:
    """Returns whether routers take a mask of padding."""
    router = import_module("megatron.core.transformer.moe.router").TopKRouter
    return (
        "padding_mask" if "padding_mask" in inspect.signature(router.forward).parameters else "no"
    )


def local_attention() -> str:
    """Returns whether attention without Transformer Engine takes packs."""
    module = import_module("megatron.core.transformer.dot_product_attention")
    refuses = "Packed sequence is not supported" in inspect.getsource(module)
    return "refuses packs" if refuses else "takes packs"


def model_fields() -> str:
    """Returns which fields of TransformerConfig that families need are missing."""
    names = "window_size window_attn_skip_freq softmax_type no_rope_freq attention_output_gate"
    names += " moe_router_bias_update_rate activation_func_clamp_value glu_linear_offset"
    missing = set(names.split()) - _fields(
        "megatron.core.transformer.transformer_config", "TransformerConfig"
    )
    return f"without {', '.join(sorted(missing))}" if missing else "all"


def deprecated_model() -> str:
    """Returns whether GPTModel says that it is deprecated."""
    module = import_module("megatron.core.models.gpt.gpt_model")
    return "yes" if "deprecated" in inspect.getsource(module.GPTModel).lower() else "no"


def context_by_pack() -> str:
    """Returns the name of the field for context parallel by pack."""
    fields = _fields("megatron.core.model_parallel_config", "ModelParallelConfig")
    names = ("hybrid_context_parallel", "dynamic_context_parallel")
    return ", ".join(name for name in names if name in fields) or "none"


def packing_schedulers() -> str:
    """Returns the classes of datasets/data_schedule."""
    module = import_module("megatron.core.datasets.data_schedule")
    names = (name for name, found in vars(module).items() if inspect.isclass(found))
    own = [name for name in names if getattr(module, name).__module__ == module.__name__]
    return ", ".join(own)


PROBES: dict[str, Callable[[], str]] = {
    probe.__name__: probe
    for probe in (
        fields_of_packs,
        rope_of_packs,
        local_attention,
        uninitialized_weights,
        loss_and_logits,
        labels_outside,
        optimizer_groups,
        prediction_loss,
        routers_know_padding,
        expert_gemm,
        model_fields,
        context_by_pack,
        packing_schedulers,
        deprecated_model,
    )
}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    import torch.distributed as dist
    from megatron.core import package_info, parallel_state

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        found: dict[str, Any] = {
            "version": package_info.__version__,
            "torch": version("torch"),
        }
        for name, probe in PROBES.items():
            try:
                found[name] = probe()
            except Exception as error:  # what another release raises is what the table shows
                found[name] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
        dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
