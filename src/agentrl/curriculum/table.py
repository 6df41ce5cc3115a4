"""What is known about every task: one row a task, in columns, so that all are read and updated at once."""

# K tasks, N groups, G episodes a group, F floats of estimator state a task

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from agentrl.curriculum.pass_rate import Estimator, FloatArray
from agentrl.curriculum.rules import BoolArray, IntArray

Key = str | int
COLUMNS = ("key", "state", "since", "evidence", "visited", "num_certain", "num_broken")


def task_key(task: object) -> Key:
    """The stable key of a task: a str or int itself, else its `.key`, else its `.name`.

    >>> task_key("abs"), task_key(7)
    ('abs', 7)
    """
    if isinstance(task, (str, int)):
        return task
    for candidate in (task, getattr(task, "key", None), getattr(task, "name", None)):
        if isinstance(candidate, (str, int)):
            return candidate
        if isinstance(candidate, np.integer):
            return candidate.item()
    raise ValueError(f"a task is a str, an int, or has .key or .name; got {type(task).__name__}: {task!r}")


def whole(name: str, value: Any, least: int = 0, most: float = 2**62) -> int:
    """`value` as Python's int, which is plain JSON; numpy's and 2.0 are taken too.

    Raises ValueError for anything else, below `least` or above `most`.

    >>> whole("step", np.int64(3)), whole("step", 3.0)
    (3, 3)
    """
    try:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        number = operator.index(cast(Any, value))
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {value!r}") from None
    if number < least:
        bound = "must not be negative" if least == 0 else f"must be at least {least}"
        raise ValueError(f"{name} {bound}, got {number}")
    if number > most:
        raise ValueError(f"{name} must be at most {most}, got {number}")
    return number


