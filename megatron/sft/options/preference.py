"""pure. Options of preference tuning, under TRL's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from megatron.packing.rules import Rule, above_zero, at_least, check_rules, exclude, in_range

Loss = Literal["sft", "dpo", "simpo", "orpo", "cpo", "kto", "reward"]
LOSS_TYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "sft": (),
        "dpo": (
            *("sigmoid", "hinge", "ipo", "sigmoid_norm", "robust", "exo_pair", "discopop"),
            *("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "sft"),
        ),
        "simpo": ("simpo",),
        "orpo": ("orpo",),
        "cpo": ("sigmoid", "hinge", "ipo", "simpo"),
        "kto": ("kto", "apo_zero_unpaired"),
        "reward": ("reward",),
    }
)
"""--loss -> its values of --loss-type, the default first."""
LEFT_OUT: Mapping[str, str] = MappingProxyType(
    {
        "aot": "it sorts the pairs of a microbatch, so that it depends on the layout",
        "aot_unpaired": "it sorts the answers of a microbatch, so that it depends on the layout",
        "aot_pair": "it sorts the pairs of a microbatch, so that it depends on the layout",
        "kto_pair": "pass --loss kto with marked answers",
        "wpo": "its weights need sums of squared probabilities of each token",
        "chosen_nll": "it is sft in --loss-type here",
    }
)
"""Loss types of TRL that are not computed -> why, or what to do."""
WITH_DIVERGENCE = ("sigmoid", "hinge", "ipo", "sigmoid_norm", "robust", "exo_pair", "discopop")
"""Loss types that --f-divergence-type applies to."""
BETAS = {"simpo": 2.5}
"""--loss -> default of --beta; 0.1 for others."""
GAMMAS = {"simpo": 1.375}
"""--loss -> default of --simpo-gamma, that of SimPO's authors; 0.5 for others."""
REFERENCED = ("dpo", "kto")
"""--loss values that compare with a reference model."""


def _wrong_type(options: Any) -> dict[str, str] | None:
    known = LOSS_TYPES[options.loss]
    for name in options.loss_type:
        if name in known and name != "sft":
            continue
        if name == "sft" and name in known and len(options.loss_type) > 1:
            continue
        why = LEFT_OUT.get(name, f"those of --loss {options.loss} are {', '.join(known)}")
        parts = re.findall(r"\w+", name)
        if len(parts) > 1 and {*parts} <= {*known}:
            why = f"several stand side by side: --loss-type {' '.join(parts)}"
        if name == "sft" and name in known:
            why = "alone it is --loss sft; it stands beside another"
        return {"name": name, "reason": why}
    return None


