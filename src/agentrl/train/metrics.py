"""Metrics: values that know how they reduce, and the file that keeps a run's records."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from agentrl.train.checkpoint import write_atomically


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean, kept as sum and count so that adding parts gives exactly the mean of the whole.

    >>> (Mean(3.0, 2) + Mean(5.0, 2)).value
    2.0
    """

    total: float = 0.0
    count: float = 0.0

    @classmethod
    def of(cls, values: Tensor) -> Self:
        """The mean over all entries of a tensor."""
        return cls(float(values.sum()), values.numel())

    def __add__(self, other: Self) -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float | None:
        """The mean; None where nothing was counted."""
        return self.total / self.count if self.count else None


@dataclass(frozen=True, slots=True)
class Max:
    """A maximum; adding parts gives the maximum of the whole.

    >>> (Max(1.0) + Max(3.0) + Max()).value
    3.0
    """

    highest: float = -math.inf

    @classmethod
    def of(cls, values: Tensor) -> Self:
        """The maximum over all entries of a tensor."""
        return cls(float(values.max()) if values.numel() else -math.inf)

    def __add__(self, other: Self) -> "Max":
        return Max(max(self.highest, other.highest))

    @property
    def value(self) -> float | None:
        """The maximum; None of nothing."""
        return None if self.highest == -math.inf else self.highest


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


class MetricsLog:
    """A file of one JSON record a line, each with its `step`, on disk as soon as it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: dict[str, Any]) -> None:
        """Write one record; a reader sees whole lines only, save the one a crash cut off."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())  # a checkpoint that is on disk has all its records there

    def read(self) -> list[dict[str, Any]]:
        """The records, without a last line that a crash cut off.

        Raises ValueError, naming file and line, where any other line is not a record.
        """
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")
        records: list[dict[str, Any]] = []
        for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline was cut off
            try:
                record = json.loads(line, parse_constant=_refuse)
            except (ValueError, RecursionError) as error:  # the latter: brackets without end
                raise ValueError(f"{self.path}, line {number} is not a JSON record: {error}") from error
            if not isinstance(record, dict) or type(record.get("step")) is not int:
                raise ValueError(f"{self.path}, line {number} has no whole number `step`")
            records.append(record)
        return records

    def truncate(self, step: int) -> list[dict[str, Any]]:
        """Drop what follows `step`, as a run that continues from there writes it anew; returns the rest.

        Raises ValueError, and changes nothing, where the records up to `step` are not all there.
        """
        kept = [record for record in self.read() if record["step"] <= step]
        if [record["step"] for record in kept] != list(range(1, step + 1)):
            raise ValueError(f"{self.path} does not hold steps 1 to {step}, one record each; it is damaged")
        if self.path.exists():
            lines = "".join(json.dumps(record, allow_nan=False) + "\n" for record in kept)
            write_atomically(self.path, lines.encode())
        return kept
