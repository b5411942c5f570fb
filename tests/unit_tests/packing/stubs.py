"""What stands in for megatron-core's objects where one process is enough."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ranks:
    """Stands for a process group."""

    num_ranks: int = 1
    mine: int = 0

    def size(self) -> int:
        return self.num_ranks

    def rank(self) -> int:
        return self.mine
