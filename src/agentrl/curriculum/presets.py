"""Each rule with settings of its own: what `agentrl train --curriculum RULE` samples with."""

from collections.abc import Iterable

from agentrl.curriculum.pass_rate import LastGroup
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
    given = {"low": low, "high": high, "revisit": revisit, "fill": fill}
    useless = [name for name, value in given.items() if value is not None]
    if rule == "uniform" and useless:
        raise ValueError(f"the curriculum uniform draws from all tasks; leave {', '.join(useless)} out")
    own = (0.2, 0.8) if rule == "pools" else (0.0, 1.0)
    low, high = own[0] if low is None else low, own[1] if high is None else high
    if rule != "band":
        share = 0.1 if revisit is None else revisit
        return TaskSampler(keys, None, rule, low, high, share, seed, fill=fill is not False)
    extra = 1 if revisit is None else revisit
    return TaskSampler(keys, LastGroup(), rule, low, high, extra, seed, fill=bool(fill))
