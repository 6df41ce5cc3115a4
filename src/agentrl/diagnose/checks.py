"""The lines of a verification: what was measured, the most that it may be, and what was found means."""

from dataclasses import dataclass, replace
from typing import Literal

from agentrl.diagnose.comparison import Gap

Unit = Literal["nats", "share", "relative"]


@dataclass(frozen=True, slots=True)
class Statistic:
    """A number of a check and the most that it may be; None where it is shown but not judged."""

    name: str
    measured: float
    allowed: float | None
    unit: Unit

    @property
    def passed(self) -> bool:
        return self.allowed is None or self.measured <= self.allowed  # NaN fails


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table."""

    name: str
    statistics: tuple[Statistic, ...]
    meaning: str  # of what was found

    @property
    def passed(self) -> bool:
        return all(statistic.passed for statistic in self.statistics)


def make_check(name: str, statistics: tuple[Statistic, ...], passed: str, failed: str) -> Check:
    """The line, with what it means to pass or, where it does not, to fail."""
    check = Check(name, statistics, passed)
    return check if check.passed else replace(check, meaning=failed)


def log_prob_statistics(found: Gap, allowed: Gap) -> tuple[Statistic, ...]:
    """The largest and the mean difference of log-probs."""
    return (
        Statistic("max", found.largest, allowed.largest, "nats"),
        Statistic("mean", found.mean, allowed.mean, "nats"),
    )


def log_prob_check(name: Literal["packed", "tree"], found: Gap, allowed: Gap) -> Check:
    """The line on the log-probs of one layout against each trajectory alone."""
    passed = {
        "packed": "Packed rows give each trajectory's own log-probs, to rounding.",
        "tree": "A prefix computed once gives each branch's own log-probs, to rounding.",
    }[name]
    failed = {
        "packed": "Packed rows change log-probs: tokens read a neighbour, or stand at wrong positions.",
        "tree": "Prefix trees change log-probs: branches read each other, or stand at wrong positions.",
    }[name]
    return make_check(f"{name} against alone", log_prob_statistics(found, allowed), passed, failed)


def gradient_check(name: str, found: Gap, allowed: Gap) -> Check:
    """The line on a whole gradient against the plain computation's."""
    assert found.gradient is not None
    return make_check(
        f"gradient: {name}",
        (Statistic("gradient", found.gradient, allowed.gradient, "relative"),),
        "The same gradient, to rounding.",
        "Another gradient than the plain computation's: training would follow another objective.",
    )
