"""pure. The layers of each pipeline stage, by megatron-core's rules.

A stage has one part of the layers, or with virtual stages several: parts are numbered in the order
of the layers, `chunk * num_stages + stage`.

    12 layers, 4 stages                                      3 3 3 3
    12 layers, 4 stages, 1 on the first and 3 on the last    1 4 4 3
    10 layers, 4 stages, embedding and loss count as one     2 3 3 2
    12 layers, 2 stages of 2 chunks, 4 on the first          2 4 | 2 4
    7 layers, 2 stages of 2 chunks, the loss counts as one   2 2 | 2 1
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StageLayers:
    """Division of a model's layers among pipeline stages. Middle stages are always alike."""

    num_stages: int = 1
    num_virtual_stages: int = 1
    """Chunks of each stage."""
    first: int | None = None
    """Layers of the first stage, of all its chunks together; None for as many as the others."""
    last: int | None = None
    """Layers of the last stage."""
    counts_embedding: bool = False
    """True if the embedding counts as a layer of the first chunk of the first stage."""
    counts_loss: bool = False
    """True if output layer and loss count as a layer of the last chunk of the last stage."""

    @property
    def has_own_ends(self) -> bool:
        """True if the first or the last stage has a number of layers of its own."""
        return self.first is not None or self.last is not None

    @property
    def are_equal(self) -> bool:
        """True if all stages have as many layers."""
        return not (self.has_own_ends or self.counts_embedding or self.counts_loss)

    def num_counted(self, num_layers: int) -> int:
        """Returns the layers, and embedding and loss where they count as one."""
        return num_layers + self.counts_embedding + self.counts_loss

    def of_parts(self, num_layers: int) -> tuple[int, ...]:
        """Returns the layers of each chunk of each stage, in the order of the layers.

        Raises ValueError, which begins with a verb, where they cannot be shared out so.
        """
        assert not (self.has_own_ends and (self.counts_embedding or self.counts_loss))
        middle = self._middle(num_layers)
        of_stage = [middle] * self.num_stages
        if self.first is not None:
            of_stage[0] = self.first
        if self.last is not None:
            of_stage[-1] = self.last
        if any(layers % self.num_virtual_stages for layers in of_stage):
            raise ValueError(
                f"leaves stages of {', '.join(map(str, of_stage))} layers, which must be multiples "
                f"of their {self.num_virtual_stages} virtual stages"
            )
        parts = [layers // self.num_virtual_stages for layers in of_stage] * self.num_virtual_stages
        parts[0] -= self.counts_embedding
        parts[-1] -= self.counts_loss
        if min(parts) < 0:
            raise ValueError("leaves no place for embedding and loss")
        return tuple(parts)

    def _middle(self, num_layers: int) -> int:
        """Layers of each stage that has no number of its own, embedding and loss among them where
        they count.
        """
        ends = [end for end in (self.first, self.last) if end is not None]
        rest, stages = self.num_counted(num_layers) - sum(ends), self.num_stages - len(ends)
        if rest < 0 or (rest == 0) != (stages == 0) or (stages and rest % stages):
            raise ValueError(
                f"leaves {rest} layers for {stages} other stages, which must have equally many, at "
                "least one each"
            )
        return rest // stages if stages else 0
