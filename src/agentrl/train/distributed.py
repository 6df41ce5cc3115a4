"""Ranks: the processes that train together."""

from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among those that train together."""

    rank: int = 0
    num_ranks: int = 1

    def gather(self, value: Value) -> list[Value]:
        """Every rank's value, in the order of ranks, on every rank."""
        if self.num_ranks == 1:
            return [value]
        values: list[Value | None] = [None] * self.num_ranks
        dist.all_gather_object(values, value)
        return values  # pyright: ignore


ONE_RANK = Ranks()
