"""pure. The values of a metadataset's tree: sources at its leaves, blends and joins above them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

DATASET_CONFIG = "dataset.yaml"
SPLIT_CONFIG = "split.yaml"


@dataclass(frozen=True)
class Subset:
    """A part of a source: of its records [start, end) the fractions [from_share, to_share)."""

    start: int = 0
    end: int | None = None
    from_share: Fraction = Fraction(0)
    to_share: Fraction = Fraction(1)

    def of(self, size: int) -> range:
        """Returns the records of the subset in a source of `size` records. Raises ValueError if the
        source is smaller than `end`.

        Both ends are rounded down, so that adjacent subsets have no record in common and miss none:
        of 5 records, 0-50 % are range(0, 2) and 50-100 % are range(2, 5).
        """
        end = size if self.end is None else self.end
        if not self.start <= end <= size:
            raise ValueError(
                f"subset [{self.start}, {end}) is beyond the {size} samples that there are"
            )
        count = end - self.start
        return range(
            self.start + int(count * self.from_share), self.start + int(count * self.to_share)
        )

    def __str__(self) -> str:
        """Returns "" for the whole source, else " [10, 20)" or " [0, end) from 1/2 to 3/4"."""
        records = f" [{self.start}, {'end' if self.end is None else self.end})"
        shares = (
            f" from {self.from_share} to {self.to_share}"
            if (self.from_share, self.to_share) != (0, 1)
            else ""
        )
        return "" if self == Subset() else records + shares

    def within(self, outer: "Subset") -> "Subset":
        """Returns the shares of `outer` taken of this subset: 50-100 % of 0-50 % are 25-50 %."""
        width = self.to_share - self.from_share
        start = self.from_share + outer.from_share * width
        end = self.from_share + outer.to_share * width
        return replace(self, from_share=start, to_share=end)


EVERYTHING = Subset()


@dataclass(frozen=True, kw_only=True)
class SourceEntry:
    """One source of records: a file or a prepared folder."""

    path: str
    split_part: str
    """Part of a prepared folder to read: train, val or test."""
    subflavors: Mapping[str, Any] = field(default_factory=dict)
    """Subflavors of the metadatasets, which take precedence over those of the source's
    dataset.yaml.
    """
    shuffle_over_epochs_multiplier: int | None = 1
    """Number of epochs that are shuffled together; None: no shuffling, -1: at random with
    replacement.
    """
    dataset_config: str = DATASET_CONFIG
    split_config: str = SPLIT_CONFIG
    subset: Subset = EVERYTHING
    aux: Mapping[str, str] = field(default_factory=dict)
    """Name of a side store -> its location."""
    where: str = ""
    """Place of the entry, for errors: "blend.yaml:7: splits.train.blend[2]"."""


@dataclass(frozen=True, kw_only=True)
class Blend:
    """Children mixed in proportion to their weights, which are at least 0 and not all 0."""

    children: "tuple[tuple[Node, float], ...]"
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class Epochized:
    """Children with repetitions: in an epoch of the whole, each is read this many times."""

    children: "tuple[tuple[Node, float], ...]"
    where: str = ""


@dataclass(frozen=True)
class JoinLeg:
    """One source of a join."""

    name: str | None
    """Argument of the joiner for its sample; None for positional arguments."""
    entry: SourceEntry
    nonmatch: str
    """Action for a key that it lacks: "error", "skip" (the key) or "none" (None as its sample)."""


@dataclass(frozen=True, kw_only=True)
class Join:
    """Sources whose samples of the same key are joined to one. The first source is the primary:
    keys and their order are its own.
    """

    legs: tuple[JoinLeg, ...]
    joiner: tuple[str, str]
    subflavors: Mapping[str, Any] = field(default_factory=dict)
    shuffle_over_epochs_multiplier: int | None = 1
    subset: Subset = EVERYTHING
    where: str = ""


Node = SourceEntry | Blend | Epochized | Join


def flattened(node: Node) -> tuple[type, list[tuple[SourceEntry | Join, Fraction]]]:
    """Returns the type of the top node, and all sources with their shares of the whole, or with
    their repetitions per epoch if the top is `Epochized`.

    Shares are normalised on each level, and multiplied from level to level: weights 2 and 1 in a
    group with weight 5 of 8 give 2/3 * 5/8 = 10/24 and 1/3 * 5/8 = 5/24.
    """
    if isinstance(node, (SourceEntry, Join)):
        return type(node), [(node, Fraction(1))]
    shares = [Fraction(str(share)) for _, share in node.children]
    total = sum(shares) if isinstance(node, Blend) else 1
    return type(node), [
        (entry, share / total * inner)
        for (child, _), share in zip(node.children, shares)
        for entry, inner in flattened(child)[1]
    ]


def source_entries(node: Node) -> Iterator[SourceEntry | Join]:
    """Yields the sources of a tree, in order, however deep they are."""
    if isinstance(node, (SourceEntry, Join)):
        yield node
    else:
        for child, _ in node.children:
            yield from source_entries(child)
