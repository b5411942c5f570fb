"""pure. The values of a metadataset's tree: sources at its leaves, blends and joins above them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

DATASET_CONFIG = "dataset.yaml"
SPLIT_CONFIG = "split.yaml"


@dataclass(frozen=True)
class Subset:
    """Part of a source: records [start, end), and of these the fractions [from_share, to_share)."""

    start: int = 0
    end: int | None = None
    from_share: Fraction = Fraction(0)
    to_share: Fraction = Fraction(1)

    def of(self, size: int) -> range:
        """Returns the records of a source of `size` that belong to the subset; ValueError if it is
        not so large.

        Both ends are rounded down, so adjoining subsets share nothing and leave nothing out.
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
        """Returns nothing for all of a source, else what of it: " [10, 20)", " [0, end) from 1/2 to
        3/4".
        """
        records = f" [{self.start}, {'end' if self.end is None else self.end})"
        shares = (
            f" from {self.from_share} to {self.to_share}"
            if (self.from_share, self.to_share) != (0, 1)
            else ""
        )
        return "" if self == Subset() else records + shares

    def within(self, outer: "Subset") -> "Subset":
        """Returns the part `outer`, a subset in shares, of this one: 50-100 % of 0-50 % is 25-50
        %."""
        width = self.to_share - self.from_share
        start = self.from_share + outer.from_share * width
        end = self.from_share + outer.to_share * width
        return replace(self, from_share=start, to_share=end)


EVERYTHING = Subset()


@dataclass(frozen=True, kw_only=True)
class SourceEntry:
    """One source of records."""

    path: str
    split_part: str
    subflavors: Mapping[str, Any] = field(default_factory=dict)
    """Values that the metadatasets add to, and change in, the subflavors of the source's own
    dataset.yaml.
    """
    shuffle_over_epochs_multiplier: int | None = 1
    dataset_config: str = DATASET_CONFIG
    split_config: str = SPLIT_CONFIG
    subset: Subset = EVERYTHING
    aux: Mapping[str, str] = field(default_factory=dict)
    where: str = ""
    """Start of errors about this source: "blend.yaml:7: splits.train.blend[2]"."""


@dataclass(frozen=True, kw_only=True)
class Blend:
    """A Blend has sources in shares. The weights are any numbers of at least 0, not all 0."""

    children: "tuple[tuple[Node, float], ...]"
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class Epochized:
    """Its sources are read through, each so many times, per epoch of the whole."""

    children: "tuple[tuple[Node, float], ...]"
    where: str = ""


@dataclass(frozen=True)
class JoinLeg:
    name: str | None
    entry: SourceEntry
    nonmatch: str


@dataclass(frozen=True, kw_only=True)
class Join:
    """Samples of equal key make one sample. The first source is the primary, which gives keys and
    order.
    """

    legs: tuple[JoinLeg, ...]
    joiner: tuple[str, str]
    subflavors: Mapping[str, Any] = field(default_factory=dict)
    shuffle_over_epochs_multiplier: int | None = 1
    subset: Subset = EVERYTHING
    where: str = ""


Node = SourceEntry | Blend | Epochized | Join


def flattened(node: Node) -> tuple[type, list[tuple[SourceEntry | Join, Fraction]]]:
    """Returns what the top of a tree is, and its sources with their shares of the whole, or
    repetitions per epoch.

    Shares multiply from level to level, each level normalised by its sum: 2 and 1 within 5 of 8 are
    10/24 and 5/24.
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
    """Yields the sources of a tree, in order."""
    if isinstance(node, (SourceEntry, Join)):
        yield node
    else:
        for child, _ in node.children:
            yield from source_entries(child)
