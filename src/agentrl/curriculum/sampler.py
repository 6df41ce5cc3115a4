"""Which tasks are worth a rollout next: the textbook's filter, and a sampler that remembers."""

# K tasks, N groups, G episodes a group

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, TypeVar, cast

import numpy as np

from agentrl.curriculum.evidence import Counts, Played, reward_rows, rewards_by_group
from agentrl.curriculum.pass_rate import BetaPosterior, Estimator, FloatArray, LastGroup, estimator_name
from agentrl.curriculum.rules import RULES, IntArray, View, allocate, keep_probability
from agentrl.curriculum.table import Key, TaskTable, task_key, whole

Task = TypeVar("Task")
RuleName = Literal["uniform", "band", "top", "proportional", "thompson", "skip", "pools"]


def filter_by_pass_rate(
    tasks: Sequence[Task],
    pass_rates: Mapping[Key, float] | Sequence[float],
    low: float = 0.0,
    high: float = 1.0,
) -> list[Task]:
    """The tasks, in order, whose pass rate lies strictly inside (low, high): low < p < high.

    `pass_rates` holds one number a task, in the order of `tasks`, or maps each task's key (its name) to it. A
    pass rate of NaN lies nowhere. Raises ValueError for a rate that is missing, or None.

    >>> filter_by_pass_rate(["abs", "max", "sum"], [0.0, 0.5, 1.0])
    ['max']
    >>> filter_by_pass_rate(["abs", "max"], {"abs": 1.0, "max": 0.25}, high=2)
    ['abs', 'max']
    """
    tasks = list(tasks)
    if isinstance(pass_rates, Mapping):
        rates = [pass_rates.get(task_key(task)) for task in tasks]
    else:
        rates = list(pass_rates)
        if len(rates) != len(tasks):
            raise ValueError(f"got {len(rates)} pass rates for {len(tasks)} tasks; give one a task, in order")
    missing = [task_key(task) for task, rate in zip(tasks, rates, strict=True) if rate is None]
    if missing:
        raise ValueError(f"no pass rate for {len(missing)} of {len(tasks)} tasks, first {missing[0]!r}")
    given = zip(tasks, rates, strict=True)
    return [task for task, rate in given if rate is not None and low < rate < high]


