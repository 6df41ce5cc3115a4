"""Each rule with settings of its own: what `agentrl train --curriculum RULE` samples with."""

from collections.abc import Iterable
from typing import Any

from agentrl.curriculum.sampler import RuleName, TaskSampler


def preset(
    rule: RuleName,
    keys: Iterable[object],
    *,
    low: float | None = None,
    high: float | None = None,
    revisit: float | None = None,
    fill: bool | None = None,
    seed: int = 0,
) -> TaskSampler:
    """The sampler of a rule; a setting that is None is the rule's own.

    `band` is the textbook's rule: (0, 1), the last group's mean, one random revisit, not filled up. `pools`
    calls a task hard up to a pass rate of .2 and easy from .8 on. The others have `TaskSampler`'s defaults.
    Raises ValueError for settings out of range, or of which `uniform` knows nothing.

    >>> preset("band", ["abs", "max"], low=-1, high=2).pool(8, step=0)
    ['abs', 'max']
    """
    settings = {"low": low, "high": high, "revisit": revisit, "fill": fill}
    given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    if rule == "uniform" and given:
        raise ValueError(f"the curriculum uniform draws from all tasks; leave {', '.join(given)} out")
    own: dict[str, Any] = {}
    if rule == "pools":
        own = {"low": 0.2, "high": 0.8}
    elif rule == "band":
        own = {"revisit": 1, "fill": False}
    return TaskSampler(keys, select=rule, seed=seed, **(own | given))
