"""pure. Mistral 7B to Small 3, whose first release attends to a window."""

from __future__ import annotations

from megatron.sft.model.huggingface.families.family import Family

MISTRAL = Family(model_type="mistral", architecture="MistralForCausalLM", window=4096)
