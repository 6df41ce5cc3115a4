"""The stages of a long computation: which one is under way, and what share of all the work is done."""

from collections.abc import Callable, Mapping

Report = Callable[[str, float], None]  # (what is being computed, share of the work that is done)


class Stages:
    """Tells `report` at every step how much of the work is done, given what each stage costs.

    >>> said = []
    >>> stages = Stages({"short": 1.0, "long": 3.0}, lambda *told: said.append(told))
    >>> stages.begin("short"); stages.begin("long"); stages.advance(0.5)
    >>> said
    [('short', 0.0), ('long', 0.25), ('long', 0.625)]
    """

    def __init__(self, costs: Mapping[str, float], report: Report) -> None:
        self._costs = costs
        self._report = report
        self._total = sum(costs.values())
        self._done = 0.0
        self._stage: str | None = None

    def begin(self, stage: str) -> None:
        """The stage before is done, and this one begins."""
        if self._stage is not None:
            self._done += self._costs[self._stage]
        self._stage = stage
        self.advance(0.0)

    def advance(self, share: float) -> None:
        """This share of the current stage is done."""
        assert self._stage is not None
        self._report(self._stage, (self._done + share * self._costs[self._stage]) / self._total)
