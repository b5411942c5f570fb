"""pure. Notes on values that are probably mistyped, or have no effect on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from megatron.sft.model.lora.peft_folder import notes_on_adapter
from megatron.sft.options.config import SFTConfig
from megatron.sft.options.preference import PreferenceConfig

MAX_LR = 0.01
"""Peak learning rates above it are probably mistyped: Adam trains with 1e-6 to 1e-3."""
MAX_WEIGHT_DECAY = 1.0
MAX_PREFERENCE_LR = {False: 2e-5, True: 2e-4}
"""True for LoRA -> learning rates above it mostly ruin what preference tuning begins with."""


def value_notes(config: SFTConfig) -> list[str]:
    """Returns lines for the log of a run."""
    return [
        *_notes_on_sizes(config),
        *_notes_on_rope(config),
        *_notes_on_exits(config),
        *_notes_on_kernels(config),
        *_notes_on_adapter(config),
        *_notes_on_scales(config),
    ]


def loss_notes(options: PreferenceConfig) -> Iterator[str]:
    """Yields a line on the loss of preference tuning, with the parameters that it reads."""
    if not options.is_on:
        return
    if options.scores_answers:
        centred = options.center_rewards_coefficient
        yield "--loss reward: scores of last tokens, means over the pairs of the global batch" + (
            f"; squared sums of a pair's scores x {centred:g}" * bool(centred)
        )
        return
    numbers, types = options.numbers, options.types
    names = [
        name if weight == 1 else f"{weight:g} x {name}"
        for name, weight in zip(types, options.weights)
    ]
    parts = [f"beta {numbers.beta:g}"]
    if "simpo" in types:
        parts.append(f"gamma {numbers.gamma:g}")
    if numbers.label_smoothing:
        parts.append(f"label smoothing {numbers.label_smoothing:g}")
    if options.nll_weight and "sft" not in types:
        parts.append(f"cross entropy of chosen answers x {options.nll_weight:g}")
    if options.sft_weight is not None:
        parts.append(f"cross entropy of plain chats x {options.sft_weight:g}")
    terms = "marked answers" if options.loss == "kto" else "pairs"
    yield (
        f"--loss {options.loss}: {' + '.join(names)}, {', '.join(parts)}; means over the {terms} "
        "of the global batch"
    )


def _notes_on_sizes(config: SFTConfig) -> Iterator[str]:
    training = config.training
    if training.lr > MAX_LR:
        yield (
            f"note: --lr {training.lr:g} is far above what Adam trains with (1e-6 to 1e-3, about "
            "1e-5 for all weights of a released model and 1e-4 for --lora)"
        )
    limit = MAX_PREFERENCE_LR[config.lora.lora]
    if config.preference.is_on and not config.preference.scores_answers and training.lr > limit:
        yield (
            f"note: --lr {training.lr:g} is high for --loss {config.preference.loss}, which "
            "usually trains with 5e-7 to 5e-6, and adapters with ten times that"
        )
    if training.lr == 0 and not config.preference.only_scores:
        yield "note: --lr 0 trains nothing"
    if training.weight_decay > MAX_WEIGHT_DECAY:
        yield (
            f"note: --weight-decay {training.weight_decay:g} is far above the usual 0.01 to 0.1, "
            "and is multiplied by the learning rate"
        )


def _notes_on_rope(config: SFTConfig) -> Iterator[str]:
    rope, length = config.model.rope, config.model.seq_length
    if rope is None or rope.rope_type != "longrope":
        return
    name, side = ("long_factor", "above") if rope.is_long(length) else ("short_factor", "within")
    yield (
        f"long rope: --seq-length {length} is {side} the "
        f"{rope.original_max_position_embeddings:g} positions of the model's first training, so "
        f"{name} rotates all samples, as in a server with that longest length"
    )


def _notes_on_exits(config: SFTConfig) -> Iterator[str]:
    training = config.training
    early = {
        "--exit-interval": training.exit_interval is not None,
        "--exit-duration-in-mins": training.exit_duration_in_mins is not None,
    }
    for flag in [flag for flag, is_given in early.items() if is_given and not config.output.save]:
        yield f"note: {flag} may end the run without a checkpoint to continue from; pass --save"


def _notes_on_adapter(config: SFTConfig) -> list[str]:
    folder = config.lora.lora_adapter
    return [] if folder is None else [f"note: {note}" for note in notes_on_adapter(folder)]


def _notes_on_scales(config: SFTConfig) -> Iterator[str]:
    lora = config.lora
    if lora.lora and lora.lora_rslora and config.output.save_hf and not lora.lora_merge:
        yield (
            f"note: --lora-rslora scales by {lora.lora_alpha:g} / sqrt({lora.lora_rank}); peft and "
            "vLLM read that from the adapter, SGLang 0.5 takes alpha / rank without a word: pass "
            "--lora-merge for it"
        )


def _notes_on_kernels(config: SFTConfig) -> Iterator[str]:
    if find_spec("transformer_engine") is not None:
        return
    backend, exchange = config.model.attention_backend, config.parallel.cp_comm_type
    if backend in ("flash", "fused", "unfused"):
        yield f"note: --attention-backend {backend} has no effect without Transformer Engine"
    if config.parallel.context_parallel_size > 1 and set(exchange) != {"p2p"}:
        yield f"note: --cp-comm-type {exchange[0]} has no effect without Transformer Engine"
