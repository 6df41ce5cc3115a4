"""Evidence: the rewards of played groups, from trajectories or as given, and counts of what was played."""

# N groups, G episodes of the largest

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, cast

import numpy as np

from agentrl.curriculum.pass_rate import FloatArray
from agentrl.curriculum.rules import IntArray
from agentrl.curriculum.table import Key, task_key, whole

MAX_REWARD = 1e100  # in size: sums of squares must not overflow

Group = Sequence[float | None]  # rewards; None or NaN where an episode broke


class Played(Protocol):
    """What the sampler reads of a trajectory; `agentrl.data.trajectory.Trajectory` has it."""

    @property
    def reward(self) -> float: ...
    @property
    def info(self) -> dict[str, Any]: ...
    @property
    def group(self) -> str: ...
    @property
    def episode(self) -> str: ...


def rewards_by_group(
    trajectories: Iterable[Played], metric: str | None = None
) -> tuple[list[Key], list[list[float | None]]]:
    """Each group's task key and its episodes' rewards, in the order in which they first appear.

    An episode counts once, by its last trajectory; one whose `info['error']` is set has None. `info[metric]`
    stands in place of the reward where there is a metric. Raises ValueError where info lacks it, or 'task'.
    """
    groups: dict[tuple[Key, str], dict[str, float | None]] = {}
    for trajectory in trajectories:
        info = trajectory.info
        if "task" not in info:
            raise ValueError("a trajectory's info has no 'task', the task's name, which the sampler needs")
        if info.get("error"):
            value = None
        elif metric is None:
            value = trajectory.reward
        elif metric in info:
            value = None if info[metric] is None else float(info[metric])
        else:
            raise ValueError(f"info of a trajectory of task {info['task']!r} has no {metric!r}")
        group = groups.setdefault((task_key(info["task"]), trajectory.group), {})
        group[trajectory.episode] = value
    return [key for key, _ in groups], [list(group.values()) for group in groups.values()]


def reward_rows(keys: Sequence[object], groups: Sequence[Group]) -> FloatArray:
    """The groups' rewards [N, G], NaN where an episode broke and behind a smaller group's last.

    Raises ValueError, with the key of the group, for what is no sequence of numbers, and for rewards that are
    infinite or whose squares might be.

    >>> reward_rows(["abs", "max"], [[1, None], [0]]).tolist()
    [[1.0, nan], [0.0, nan]]
    """
    for key, group in zip(keys, groups, strict=True):
        if not hasattr(group, "__len__") or np.ndim(cast(Any, group)) != 1:
            raise ValueError(f"the rewards of task {key!r} must be a list of numbers, got {group!r}")
    sizes = [len(group) for group in groups]
    if len(set(sizes)) == 1:
        rewards = np.array(groups, np.float64).reshape(len(groups), -1)
    else:
        rewards = np.full((len(groups), max(sizes)), np.nan)
        for i, group in enumerate(groups):
            rewards[i, : sizes[i]] = np.array(group, np.float64)
    too_large = np.abs(rewards) > MAX_REWARD
    if too_large.any():
        row, column = np.argwhere(too_large)[0]
        value = float(rewards[row, column])
        what = "an infinite reward" if np.isinf(value) else f"a reward of {value:g}"
        raise ValueError(
            f"task {keys[row]!r} has {what}; rewards must be finite, {MAX_REWARD:g} at most, None or NaN"
        )
    return rewards


@dataclass(slots=True)
class Counts:
    """How much was played."""

    num_groups: int = 0  # with at least one reward
    num_zero_adv_groups: int = 0
    num_episodes: int = 0  # errored ones too
    num_errored_episodes: int = 0

    @classmethod
    def of_json(cls, saved: Mapping[str, Any]) -> "Counts":
        """From `asdict`. Raises KeyError, TypeError or ValueError for anything else."""
        return cls(**{field.name: whole(field.name, saved[field.name]) for field in fields(cls)})

    def add(self, num_usable: IntArray, num_certain: int, num_episodes: int) -> None:
        """Count N groups: num_usable [N] rewards each, num_certain groups without signal among them."""
        self.num_groups += int(np.count_nonzero(num_usable))
        self.num_zero_adv_groups += num_certain
        self.num_episodes += num_episodes
        self.num_errored_episodes += num_episodes - int(num_usable.sum())
