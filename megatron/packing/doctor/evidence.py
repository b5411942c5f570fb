"""pure. Results of the experiments, before any of them has a name.

Differences are relative to the largest logit. Sequences of the pack are counted from 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """The same pack, run again."""

    difference: float = 0.0
    """Between two runs with the same seed, one after the other."""
    unseeded: float = 0.0
    """Between two runs with other seeds."""
    after_another: float = 0.0
    """Between a run after another pack and one after the same pack."""


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """Rows of one module that see one another: between the sequences A and B, and within them.

    A is the sequence that was disturbed, B the one that changed; where they are one sequence, a
    later token was disturbed and an earlier one changed.
    """

    module: str
    """Its name in the model."""
    module_class: str
    """Its class."""
    disturbed: int
    """Index of A."""
    changed: int
    """Index of B."""
    length_disturbed: int
    """Tokens of A."""
    length_changed: int
    """Tokens of B."""
    sources: tuple[int, ...] = ()
    """Tokens of A that tokens of B see; empty where rows could not be told apart."""
    targets: tuple[int, ...] = ()
    """Tokens of B that see tokens of A."""
    reach: int = 0
    """Tokens that a token sees within its own sequence, itself included, at most."""
    is_causal: bool = True
    """Whether no token sees a later one of its own sequence."""
    is_reordered: bool = False
    """Whether tokens see 1, 2, 3 ... tokens of their own sequence, in another order than theirs."""
    num_late: int = 0
    """First tokens of B that are taken for the end of A."""
    num_early: int = 0
    """Last tokens of A that are taken for the beginning of B."""


@dataclass(frozen=True, kw_only=True)
class LayerReach:
    """Tokens that one layer sees."""

    layer: str
    packed: int
    """At most, in the pack."""
    alone: int
    """At most, in a sequence that is run alone."""
    declared: int | None
    """As the model's configuration says."""


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """The loss of one token, as its gradient shows it."""

    pack: int
    sequence: int
    position: int
    label: int | None
    """The target, or None if the token is not trained."""
    weight: float | None
    """Its factor in the loss; None where rounding hides it."""
    expected: int | None
    """The target that it should have."""


@dataclass(frozen=True, kw_only=True)
class LossEvidence:
    """One step's loss, token by token."""

    tokens: tuple[TokenLoss, ...] = ()
    padding_trained: int = 0
    """Padding slots with a gradient."""
    num_slots: tuple[int, ...] = ()
    """Slots of each pack, padding included."""
    is_cross_entropy: bool = True
    """Whether every gradient has the form of a cross entropy's."""
    tolerance: float = 1e-3
    """Weights that differ by less, relatively, count as equal."""
    others: float = 0.0
    """Gradient at the embeddings of one sequence, of a loss that trains another only."""


@dataclass(frozen=True, kw_only=True)
class SequenceShare:
    """How much one sequence counts in a step."""

    pack: int
    sequence: int
    replica: int
    """Data-parallel replica that trained it."""
    num_trained: int
    weight: float
    share: float
    """1 if each of its tokens counts as in the declared mean."""


@dataclass(frozen=True, kw_only=True)
class StepNoise:
    """What rounding may do to the numbers of a step, as measured; 0 in float32 and float64, where
    it lies below what counts.
    """

    shares: float = 0.0
    residual: float = 0.0
    scale: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LossMistake:
    """A mistake of labels, and what the loss would be with it."""

    name: str
    """Key of `step_rows.LOSSES`."""
    num_trained: tuple[int, ...]
    """Tokens of each sequence that would be trained, or counted."""


@dataclass(frozen=True, kw_only=True)
class StepEvidence:
    """One optimizer step beside its sequences' own, and beside the loss."""

    shares: tuple[SequenceShare, ...]
    residual: float
    """Part of the step's length that is no sum of its sequences' own steps."""
    scale: float
    """Step beside the gradient of the loss."""
    norm: float | None
    """Reported norm beside the step's."""
    loss: float | None
    """Reported loss beside that of the samples' own labels."""
    mistakes: tuple[LossMistake, ...]
    """Those that would give the reported loss."""
    unequal: tuple[str, ...]
    """Parameters whose copies on several ranks change differently."""
    num_copies: dict[str, int]
    balances: bool
    reduction: str
    noise: StepNoise


@dataclass(kw_only=True)
class Evidence:
    """Results of all experiments that could be done."""

    subject: str
    lengths: tuple[int, ...]
    dtype: str = ""
    reduction: str = "token"
    """Mean that the loss is declared to be, as in Subject."""
    repeat: Repeat = field(default_factory=Repeat)
    exact: float = 0.0
    """What counts as changed where shapes are equal: anything above it."""
    tolerance: float = 0.0
    """What counts as changed between packs of other shapes."""
    not_finite: tuple[int, ...] = ()
    """Sequences with NaN among their logits in the pack."""
    influence: list[list[float]] = field(default_factory=list)
    """[A][B]: change of B's logits when tokens of A change from its middle on."""
    early: list[float] = field(default_factory=list)
    """Change of a sequence's logits before the tokens that were changed."""
    alone: list[float] = field(default_factory=list)
    """Difference of each sequence in the pack from itself alone."""
    alone_from: list[int | None] = field(default_factory=list)
    """First token at which it differs."""
    offset: list[float] = field(default_factory=list)
    """Change of each sequence's logits when the first is halved."""
    order: list[float] = field(default_factory=list)
    """Change of each sequence's logits when the order of the pack is reversed."""
    padding: float | None = None
    """Change of the logits with another token in padding slots; None if there are none."""
    rounding: float = 0.0
    """Part of that change that is how experts round."""
    backward: float | None = None
    """Largest gradient of one sequence's logits at another's embeddings, relative to its own."""
    lost: tuple[int, ...] = ()
    """Tokens of the middle sequence that its last one sees, on ranks to which no gradient of it
    comes back.
    """
    mixing: Mixing | None = None
    """The module in which the first crossing is born."""
    crossing_layers: tuple[str, ...] = ()
    """Layers that cross by themselves, of those in `examined_layers`."""
    examined_layers: tuple[str, ...] = ()
    reach: tuple[LayerReach, ...] = ()
    loss: LossEvidence | None = None
    step: StepEvidence | None = None
    notes: list[str] = field(default_factory=list)
    """Experiments that could not be done, and why."""
    num_forwards: int = 0
    num_backwards: int = 0

    @property
    def crossings(self) -> list[tuple[int, int]]:
        """Returns pairs (A, B) of sequences of which B sees A."""
        return [
            (one, other)
            for one, row in enumerate(self.influence)
            for other, value in enumerate(row)
            if one != other and not value <= self.exact
        ]

    @property
    def across(self) -> float:
        """Returns the largest influence of one sequence on another."""
        return max((self.influence[one][other] for one, other in self.crossings), default=0.0)

    def differs_alone(self) -> list[int]:
        """Returns the sequences that are others in the pack than alone."""
        return [index for index, value in enumerate(self.alone) if not value <= self.tolerance]

    def keeps_state(self) -> bool:
        """Returns whether a run depends on the one before it."""
        return not self.repeat.after_another <= 8 * self.repeat.difference

    def moves(self) -> list[int]:
        """Returns the sequences whose logits depend on where in the pack they begin."""
        return [index for index, value in enumerate(self.offset) if not value <= self.tolerance]

    def sees_padding(self) -> bool:
        """Returns whether real tokens see padding."""
        return self.padding is not None and not self.padding <= max(self.exact, self.rounding)

    def is_causal(self) -> bool:
        """Returns whether no token sees a later one of its own sequence."""
        return all(value <= self.exact for value in self.early)
