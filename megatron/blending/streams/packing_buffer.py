"""pure. PackingDataset packs samples by a user's functions: which of a buffer go together, and what
they make.

Samples that are chosen for no pack stay in the buffer, in front, and are offered again.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from megatron.blending.arguments import check_function, check_no_more, check_one_of, check_whole
from megatron.blending.streams.failures import FatalSampleError, NotChosen
from megatron.blending.streams.holder import ShardEnd
from megatron.blending.streams.holding import at_of, packed_origins, unpacked_origins
from megatron.blending.streams.node import Binding, Origin, SavableDataset, SkipMarker
from megatron.blending.streams.sample_buffer import BufferDataset, BufferState
from megatron.blending.streams.seeding import At
from megatron.blending.streams.worker_config import WorkerConfig

OVER_LONG = ("error", "alone", "drop")
# What energon's takes besides, and nothing here needs.
_ENERGON_ONLY = (
    *("final_packer_stateless", "sample_encoder_stateless", "packer_config", "error_handler"),
    *(f"{name}_failure_tolerance" for name in ("pre_packer", "final_packer", "sample_encoder")),
)
_MAX_OFFERS = 16
_MAX_COPIES = 20_000
_OF_COPIES = (-1, 0)


def _same(sample: Any) -> Any:
    return sample


class PackingHolder(BufferState):
    """It holds (origin, value, how often it was offered), and groups of (origin, value) that were
    chosen.
    """

    node: "PackingDataset"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._buffer: list[tuple[Any, Any, int]] = []
        self._groups: list[list[tuple[Any, Any]]] = []

    def gather(self) -> tuple[list[Any], list[Any]]:
        self.remake()
        while True:
            while not self._groups:
                self._choose()
            group = self._encoded(self._groups.pop(0))
            if group:
                return [origin for origin, _ in group], [value for _, value in group]

    def _choose(self) -> None:
        """Fill the buffer, and have groups chosen of it; ShardEnd if nothing is left."""
        is_full = self._fill()
        if not self._buffer:
            raise ShardEnd
        values, at = [value for _, value, _ in self._buffer], at_of(self._buffer[0][0])
        try:
            chosen = self._selected(values, at)
        except Exception as error:
            # Whatever it does not take is left out, as with any other function.
            origin, self._buffer = self._buffer[0][0], []
            self.leave_out(
                SkipMarker(self.node.number, self.node.pre_packer, error, values), origin
            )
            return
        # One object may stand there for several samples.
        by_id: dict[int, list[tuple[Any, Any, int]]] = {}
        for held in reversed(self._buffer):
            by_id.setdefault(id(held[1]), []).append(held)
        for group in chosen:
            members = [by_id[id(value)].pop()[:2] for value in group if by_id.get(id(value))]
            if len(members) < len(group):
                raise FatalSampleError(
                    "select_samples_to_pack must return lists of the samples that it was given, "
                    "each at most once"
                )
            if members:
                self._groups.append(members)
        left = []
        for held in self._buffer:
            if by_id[id(held[1])] and by_id[id(held[1])][-1] is held:
                by_id[id(held[1])].pop()
                left.append((*held[:2], held[2] + 1))
        if not is_full and not self._groups:
            self._end_with(left)
            return
        self._buffer = []
        is_stuck = not self._groups
        for number, (origin, value, offers) in enumerate(left):
            is_late = is_full and self._is_late(value, offers)
            if (is_stuck and number == 0) or is_late:
                self._over_long(origin, value)
            else:
                self._buffer.append((origin, value, offers if is_full else 0))

    def _is_late(self, value: object, offers: int) -> bool:
        if offers >= _MAX_OFFERS and self.node.over_long != "error":
            return True
        return offers > 1 and offers & (offers - 1) == 0 and id(value) not in self._fit([value])

    def _end_with(self, left: list[tuple[Any, Any, int]]) -> None:
        """Make packs of what is left at the end of the data, of which nothing more is chosen."""
        self._buffer = []
        fitting = self._fit([value for _, value, _ in left])
        for origin, value, _ in left:
            if id(value) in fitting:
                self._groups.append([(origin, value)])
            else:
                self._over_long(origin, value)

    def _fit(self, values: list[Any]) -> set[int]:
        """Return the ids of those that fit in a pack. Most often one call does for all of them."""
        if self.node.over_long == "alone":
            return set(map(id, values))
        fitting = self._chosen_of_copies(values)
        for value in values:
            if id(value) not in fitting:
                fitting |= self._chosen_of_copies([value])
        return fitting

    def _chosen_of_copies(self, values: list[Any]) -> set[int]:
        count = self.node.buffer_size
        while count < _MAX_COPIES:
            try:
                groups = self._selected(values * -(-count // len(values)), _OF_COPIES)
            except Exception:
                # It does not take copies, so there is no telling.
                return set(map(id, values))
            if any(groups):
                return {id(value) for group in groups for value in group}
            count *= 8
        return set()

    def _selected(self, values: list[Any], at: At) -> list[list[Any]]:
        groups = self.node.select(values, at)
        if isinstance(groups, Iterable):
            groups = list(groups)
            if all(isinstance(group, (list, tuple)) for group in groups):
                return groups
        raise FatalSampleError(
            "select_samples_to_pack must return a list of lists of samples, but gave "
            f"{groups!r:.80}"
        )

    def _fill(self) -> bool:
        while len(self._buffer) < self.node.buffer_size:
            try:
                origin, value = self.draw()
            except ShardEnd:
                return False
            self._buffer.append((origin, value, 0))
        return True

    def _over_long(self, origin: Origin, value: object) -> None:
        if self.node.over_long == "alone":
            self._groups.append([(origin, value)])
        elif self.node.over_long == "drop":
            reason = NotChosen("select_samples_to_pack does not choose this sample")
            self.leave_out(
                SkipMarker(self.node.number, self.node.pre_packer, reason, value), origin
            )
        else:
            raise FatalSampleError(
                f"{self.described(origin)}: select_samples_to_pack does not choose this sample; "
                "cut it if it is too long, or set over_long to 'alone' or 'drop'"
            )

    def _encoded(self, group: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        encode = self.node.encode
        done = []
        for origin, value in group:
            try:
                done.append((origin, encode(value, at_of(origin))))
            except Exception as error:
                self.leave_out(SkipMarker(self.node.number, encode.function, error, value), origin)
        return done

    def packed(self) -> object:
        origins = [held[0] for held in itertools.chain(self._buffer, *self._groups)]
        offers = [offers for _, _, offers in self._buffer]
        return [packed_origins(origins), offers, list(map(len, self._groups))]

    def unpack(self, held: Any) -> None:
        packed, all_offers, sizes = held
        again = [(origin, self.try_again(origin)) for origin in unpacked_origins(packed)]
        self._buffer = [
            (origin, made[0], offers) for (origin, made), offers in zip(again, all_offers) if made
        ]
        groups = iter(again[len(all_offers) :])
        remade = [list(itertools.islice(groups, size)) for size in sizes]
        self._groups = [[(origin, made[0]) for origin, made in group if made] for group in remade]


class PackingDataset(BufferDataset):
    """It makes packs of `buffer_size` samples at a time.

    `pre_packer(samples)` returns lists of them, each to be a pack; `sample_encoder` finishes each
    that was chosen; `final_packer(samples)` makes the pack, or several by being a generator. If
    nothing is chosen from a full buffer, its first sample is over-long: `over_long` says whether it
    is dropped, logged and counted, makes a pack by itself, or is an error. So is one that was not
    chosen from two full buffers and does not fit; but for "error" any that was not chosen from 16.
    At the end of finite data each that is left makes a pack by itself, if it fits; else it is
    over-long. A sample fits if `pre_packer` would choose it of copies, up to thousands of them.
    """

    holder = PackingHolder

    def __init__(
        self,
        dataset: SavableDataset[Any],
        buffer_size: int,
        pre_packer: Callable[[list[Any]], list[list[Any]]],
        final_packer: Callable[[list[Any]], Any],
        *,
        sample_encoder: Callable[[Any], Any] | None = None,
        over_long: str = "drop",
        worker_config: WorkerConfig | None = None,
        **ignored: object,
    ) -> None:
        check_no_more("PackingDataset", ignored, _ENERGON_ONLY)
        check_whole("PackingDataset: buffer_size", buffer_size)
        check_one_of("PackingDataset: over_long", over_long, OVER_LONG)
        super().__init__(dataset, buffer_size, worker_config)
        for name, function in (("pre_packer", pre_packer), ("final_packer", final_packer)):
            check_function(f"PackingDataset: {name}", function)
        self.buffer_size = buffer_size
        self.over_long = over_long
        self.pre_packer: Any = pre_packer
        self.final_packer: Any = final_packer
        self.sample_encoder: Any = sample_encoder

    def on_bound(self, binding: Binding, is_outermost: bool) -> None:
        super().on_bound(binding, is_outermost)
        self.make = binding.user_function(self.final_packer, self, "final packer")
        self.select = binding.user_function(self.pre_packer, self, "pre packer")
        self.encode = binding.user_function(self.sample_encoder or _same, self, "sample encoder")

    def values_again(self, origins: list[Origin]) -> list[Any]:
        return list(map(self.encode, super().values_again(origins), map(at_of, origins)))
