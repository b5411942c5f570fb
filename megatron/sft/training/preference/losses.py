"""tensor. Preference losses as data: functions of numbers per pair, or per answer.

    numbers = Pairs(chosen, rejected, ...)      sums of log-probabilities, float [n] each
    LOSSES["sigmoid"].of(numbers, options)      ->  loss of each pair, [n]

In the comments c and r are the policy's sums for the chosen and the rejected answer, a and b are
these less the reference's, d = a - b, nc and nr are numbers of answer tokens, B is beta and e is
label smoothing. Nothing here knows of microbatches or ranks: means are taken over the global batch
(`objective`).

Sources: sigmoid DPO (arXiv 2305.18290), ipo (2310.12036), hinge SLiC (2305.10425), robust
(2403.00409), exo_pair (2402.00856), nca_pair (2402.05369), bco_pair (2404.04656), sppo_hard
(2405.00675), apo (2408.06266), discopop (2406.08414), sigmoid_norm (2411.15124), simpo
(2405.14734), cpo (2401.08417), orpo (2403.07691), kto (2402.01306), f-divergences (2309.16240),
ld_alpha (2409.06411).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

MAX_EXPONENT = 80.0
"""Largest exponent of the alpha divergence, as in TRL."""


class Options(Protocol):
    """Parameters of the losses, under TRL's names."""

    @property
    def beta(self) -> float: ...
    @property
    def label_smoothing(self) -> float: ...
    @property
    def gamma(self) -> float: ...
    @property
    def discopop_tau(self) -> float: ...
    @property
    def f_divergence_type(self) -> str: ...
    @property
    def f_alpha_divergence_coef(self) -> float: ...
    @property
    def desirable_weight(self) -> float: ...
    @property
    def undesirable_weight(self) -> float: ...


class Pairs(NamedTuple):
    """Numbers of n pairs; each tensor [n], float64 where losses are to be exact."""

    chosen: Tensor
    """Sum of the log-probabilities of the chosen answer's tokens."""
    rejected: Tensor
    reference_chosen: Tensor
    """The same of the reference; zeros in losses without one."""
    reference_rejected: Tensor
    num_chosen: Tensor
    """Number of tokens in the sum, at least 1."""
    num_rejected: Tensor

    @property
    def gains(self) -> tuple[Tensor, Tensor]:
        """Policy less reference of both answers: a and b."""
        return self.chosen - self.reference_chosen, self.rejected - self.reference_rejected


class Marked(NamedTuple):
    """Numbers of n answers that are marked as good or bad; each tensor [n]."""

    gains: Tensor
    """Policy less reference."""
    is_good: Tensor
    """bool"""
    divergence: Tensor
    """Estimate of the divergence of policy and reference, a scalar without a gradient (KTO)."""


class PairLoss(NamedTuple):
    """A loss of pairs."""

    of: Callable[[Pairs, Options], Tensor]
    """Function of n pairs to the loss of each, [n]."""
    takes_divergence: bool = False
    """True if --f-divergence-type applies."""


def scores(pairs: Pairs, options: Options) -> tuple[Tensor, Tensor]:
    """Returns a and b as the f-divergence has them."""
    a, b = pairs.gains
    function = DIVERGENCES[options.f_divergence_type]
    return function(a, options), function(b, options)


def _alpha_divergence(gains: Tensor, options: Options) -> Tensor:
    power = options.f_alpha_divergence_coef - 1
    return torch.expm1((power * gains).clamp(max=MAX_EXPONENT)) / power


DIVERGENCES: dict[str, Callable[[Tensor, Options], Tensor]] = {
    "reverse_kl": lambda gains, options: gains,
    "forward_kl": lambda gains, options: -torch.expm1(-gains),
    "js_divergence": lambda gains, options: math.log(2) + logsigmoid(gains),
    "alpha_divergence": _alpha_divergence,
}
"""Name of an f-divergence -> function that takes the place of a log-ratio."""