def _unread(option: str, *uses: tuple[str, str], default: object = None) -> Rule:
    """Returns the rule of an option that only some losses read.

    uses: values of --loss and --loss-type ("" for each) that read it.
    """
    listed = " or ".join(
        f"--loss {loss}" + f" --loss-type {kind}" * bool(kind) for loss, kind in uses
    )
    return Rule(
        when=lambda options: (
            getattr(options, option) != default
            and not any(
                options.loss == loss and (not kind or kind in options.types) for loss, kind in uses
            )
        ),
        why=f"{{{option}.flag}} is read by {listed} only",
        way_out="drop it",
    )


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """Preference tuning."""

    loss: Loss = "sft"
    """Loss to train with. sft: cross entropy of answers; dpo, cpo, simpo, orpo: pairs of a chosen
    and a rejected answer; kto: answers that are marked as good or bad; reward: a reward model, with
    a score of each answer's last token in place of the output layer, of pairs.
    """
    loss_type: tuple[str, ...] = field(default=(), metadata={"only_with": "loss!=sft"})
    """Variants of --loss, as TRL calls them; several are added with --loss-weights (default: its
    first). dpo: sigmoid, hinge, ipo, sigmoid_norm, robust, exo_pair, discopop, nca_pair, bco_pair,
    sppo_hard, apo_zero, apo_down, and sft beside others; cpo: sigmoid, hinge, ipo, simpo; kto: kto,
    apo_zero_unpaired.
    """
    loss_weights: tuple[float, ...] = field(default=(), metadata={"only_with": "loss_type"})
    """Weight of each --loss-type (default: 1)."""
    beta: float | None = field(default=None, metadata={"only_with": "loss!=sft"})
    """Scale of log-ratios (default: 0.1, of simpo 2.5); of orpo the weight of its odds ratio."""
    label_smoothing: float = field(default=0.0, metadata={"only_with": "loss!=sft"})
    """Share of pairs taken to be turned round; read by robust, exo_pair (default there: 0.001), cpo
    and simpo. TRL's sigmoid does not read it either.
    """
    simpo_gamma: float | None = field(default=None, metadata={"only_with": "loss!=sft"})
    """Target margin of simpo, absolute; SimPO's paper states gamma / beta (default: 1.375 of
    --loss simpo, 0.5 of --loss cpo).
    """
    cpo_alpha: float | None = field(default=None, metadata={"only_with": "loss=cpo|loss=simpo"})
    """Weight of the cross entropy of chosen answers in cpo (default: 1) and simpo (default: 0)."""
    ld_alpha: float | None = field(default=None, metadata={"only_with": "loss=dpo"})
    """Weight of the tokens of an answer that are behind the length of the pair's shorter one, 0 to
    1 (default: 1).
    """
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = (
        field(default="reverse_kl", metadata={"only_with": "loss=dpo"})
    )
    """Divergence from the reference that dpo bounds."""
    f_alpha_divergence_coef: float = field(
        default=0.5, metadata={"only_with": "f_divergence_type=alpha_divergence"}
    )
    """Alpha of alpha_divergence."""
    discopop_tau: float = field(default=0.05, metadata={"only_with": "loss=dpo"})
    """Temperature of discopop."""
    desirable_weight: float = field(default=1.0, metadata={"only_with": "loss=kto"})
    """Weight of good answers in kto."""
    undesirable_weight: float = field(default=1.0, metadata={"only_with": "loss=kto"})
    """Weight of bad answers in kto."""
    sft_weight: float | None = field(
        default=None, metadata={"only_with": "loss=dpo|loss=cpo|loss=simpo|loss=orpo|loss=kto"}
    )
    """Weight of the cross entropy of plain chats among the records, a mean over their tokens, which
    is added to the loss (default: a record that is no pair is an error).
    """
    center_rewards_coefficient: float = field(default=0.0, metadata={"only_with": "loss=reward"})
    """Weight of the squared sum of both scores of a pair, which keeps scores near 0 (0.01 is usual)
    in reward.
    """
    answer_tokens: Literal["turn", "trl"] = field(
        default="turn", metadata={"only_with": "loss!=sft"}
    )
    """Tokens of an answer that count. turn: from the end of the generation prompt to the end of the
    assistant's turn; trl: all behind the prompt, as in TRL, with what a template writes behind the
    turn and with the user's turns of an answer of several turns.
    """

    reference_file: str | None = field(default=None, metadata={"only_with": "loss!=sft"})
    """File of megatron-sft score with the reference's log-probabilities, in place of a copy of the
    weights.
    """
    write_reference_file: str | None = field(default=None, metadata={"only_with": "loss!=sft"})
    """Score the answers of all records into this file and end: what megatron-sft score does."""
    write_scores: str | None = field(default=None, metadata={"only_with": "loss=reward"})
    """Write a reward model's scores of all records' answers into this file, as JSON lines, and end:
    what megatron-sft score --write-scores does.
    """

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            when=lambda options: (
                (options.reference_file or options.write_reference_file)
                and options.loss not in REFERENCED
            ),
            why="{loss} has no reference",
            way_out="drop {reference_file.flag}",
        ),
        Rule(
            when=lambda options: (
                options.loss == "kto"
                and "kto" in options.types
                and (options.reference_file or options.write_reference_file)
            ),
            why="{reference_file.flag} has no log-probabilities of the answers to other prompts "
            "that --loss-type kto compares with",
            way_out="drop it, or pass --loss-type apo_zero_unpaired",
        ),
        exclude("reference_file", "write_reference_file"),
        Rule(
            when=lambda options: options.loss == "reward" and options.beta is not None,
            why="{beta.flag} is not read by {loss}, whose scores have no scale to choose",
            way_out="drop it",
        ),
        Rule(
            when=lambda options: options.loss == "reward" and options.answer_tokens != "turn",
            why="{answer_tokens.flag} is not read by {loss}: the last token of the whole rendering "
            "is scored, as transformers does",
            way_out="drop it",
        ),
        *at_least(0, "center_rewards_coefficient", "sft_weight"),
        Rule(
            when=_wrong_type,
            why="{loss_type.flag} {name} is not offered with {loss}: {reason}",
        ),
        Rule(
            when=lambda options: (
                options.loss_weights and len(options.loss_weights) != len(options.types)
            ),
            why="{loss_weights.flag} must be one number for each of {loss_type}",
        ),
        Rule(
            when=lambda options: not all(isfinite(w) and w >= 0 for w in options.loss_weights),
            why="{loss_weights.flag} must be finite numbers of at least 0",
        ),
        *above_zero("beta", "discopop_tau"),
        *at_least(0, "simpo_gamma", "cpo_alpha", "desirable_weight", "undesirable_weight"),
        *in_range(0, 1, "ld_alpha"),
        Rule(
            when=lambda options: not 0 <= options.label_smoothing < 0.5,
            why="{label_smoothing.flag} must be from 0 to below 0.5, but is "
            "{label_smoothing.value}",
        ),
        Rule(
            when=lambda options: (
                options.label_smoothing
                and options.loss in ("dpo", "kto", "orpo", "reward")
                and not {"robust", "exo_pair"} & {*options.types}
            ),
            why="{label_smoothing.flag} is read by robust, exo_pair, cpo and simpo only, as in TRL",
            way_out="drop it, or pass {loss_type.flag} robust",
        ),
        Rule(
            when=lambda options: not isfinite(options.f_alpha_divergence_coef),
            why="{f_alpha_divergence_coef.flag} must be a finite number",
        ),
        Rule(
            when=lambda options: options.f_alpha_divergence_coef == 1,
            why="{f_alpha_divergence_coef.flag} must not be 1, at which alpha_divergence is "
            "reverse_kl",
            way_out="pass {f_divergence_type.flag} reverse_kl",
        ),
        Rule(
            when=lambda options: (
                options.f_divergence_type != "reverse_kl"
                and {*options.types} - {*WITH_DIVERGENCE, "sft"}
            ),
            why="{f_divergence_type} is read by " + ", ".join(WITH_DIVERGENCE) + " only",
            way_out="drop one",
        ),
        _unread("simpo_gamma", ("simpo", ""), ("cpo", "simpo")),
        _unread("discopop_tau", ("dpo", "discopop"), default=0.05),
    )

    def __post_init__(self) -> None:
        check_rules(self.rules, options=self)

    @property
    def is_on(self) -> bool:
        """True for any loss but sft."""
        return self.loss != "sft"

    @property
    def scores_answers(self) -> bool:
        """True if a reward model is trained: its head gives a score in place of words."""
        return self.loss == "reward"

    @property
    def only_scores(self) -> bool:
        """True if the run writes scores, and trains nothing."""
        return (self.write_reference_file or self.write_scores) is not None

    @property
    def types(self) -> tuple[str, ...]:
        """--loss-type, or its default."""
        return self.loss_type or LOSS_TYPES[self.loss][:1]

    @property
    def weights(self) -> tuple[float, ...]:
        """Weight of each of `types`."""
        return self.loss_weights or (1.0,) * len(self.types)

    @property
    def needs_reference(self) -> bool:
        """True if the loss compares with a reference model."""
        return self.loss in REFERENCED

    @property
    def computes_reference(self) -> bool:
        """True if each step also runs the reference forward, instead of reading a file."""
        given = self.reference_file or self.write_reference_file
        return self.needs_reference and given is None

    @property
    def num_forward_passes(self) -> int:
        """Forward passes of a step beside those of training: of the reference, and of the model for
        KTO's divergence.
        """
        estimates = self.loss == "kto" and "kto" in self.types
        return self.computes_reference + estimates

    @property
    def numbers(self) -> LossNumbers:
        """Parameters of the losses, with their defaults."""
        smoothing = self.label_smoothing
        return LossNumbers(
            beta=BETAS.get(self.loss, 0.1) if self.beta is None else self.beta,
            label_smoothing=smoothing or (1e-3 if "exo_pair" in self.types else 0.0),
            gamma=GAMMAS.get(self.loss, 0.5) if self.simpo_gamma is None else self.simpo_gamma,
            discopop_tau=self.discopop_tau,
            f_divergence_type=self.f_divergence_type,
            f_alpha_divergence_coef=self.f_alpha_divergence_coef,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )

    @property
    def nll_weight(self) -> float:
        """Weight of the cross entropy of chosen answers beside the loss of pairs; 0 for none."""
        if self.loss in ("cpo", "simpo"):
            alpha = self.cpo_alpha
            return float(self.loss == "cpo") if alpha is None else alpha
        if self.loss == "orpo":
            return 1.0
        return sum(weight for name, weight in zip(self.types, self.weights) if name == "sft")

    @property
    def nll_of_prompt(self) -> bool:
        """True if that cross entropy counts the prompt's tokens, too (ORPO)."""
        return self.loss == "orpo"


@dataclass(frozen=True, kw_only=True)
class LossNumbers:
    """Parameters that `training.preference.losses` reads."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.5
    discopop_tau: float = 0.05
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