class TaskSampler:
    """Chooses tasks by what their past groups say, and makes sure that none is forgotten.

    >>> sampler = TaskSampler(["abs", "max", "sum"])
    >>> sampler.observe("abs", [1, 1, 1, 1], step=0)
    >>> sampler.observe("max", [1, 0, 1, 0], step=0)
    >>> sampler.observe("sum", [0, 0, 0, None], step=0)  # None: the episode broke, which is not evidence
    >>> sampler.select(1, step=1)
    ['max']

    Args:
        keys: The tasks: str, int, or objects with `.key` or `.name`. `select` returns keys (str or int).
        estimator: What past rewards say; see `curriculum/pass_rate`. Default `BetaPosterior()`; 'band' has
            the textbook's `LastGroup()`, since a posterior's mean never leaves the band (0, 1).
        select: The rule; see `curriculum/rules`.
        low, high: A task is inside the band where low < estimated mean < high. Tasks outside get a slot only
            by `revisit` and `fill`. With `BetaPosterior` every task is inside (0, 1).
        revisit: Below 1, the share of all slots reserved for tasks that are due: not visited for
            W = ceil(K / (revisit * n)) steps, longest first. Every task is then back within 2 W steps. From 1
            up, a whole number of such slots a step; with 'band' it has the textbook's meaning instead: that
            many tasks from outside the band, drawn at random, join the pool, which bounds nothing.
        seed: Of all random choices.
        fill: Whether slots that the rule leaves empty go to the longest unvisited tasks, so that a step has n
            distinct tasks where there are as many. False saves their rollouts.
        headroom, rested: Constants of the rule `top`; 0 and 1 switch them off.
        metric: Name of the entry of `info` that decides in place of the reward, in `observe_trajectories`.

    All ranks of a distributed run hold the same state as long as they observe the same groups; the order of
    different tasks within a step does not matter.
    """

    def __init__(
        self,
        keys: Iterable[object],
        estimator: Estimator | None = None,
        select: RuleName = "top",
        low: float = 0.0,
        high: float = 1.0,
        revisit: float = 0.1,
        seed: int = 0,
        *,
        fill: bool = True,
        headroom: float = 0.25,
        rested: float = 0.65,
        metric: str | None = None,
    ) -> None:
        if isinstance(keys, str):
            raise ValueError(f"keys is the single string {keys!r}; give a list of tasks")
        if not isinstance(cast(object, keys), Iterable):
            raise ValueError(f"keys must be a list of tasks, got {keys!r}")
        if estimator is None:
            estimator = LastGroup() if select == "band" else BetaPosterior()
        if isinstance(estimator, type) or not hasattr(estimator, "is_pass_rate"):
            raise ValueError(f"estimator must be one such as BetaPosterior(), got {estimator!r}")
        if not isinstance(cast(object, select), str) or select not in RULES:
            raise ValueError(f"no selection rule {select!r}; rules are {', '.join(RULES)}")
        if not low < high:
            raise ValueError(f"the band needs low < high, got ({low}, {high})")
        if not estimator.is_pass_rate and (select in ("band", "pools") or (low, high) != (0.0, 1.0)):
            raise ValueError(
                f"a band on the mean says nothing with {type(estimator).__name__}: eight rewards of .5 have "
                "no signal; use select='top', 'proportional' or 'skip', and leave low and high as they are"
            )
        if select == "thompson" and not isinstance(estimator, BetaPosterior):
            raise ValueError("select='thompson' draws from a posterior; use estimator=BetaPosterior()")
        if not 0 <= revisit < math.inf or (revisit > 1 and revisit != int(revisit)):
            raise ValueError(f"revisit is a share below 1 or a whole number of tasks, got {revisit}")
        seed = whole("seed", seed, most=math.inf)
        if not headroom >= 0 or not 0 < rested <= 1:
            raise ValueError(f"wanted headroom >= 0 and 0 < rested <= 1, got {headroom} and {rested}")
        self._rule, self._low, self._high, self._revisit = select, low, high, float(revisit)
        self._seed, self._fill, self._headroom, self._rested = seed, fill, headroom, rested
        self._estimator, self._metric = estimator, metric

        self._table = TaskTable(estimator)
        self._table.add(keys, step=-1)
        if not len(self._table):
            raise ValueError("keys is empty; give at least one task")
        self._admitted: dict[Key, None] = {}  # tasks that a stream brought, in order
        self._num_draws = 0  # of random generators: with the seed, the whole random state
        self._credit = 0.0  # revisit slots earned and not yet given, below 1
        self._pool_size = 0  # at the last selection
        self._last_step = -1  # of an observation
        self._total, self._of_step = Counts(), Counts()

    @classmethod
    def textbook(
        cls, keys: Iterable[object], low: float = 0.0, high: float = 1.0, revisit: int = 1, seed: int = 0
    ) -> "TaskSampler":
        """The textbook's rule, exact: estimates start at .5 and become the mean reward of the task's last
        group; a step's pool is the tasks inside (low, high), in order, and `revisit` random ones outside.

        >>> TaskSampler.textbook(["abs", "max"], low=-1, high=2).pool(8, step=0)
        ['abs', 'max']
        """
        if revisit != int(revisit):
            raise ValueError(f"the textbook's revisit is a number of tasks, got {revisit}")
        return cls(keys, LastGroup(init=0.5), "band", low, high, int(revisit), seed, fill=False)

    @property
    def keys(self) -> tuple[Key, ...]:
        """The tasks' keys, in order."""
        return tuple(self._table.keys)

    def add(self, keys: Iterable[object], step: int) -> None:
        """Tasks that join the run at `step`, unseen. Raises ValueError for a key that is there already."""
        self._table.add(keys, whole("step", step))

    def remove(self, keys: Iterable[object]) -> None:
        """Tasks that leave the run and are forgotten. ValueError for unknown keys, or if none is left."""
        keys = list(keys)
        self._table.remove(keys)
        for key in keys:
            self._admitted.pop(task_key(key), None)

    def pool(self, n: int, step: int) -> list[Key]:
        """The keys from which the caller draws n at random, with a generator of its own: all of them for
        'uniform', the band and its extras for the textbook's rule, exactly the chosen ones for every other.

        It moves the sampler's own random state; the tasks played must be reported with `observe`.
        """
        n = whole("n, the number of tasks wanted,", n, least=1)
        view, rng = self._view(n, step), self._generator()
        if self._rule == "uniform":
            chosen = np.arange(len(self._table))
        elif self._rule == "band" and (self._revisit >= 1 or self._revisit == 0):
            extra = rng.permutation(np.flatnonzero(~view.inside))[: int(self._revisit)]
            chosen = np.concatenate([np.flatnonzero(view.inside), extra])
        else:
            due = self._due(view, rng)
            priority = RULES[self._rule](view, rng)
            num_broken = self._table.num_broken
            if num_broken.any():  # not evidence, but rollouts that nobody can use
                priority[rng.random(priority.size) >= keep_probability(num_broken, 0.0)] = -np.inf
            priority[due] = -np.inf
            chosen = np.concatenate([due, _largest(priority, n - due.size)])
        wanted = n if self._fill else 1  # a step without any task would be the end of the run
        if chosen.size < wanted:
            waited = view.waited + rng.random(view.waited.size)
            waited[chosen] = -np.inf
            chosen = np.concatenate([chosen, _largest(waited, wanted - chosen.size)])
        self._pool_size = chosen.size
        return [self._table.keys[i] for i in chosen]

    def select(self, n: int, step: int) -> list[Key]:
        """The keys of n distinct tasks for this step, or of all tasks if there are fewer; notes their visit.

        Draws from `pool` with the sampler's own generator. Fewer than n only with `fill=False`.
        """
        n, step = whole("n, the number of tasks wanted,", n, least=1), whole("step", step)
        pool = self.pool(n, step)
        if len(pool) > n:
            order: list[int] = self._generator().permutation(len(pool)).tolist()
            pool = [pool[i] for i in order[:n]]
        self._table.visit(self._table.rows(pool), step)
        return pool

    def admit(self, task: object, step: int) -> bool:
        """Whether to roll out the next task of a stream without end (rule 'skip'). An unknown task is added
        and admitted; one with c certain or broken groups in a row with probability max(revisit, 2^-c).
        The state holds every task that it added, until `remove`; a resumed sampler has them again."""
        if self._rule != "skip":
            raise ValueError(
                f"admit needs select='skip', this sampler has {self._rule!r}; use select(n, step)"
            )
        step = whole("step", step)
        if task not in self._table:
            self._table.add([task], step)
            self._admitted[task_key(task)] = None
        rows = self._table.rows([task])
        num_useless = self._table.num_certain[rows] + self._table.num_broken[rows]
        keep = keep_probability(num_useless, min(self._revisit, 1.0))
        return bool(self._generator().random() < keep[0])

    def group_sizes(
        self, keys: Sequence[object], group_size: int, step: int, *, low: int = 2, high: int | None = None
    ) -> list[int]:
        """Episodes for each of the chosen tasks, in [low, high], with sum len(keys) * group_size.

        Proportional to the expected standard deviation of the reward, which for a given number of episodes
        minimises the variance of a mean over tasks (Neyman 1934). `high` is 4 * group_size by default.
        """
        if not keys:
            return []
        signal = self._view(len(keys), step).signal[self._table.rows(keys)]
        high = 4 * group_size if high is None else high
        return allocate(len(keys) * group_size, np.sqrt(signal), low, high)

    def observe(self, key: object, rewards: Sequence[float | None], step: int) -> None:
        """Take in the rewards of one group that `key` played at `step`; None or NaN where an episode broke.

        A group of which nothing is left counts as a visit, not as evidence; a task with c of them in a row is
        passed over with probability 1 - 2^-c, until it is due. Raises ValueError for unknown
        keys and infinite rewards.
        """
        self.observe_groups([key], [rewards], step)

    def observe_groups(
        self, keys: Sequence[object], groups: Sequence[Sequence[float | None]], step: int
    ) -> None:
        """`observe` for all groups of a step in one call; a task may have several."""
        if len(keys) != len(groups):
            raise ValueError(f"got {len(keys)} keys for {len(groups)} groups of rewards")
        step = whole("step", step)
        if not groups:
            return
        rows = self._table.rows(keys)
        rewards = reward_rows(keys, groups)
        num_usable = (~np.isnan(rewards)).sum(1)
        remaining, num_certain = np.flatnonzero(num_usable), 0
        while remaining.size:  # once, unless a task has several groups: those go in one after the other
            first = remaining[np.unique(rows[remaining], return_index=True)[1]]
            num_certain += int(self._table.learn(rows[first], rewards[first], step).sum())
            remaining = np.setdiff1d(remaining, first)
        self._table.count_broken(rows, num_usable == 0)
        self._table.visit(rows, step)
        if step > self._last_step:
            self._last_step, self._of_step = step, Counts()
        # A group of an earlier step that comes late is no part of the last one.
        for counts in (self._total, self._of_step) if step == self._last_step else (self._total,):
            counts.add(num_usable, num_certain, num_episodes=sum(map(len, groups)))

    def observe_trajectories(self, trajectories: Iterable[Played], step: int) -> None:
        """`observe` for every group among the trajectories. An episode counts once, by its last trajectory;
        one whose `info['error']` is set broke; `info[metric]` decides where the sampler has a metric."""
        self.observe_groups(*rewards_by_group(trajectories, self._metric), step)

    def metrics(self) -> dict[str, float]:
        """What a run logs each step, as plain numbers.

        `pool`: tasks to choose from at the last selection. `n_episodes`, `zero_adv_frac`: episodes, and the
        share of groups without signal, observed at the last step; the `num_` counts of groups and episodes
        are since the start. `num_inside`: tasks inside the band. `num_unseen`: tasks without a visit.
        `mean_signal`: expected p(1-p) over all tasks. `longest_wait`: steps since the least recent visit.
        """
        view = self._view(1, max(self._last_step, 0))
        total, of_step = self._total, self._of_step
        return {
            "pool": self._pool_size,
            "n_episodes": of_step.num_episodes,
            "zero_adv_frac": of_step.num_zero_adv_groups / max(of_step.num_groups, 1),
            "num_groups": total.num_groups,
            "num_zero_adv_groups": total.num_zero_adv_groups,
            "num_episodes": total.num_episodes,
            "num_errored_episodes": total.num_errored_episodes,
            "num_tasks": len(self._table),
            "num_inside": int(view.inside.sum()),
            "num_unseen": int((~view.visited).sum()),
            "mean_pass_rate": float(view.mean.mean()),
            "mean_signal": float(view.signal.mean()),
            "longest_wait": int(view.waited.max()),
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs to select as this one would, in plain JSON."""
        return {
            "estimator": estimator_name(self._estimator),
            "seed": self._seed,
            "num_draws": self._num_draws,
            "credit": self._credit,
            "pool_size": self._pool_size,
            "last_step": self._last_step,
            "total": asdict(self._total),
            "of_step": asdict(self._of_step),
            "admitted": list(self._admitted),
            "tasks": self._table.to_json(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state. Tasks that are new since then are unseen; those that are gone are dropped.
        With the rule 'skip', those that `admit` added are added again. The order of `keys` becomes that of
        the state, with new tasks behind, so the order in which this sampler was given them does not matter.

        The rule and its settings stay this sampler's own. Raises ValueError, and changes nothing, if the
        state is incomplete or comes from another estimator, whose numbers mean something else.
        """
        if not isinstance(cast(object, state), Mapping):
            raise ValueError(f"not a TaskSampler's state: {state!r}")
        if state.get("estimator") != estimator_name(self._estimator):
            raise ValueError(
                f"the state is of estimator {state.get('estimator')}, this sampler has "
                f"{estimator_name(self._estimator)}; "
                "make it with the same estimator"
            )
        try:
            seed = whole("seed", state["seed"], most=math.inf)
            num_draws, pool_size = (whole(name, state[name]) for name in ("num_draws", "pool_size"))
            last_step, credit = whole("last_step", state["last_step"], -1), float(state["credit"])
            if not 0 <= credit < 1:
                raise ValueError(f"credit must lie in [0, 1), got {credit}")
            total, of_step = Counts.of_json(state["total"]), Counts.of_json(state["of_step"])
            columns, admitted = state["tasks"], dict.fromkeys(map(task_key, state.get("admitted", ())))
            saved = dict.fromkeys(columns["key"])
            if not admitted.keys() <= saved.keys():
                raise ValueError("it admitted tasks of which it holds nothing")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a TaskSampler's state: {error!r}") from error
        own = {key: key for key in self._table.keys}
        if self._rule == "skip":
            own = {key: key for key in admitted} | own
        # In the saved order, which random choices depend on, whatever the order of this sampler's keys.
        table = TaskTable(self._estimator)
        table.add([own[key] for key in saved if key in own], last_step)
        table.add([key for key in own if key not in saved], last_step)
        table.load_json(columns, last_step)
        self._table, self._admitted = table, {key: None for key in admitted if key in table}
        self._seed, self._num_draws, self._credit = seed, num_draws, credit
        self._pool_size, self._last_step = pool_size, last_step
        self._total, self._of_step = total, of_step

    def _generator(self) -> np.random.Generator:
        """A fresh generator for each decision, so that the random state is two small integers."""
        self._num_draws += 1
        return np.random.default_rng((self._seed, self._num_draws))

    def _view(self, n: int, step: int) -> View:
        step = whole("step", step)
        estimator, table = self._estimator, self._table
        elapsed = table.elapsed(step)
        mean = estimator.mean(table.states, elapsed)
        below = (mean <= self._low) & estimator.is_pass_rate
        above = (mean >= self._high) & estimator.is_pass_rate

        def draw(rng: np.random.Generator) -> FloatArray:
            return cast(BetaPosterior, estimator).draw(table.states, elapsed, rng)

        return View(
            num_slots=n,
            mean=mean,
            signal=estimator.signal(table.states, elapsed),
            inside=~below & ~above,
            below=below,
            visited=table.visited,
            waited=np.maximum(step - table.since, 0),
            num_certain=table.num_certain,
            revisit=min(self._revisit / n if self._revisit >= 1 else self._revisit, 1.0),
            headroom=self._headroom if estimator.is_pass_rate else 0.0,
            rested=self._rested,
            draw=draw,
        )

    def _due(self, view: View, rng: np.random.Generator) -> IntArray:
        """Tasks for this step's revisit slots: unvisited for W steps, the longest first; unused slots lapse.

        A due task is passed over only for tasks that have waited as long, each of them once: at most K - 1.
        The next W steps have K revisit slots, so it is back within 2 W steps of its last visit.
        """
        slots = view.revisit * view.num_slots
        if slots == 0:
            return np.empty(0, np.int64)
        self._credit += slots
        num_slots = int(self._credit + 1e-9)
        self._credit = max(self._credit - num_slots, 0.0)
        is_due = view.waited >= len(self._table) / slots - 1e-9  # whole steps, so W needs no rounding
        return _largest(np.where(is_due, view.waited + rng.random(is_due.size), -np.inf), num_slots)


def _largest(priority: FloatArray, count: int) -> IntArray:
    """Indices of the `count` largest entries above -inf, largest first."""
    best = np.arange(priority.size)
    if 0 < count < priority.size:
        best = np.argpartition(-priority, count - 1)[:count]
    best = best[np.argsort(-priority[best], kind="stable")][: max(count, 0)]
    return best[priority[best] > -np.inf]