def _margin(pairs: Pairs, options: Options) -> Tensor:
    """Returns B d."""
    chosen, rejected = scores(pairs, options)
    return options.beta * (chosen - rejected)


def _mean_margin(pairs: Pairs, options: Options) -> Tensor:
    """Returns a / nc - b / nr."""
    chosen, rejected = scores(pairs, options)
    return chosen / pairs.num_chosen - rejected / pairs.num_rejected


def _smoothed(margin: Tensor, smoothing: float) -> Tensor:
    return -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)


def _sigmoid(pairs: Pairs, options: Options) -> Tensor:
    return -logsigmoid(_margin(pairs, options))


def _hinge(pairs: Pairs, options: Options) -> Tensor:
    return relu(1 - _margin(pairs, options))


def _ipo(pairs: Pairs, options: Options) -> Tensor:
    return (_mean_margin(pairs, options) - 1 / (2 * options.beta)) ** 2


def _sigmoid_norm(pairs: Pairs, options: Options) -> Tensor:
    return -logsigmoid(options.beta * _mean_margin(pairs, options))


def _robust(pairs: Pairs, options: Options) -> Tensor:
    # Unbiased where a share e of the pairs is turned round; it may be negative.
    margin, smoothing = _margin(pairs, options), options.label_smoothing
    turned = -(1 - smoothing) * logsigmoid(margin) + smoothing * logsigmoid(-margin)
    return turned / (1 - 2 * smoothing)


def _exo_pair(pairs: Pairs, options: Options) -> Tensor:
    margin, smoothing = _margin(pairs, options), options.label_smoothing
    share = margin.sigmoid()  # the gradient goes through it, too
    chosen = logsigmoid(margin) - math.log1p(-smoothing)
    rejected = logsigmoid(-margin) - math.log(smoothing)
    return share * chosen + (1 - share) * rejected


def _nca_pair(pairs: Pairs, options: Options) -> Tensor:
    a, b = (options.beta * gain for gain in pairs.gains)
    return -logsigmoid(a) - 0.5 * logsigmoid(-a) - 0.5 * logsigmoid(-b)


def _bco_pair(pairs: Pairs, options: Options) -> Tensor:
    a, b = (options.beta * gain for gain in pairs.gains)
    return -logsigmoid(a) - logsigmoid(-b)


def _sppo_hard(pairs: Pairs, options: Options) -> Tensor:
    (a, b), target = pairs.gains, 1 / (2 * options.beta)
    return (a - target) ** 2 + (b + target) ** 2


def _apo_zero(pairs: Pairs, options: Options) -> Tensor:
    a, b = (options.beta * gain for gain in pairs.gains)
    return (1 - a.sigmoid()) + b.sigmoid()


def _apo_down(pairs: Pairs, options: Options) -> Tensor:
    a, b = (options.beta * gain for gain in pairs.gains)
    return a.sigmoid() + (1 - (a - b).sigmoid())


def _discopop(pairs: Pairs, options: Options) -> Tensor:
    margin = _margin(pairs, options)
    share = (margin / options.discopop_tau).sigmoid()
    return -logsigmoid(margin) * (1 - share) + torch.exp(-margin) * share


DPO: dict[str, PairLoss] = {
    "sigmoid": PairLoss(_sigmoid, takes_divergence=True),
    "hinge": PairLoss(_hinge, takes_divergence=True),
    "ipo": PairLoss(_ipo, takes_divergence=True),
    "sigmoid_norm": PairLoss(_sigmoid_norm, takes_divergence=True),
    "robust": PairLoss(_robust, takes_divergence=True),
    "exo_pair": PairLoss(_exo_pair, takes_divergence=True),
    "discopop": PairLoss(_discopop, takes_divergence=True),
    "nca_pair": PairLoss(_nca_pair),
    "bco_pair": PairLoss(_bco_pair),
    "sppo_hard": PairLoss(_sppo_hard),
    "apo_zero": PairLoss(_apo_zero),
    "apo_down": PairLoss(_apo_down),
}
"""Losses of --loss dpo, which compare with a reference."""


