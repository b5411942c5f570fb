"""pure. Phi-3 and Phi-4."""

from __future__ import annotations

from megatron.sft.model.huggingface.families.config_fields import windows_config
from megatron.sft.model.huggingface.families.family import Family
from megatron.sft.model.huggingface.families.fused import GATE_UP, QKV

PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    norm_epsilon=1e-5,
    partial_rotary_factor=1.0,
    needs_key_value_heads=False,
    options=lambda config: config.windows(config.values.get("sliding_window"), (1,)),
    config=lambda model: windows_config(model) | {"partial_rotary_factor": model.rotary_percent},
    residual_dropout="resid_pdrop",
    rows=(QKV, GATE_UP),
)