class TaskTable:
    """The tasks of a run, in order, with the estimator's state and the last visit of each."""

    keys: list[Key]
    states: FloatArray  # [K, F], the estimator's
    since: IntArray  # [K] step of the last visit, or at which the task was added
    evidence: IntArray  # [K] step of the last evidence
    visited: BoolArray  # [K] handed out or observed at least once
    num_certain: IntArray  # [K] groups in a row without signal, up to the last one
    num_broken: IntArray  # [K] groups in a row of which every episode broke, up to the last one

    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator
        self.keys, self._index = [], dict[Key, int]()
        self.states = np.empty((0, estimator.initial().size))
        self.since, self.evidence = np.empty(0, np.int64), np.empty(0, np.int64)
        self.visited, self.num_certain = np.empty(0, np.bool_), np.empty(0, np.int64)
        self.num_broken = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, task: object) -> bool:
        return task_key(task) in self._index

    def rows(self, tasks: Iterable[object]) -> IntArray:
        """Row of each task; ValueError for one that is not in the table."""
        try:
            return np.array([self._index[task_key(task)] for task in tasks], np.int64)
        except KeyError as error:
            raise ValueError(
                f"unknown task key {error.args[0]!r}; the sampler has {len(self)} others (see add)"
            ) from None

    def elapsed(self, step: int) -> FloatArray:
        """Steps [K] since the last evidence of each task."""
        return np.maximum(step - self.evidence, 0).astype(np.float64)

    def add(self, tasks: Iterable[object], step: int) -> None:
        """Append unseen tasks; ValueError, and no change, if a key is there already or comes twice."""
        new = [task_key(task) for task in tasks]
        index: dict[Key, int] = {}
        for key in new:
            if key in self._index or key in index:
                raise ValueError(f"duplicate task key {key!r}; keys must tell tasks apart")
            index[key] = len(self.keys) + len(index)
        self.keys.extend(new)
        self._index.update(index)
        self.states = np.concatenate([self.states, np.tile(self.estimator.initial(), (len(new), 1))])
        self.since = np.concatenate([self.since, np.full(len(new), step)])
        self.evidence = np.concatenate([self.evidence, np.full(len(new), step)])
        self.visited = np.concatenate([self.visited, np.zeros(len(new), np.bool_)])
        self.num_certain = np.concatenate([self.num_certain, np.zeros(len(new), np.int64)])
        self.num_broken = np.concatenate([self.num_broken, np.zeros(len(new), np.int64)])

    def remove(self, tasks: Iterable[object]) -> None:
        """Forget tasks; ValueError, and no change, for unknown ones or if none would be left."""
        kept = np.setdiff1d(np.arange(len(self)), self.rows(tasks))
        if not kept.size:
            raise ValueError("remove would leave no task")
        self.keys = [self.keys[i] for i in kept]
        self._index = {key: i for i, key in enumerate(self.keys)}
        self.states, self.since, self.evidence = self.states[kept], self.since[kept], self.evidence[kept]
        self.visited, self.num_certain = self.visited[kept], self.num_certain[kept]
        self.num_broken = self.num_broken[kept]

    def visit(self, rows: IntArray, step: int) -> None:
        """Note that these tasks were handed out or played at `step`."""
        self.visited[rows] = True
        self.since[rows] = np.maximum(self.since[rows], step)

    def learn(self, rows: IntArray, rewards: FloatArray, step: int) -> BoolArray:
        """Take in one group [N, G] each for N different tasks; whether each was without signal.

        Every group needs at least one entry that is not NaN.
        """
        elapsed = np.maximum(step - self.evidence[rows], 0).astype(np.float64)
        self.states[rows] = self.estimator.update(self.states[rows], rewards, elapsed)
        certain: BoolArray = np.nanmax(rewards, axis=1) == np.nanmin(rewards, axis=1)
        self.num_certain[rows] = np.where(certain, self.num_certain[rows] + 1, 0)
        self.evidence[rows] = np.maximum(self.evidence[rows], step)
        return certain

    def count_broken(self, rows: IntArray, is_broken: BoolArray) -> None:
        """Count groups [N] of which every episode broke; any other starts anew."""
        if not is_broken.any():
            self.num_broken[rows] = 0
            return
        for row, broken in zip(rows.tolist(), is_broken.tolist(), strict=True):
            self.num_broken[row] = self.num_broken[row] + 1 if broken else 0

    def to_json(self) -> dict[str, list[Any]]:
        """The columns as plain lists; NaN, which JSON lacks, as None."""
        states: list[list[float]] = self.states.tolist()
        return {
            "key": list(self.keys),
            "state": [[None if math.isnan(x) else x for x in row] for row in states],
            "since": self.since.tolist(),
            "evidence": self.evidence.tolist(),
            "visited": self.visited.tolist(),
            "num_certain": self.num_certain.tolist(),
            "num_broken": self.num_broken.tolist(),
        }

    def load_json(self, columns: Mapping[str, Sequence[Any]], step: int) -> None:
        """Take over the saved rows of this table's tasks. A task without one is unseen since `step`; a saved
        one that is not in the table is dropped. ValueError, and no change, for columns that do not fit."""
        try:
            # States of before the count of broken groups do not have it.
            columns = {"num_broken": [0] * len(columns["key"]), **columns}
            rows = list(zip(*(columns[name] for name in COLUMNS), strict=True))
            saved = {row[0]: row[1:] for row in rows}
            if len(saved) < len(rows):
                raise ValueError("a key comes twice")
            for key, state, since, evidence, visited, num_certain, num_broken in rows:
                self._check_row(key, state, visited)
                for name, value, least in (
                    ("since", since, -1),
                    ("evidence", evidence, -1),
                    ("num_certain", num_certain, 0),
                    ("num_broken", num_broken, 0),
                ):
                    whole(name, value, least)
            unseen = (self.estimator.initial(), step, step, False, 0, 0)
            states, *others = zip(*(saved.get(key, unseen) for key in self.keys), strict=True)
            new_states = np.array(states, np.float64).reshape(self.states.shape)
            since, evidence, num_certain, num_broken = (np.array(others[i], np.int64) for i in (0, 1, 3, 4))
            self._check_states(new_states)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not the columns of a task table: {error!r}") from error
        self.states, self.since, self.evidence = new_states, since, evidence
        self.visited, self.num_certain = np.array(others[2], np.bool_), num_certain
        self.num_broken = num_broken

    def _check_row(self, key: object, state: Sequence[Any], visited: object) -> None:
        if not isinstance(key, (str, int)):
            raise ValueError(f"a key is a str or an int, got {key!r}")
        numbers = all(x is None or (isinstance(x, (int, float)) and math.isfinite(x)) for x in state)
        if len(state) != self.states.shape[1] or not numbers:
            raise ValueError(f"the state of {key!r} is {state!r}, not {self.states.shape[1]} numbers")
        if not isinstance(visited, bool):
            raise ValueError(f"visited is true or false, got {visited!r} for {key!r}")

    def _check_states(self, states: FloatArray) -> None:
        """Raises ValueError for states of which the estimator cannot make a mean and a signal."""
        now = np.zeros(len(states))
        with np.errstate(all="ignore"):
            mean, signal = self.estimator.mean(states, now), self.estimator.signal(states, now)
        bad = ~(np.isfinite(mean) & np.isfinite(signal) & (signal >= 0))
        if bad.any():
            i = int(np.argmax(bad))
            raise ValueError(
                f"the state of {self.keys[i]!r}, {states[i].tolist()}, is none of {self.estimator!r}"
            )
