"""pure. Llama 2 to 3.3, and what is saved under its name."""

from __future__ import annotations

from megatron.sft.model.huggingface.families.biases import biases, biases_config
from megatron.sft.model.huggingface.families.family import Family

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    needs_key_value_heads=False,
    options=biases,
    config=biases_config,
)
