"""pure. Layout options given to `plan --auto-layout`: those of the command line are kept, those of
a run's YAML file are what is searched for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from megatron.packing.flags import flag_of
from megatron.planner.layout.search import Candidate
from megatron.sft.options.config import GROUPS, SFTConfig


def _options_of(candidate: Candidate, num_layers: int) -> dict[str, Any]:
    """Returns the options that the search decides, in a layout."""
    options = candidate.options(num_layers)
    return options | {"num_virtual_stages_per_pipeline_rank": candidate.vpp}


_DECIDED = frozenset(_options_of(Candidate(), num_layers=1))


@dataclass(frozen=True)
class FixedLayout:
    """The layout options of the command line, by field name."""

    values: dict[str, Any]
    of_file: tuple[str, ...]
    """Layout options that only the YAML file has."""

    @classmethod
    def read(cls, config: SFTConfig, arguments: Sequence[str]) -> FixedLayout:
        """Returns those of a command line whose options are `config`."""
        typed = {word.split("=", 1)[0].replace("--no-", "--", 1) for word in arguments}
        parts = (getattr(config, field.name) for field in fields(config))
        given = {
            field.name: getattr(part, field.name)
            for part, group in zip(parts, GROUPS)
            for field in fields(group)
            if field.name in _DECIDED
            and (flag_of(field.name) in typed or getattr(part, field.name) != field.default)
        }
        # The search packs; run files that do so say nothing that it would change.
        of_file = tuple(n for n in given if flag_of(n) not in typed and n != "sequence_packing")
        return cls({n: v for n, v in given.items() if flag_of(n) in typed}, of_file)

    @property
    def capacity(self) -> int | None:
        """Tokens of a pack per rank; None if they are searched for."""
        return self.values.get("max_seqlen_per_dp_cp_rank")

    def matching(self, candidates: Iterable[Candidate], num_layers: int) -> Iterator[Candidate]:
        """Yields the layouts that have these values. Raises ValueError after the last one if there
        was none.
        """
        is_empty = True
        for one in candidates:
            options = _options_of(one, num_layers)
            if all(options[name] == value for name, value in self.values.items()):
                is_empty = False
                yield one
        if is_empty:
            given = " ".join(_as_flags(name, value) for name, value in self.values.items())
            raise ValueError(f"the search has no layout with {given}; change or drop that")

    def notes(self) -> list[str]:
        """Returns a line about options that are not kept."""
        flags = ", ".join(map(flag_of, self.of_file))
        line = f"note: {flags} of --config are searched for; pass them as flags to keep them"
        return [line] if self.of_file else []


def _as_flags(name: str, value: object) -> str:
    if isinstance(value, bool):
        return flag_of(name if value else f"no_{name}")
    return f"{flag_of(name)} {value}"