def _mean_difference(pairs: Pairs) -> Tensor:
    return pairs.chosen / pairs.num_chosen - pairs.rejected / pairs.num_rejected


def _cpo_sigmoid(pairs: Pairs, options: Options) -> Tensor:
    return _smoothed(options.beta * (pairs.chosen - pairs.rejected), options.label_smoothing)


def _cpo_hinge(pairs: Pairs, options: Options) -> Tensor:
    return relu(1 - options.beta * (pairs.chosen - pairs.rejected))


def _cpo_ipo(pairs: Pairs, options: Options) -> Tensor:
    return (_mean_difference(pairs) - 1 / (2 * options.beta)) ** 2


def _simpo(pairs: Pairs, options: Options) -> Tensor:
    # gamma is absolute: the paper's ratio is gamma / beta.
    margin = options.beta * _mean_difference(pairs) - options.gamma
    return _smoothed(margin, options.label_smoothing)


def log_odds_ratio(pairs: Pairs) -> Tensor:
    """Returns log(odds of chosen / odds of rejected), of mean probabilities of a token, [n]."""
    chosen = _below_zero(pairs.chosen / pairs.num_chosen)
    rejected = _below_zero(pairs.rejected / pairs.num_rejected)
    # log(1 - exp(x)) as log(-expm1(x)): exp(x) near 1 would cancel.
    return (chosen - torch.log(-torch.expm1(chosen))) - (
        rejected - torch.log(-torch.expm1(rejected))
    )


def _below_zero(mean: Tensor) -> Tensor:
    # A sure answer, log-probability 0, has infinite odds, and NaN for a gradient. Here its odds are
    # huge, its loss 0 to rounding and its gradient 0.
    return mean.clamp(max=-1e-30 if mean.dtype == torch.float64 else -1e-20)


def _orpo(pairs: Pairs, options: Options) -> Tensor:
    return -options.beta * logsigmoid(log_odds_ratio(pairs))


CPO: dict[str, PairLoss] = {
    "sigmoid": PairLoss(_cpo_sigmoid),
    "hinge": PairLoss(_cpo_hinge),
    "ipo": PairLoss(_cpo_ipo),
    "simpo": PairLoss(_simpo),
}
"""Losses of --loss cpo, without a reference."""


def _kto(marked: Marked, options: Options) -> Tensor:
    z = options.beta * (marked.gains - marked.divergence)
    return _weighted(marked, 1 - z.sigmoid(), 1 - (-z).sigmoid(), options)


def _apo_zero_unpaired(marked: Marked, options: Options) -> Tensor:
    z = options.beta * marked.gains
    return _weighted(marked, 1 - z.sigmoid(), z.sigmoid(), options)


def _weighted(marked: Marked, good: Tensor, bad: Tensor, options: Options) -> Tensor:
    return torch.where(
        marked.is_good, options.desirable_weight * good, options.undesirable_weight * bad
    )


KTO: dict[str, Callable[[Marked, Options], Tensor]] = {
    "kto": _kto,
    "apo_zero_unpaired": _apo_zero_unpaired,
}
"""Losses of --loss kto, of answers that are marked as good or bad."""

SFT = "sft"
"""Loss type of mixtures: cross entropy of the chosen answers' tokens, a mean over tokens."""
LOSSES: dict[str, dict[str, PairLoss]] = {
    "dpo": DPO,
    "cpo": CPO,
    "simpo": {"simpo": CPO["simpo"]},
    "orpo": {"orpo": PairLoss(_orpo)},
}
"""--loss of pairs -> its --loss-type, the first by default."""


def pair_losses(
    loss: str, types: Sequence[str], weights: Sequence[float], pairs: Pairs, options: Options
) -> Tensor:
    """Returns the weighted sum of losses of each pair, [n]; `sft` is no loss of pairs, and is
    passed over.
    """
    total = torch.zeros_like(pairs.chosen)
    for name, weight in zip(types, weights, strict=True):
        if name != SFT:
            total = total + weight * LOSSES[loss][name].of(pairs, options)
    return total
