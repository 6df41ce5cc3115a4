"""What an analysis keeps of each trajectory: a few numbers, never its tokens, so that any number streams."""

# n tokens of one trajectory, B trajectories

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.data.trajectory import Trajectory

_RATIO_OFF = 0.2  # a token counts as off where the probability ratio is further than this from 1
NUM_QUARTERS = 4


class DistinctCounter:
    """How many distinct 64-bit hashes were added, in bounded memory.

    Exact up to `limit` of them (8 bytes each). Beyond that only hashes whose low bits are 0 are kept, and the
    count is scaled (Flajolet, On adaptive sampling, Computing 43, 1990): with half of 2^20 kept, at worst,
    the standard error is 0.17%.

    >>> counter = DistinctCounter()
    >>> counter.add(np.array([3, 5, 3], dtype=np.uint64))
    >>> counter.add(np.array([5], dtype=np.uint64))
    >>> counter.count(), counter.is_exact
    (2, True)
    """

    def __init__(self, limit: int = 2**20) -> None:
        self._limit = limit
        self._num_bits = 0
        self._kept = np.empty(0, dtype=np.uint64)
        self._pending: list[NDArray[np.uint64]] = []
        self._num_pending = 0

    def add(self, hashes: NDArray[np.uint64]) -> None:
        """Count these hashes, each once however often it comes."""
        kept = self._sampled(hashes)
        self._pending.append(kept)
        self._num_pending += kept.size
        if self._num_pending > self._limit:
            self._merge()

    def count(self) -> int:
        """Number of distinct hashes so far, estimated where `is_exact` is False."""
        self._merge()
        return self._kept.size << self._num_bits

    @property
    def is_exact(self) -> bool:
        """Whether every distinct hash was kept."""
        return self._num_bits == 0

    def _sampled(self, hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
        if self._num_bits == 0:
            return hashes
        return hashes[(hashes & np.uint64((1 << self._num_bits) - 1)) == 0]

    def _merge(self) -> None:
        every = np.concatenate([self._kept, *self._pending])
        every.sort()  # np.unique takes ninety times as long: it hashes hashes
        self._kept = every[np.diff(every, prepend=~every[:1]) != 0]
        self._pending, self._num_pending = [], 0
        while self._kept.size > self._limit:
            self._num_bits += 1
            self._kept = self._sampled(self._kept)


def prefix_hashes(ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A 64-bit hash of every prefix of ids [n]: equal prefixes hash alike, others almost surely apart.

    Each (token, position) pair is mixed to 64 bits and the prefix sums are taken modulo 2^64. D distinct
    prefixes collide with probability D^2 / 2^65: 3e-8 at a million, 0.4% at 400 million.
    """
    pair = ids.astype(np.uint64) * np.uint64(0xD1342543DE82EF95)
    pair += np.arange(1, ids.size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return np.cumsum(_mix(pair), dtype=np.uint64)


def hashes_in_group(hashes: NDArray[np.uint64], group: int) -> NDArray[np.uint64]:
    """The hashes of (group, prefix) pairs: mixed again, since mere sums would commute with the group's."""
    salt = _mix(np.array([group + 1], dtype=np.uint64))
    return _mix(hashes ^ salt)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele, Lea and Flood, Fast splittable generators, 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@dataclass(slots=True)
class Mismatch:
    """Sampler against trainer, by quarter of the trajectory: sums over action tokens that have both."""

    num_tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_QUARTERS, dtype=np.int64))
    # |exp(trainer - sampler) - 1| > 0.2
    num_off: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_QUARTERS, dtype=np.int64))
    # sum of |trainer - sampler|, nats
    gap_sum: NDArray[np.float64] = field(default_factory=lambda: np.zeros(NUM_QUARTERS))
    max_gap: float = 0.0

    def add(
        self, sampler: NDArray[np.float64], trainer: NDArray[np.float64], at: NDArray[np.int64], n: int
    ) -> None:
        """Count action tokens at positions `at` of a trajectory of n tokens."""
        gap = trainer - sampler
        quarter = np.minimum(at * NUM_QUARTERS // n, NUM_QUARTERS - 1)
        off = np.abs(np.expm1(np.clip(gap, -50, 50))) > _RATIO_OFF
        self.num_tokens += np.bincount(quarter, minlength=NUM_QUARTERS)
        self.num_off += np.bincount(quarter[off], minlength=NUM_QUARTERS)
        self.gap_sum += np.bincount(quarter, weights=np.abs(gap), minlength=NUM_QUARTERS)
        if gap.size:
            self.max_gap = max(self.max_gap, float(np.abs(gap).max()))


class Census:
    """The numbers of all trajectories that were added: some hundred bytes each, and two hash counters."""

    def __init__(self, distinct_limit: int = 2**20) -> None:
        self._length = array("q")
        self._actions = array("q")
        self._prompt = array("q")
        self._turns = array("q")
        self._group = array("q")
        self._group_index: dict[str, int] = {}
        self._episodes: set[int] = set()
        self._episode_group = array("q")
        self._episode_reward = array("d")
        self.max_id = 0
        self.num_retokenized = 0
        self.num_with_sampler = 0
        self.num_without_reward = 0
        self.sources: dict[str, int] = {}
        self.tokenizers: set[str] = set()
        self.distinct_in_groups = DistinctCounter(distinct_limit)
        self.distinct = DistinctCounter(distinct_limit)
        self.mismatch = Mismatch()

    def __len__(self) -> int:
        return len(self._length)

    def add(self, traj: Trajectory) -> None:
        """Count one trajectory; nothing of it is kept but numbers."""
        ids: NDArray[np.int64] = traj.ids.numpy(force=True)
        is_action: NDArray[np.bool_] = traj.action_mask.numpy(force=True) == 1
        starts = np.flatnonzero(np.diff(is_action, prepend=False) & is_action)
        group = self._group_index.setdefault(traj.group, len(self._group_index))
        self._length.append(ids.size)
        self._actions.append(int(is_action.sum()))
        self._prompt.append(int(starts[0]) + 1 if starts.size else ids.size)
        self._turns.append(starts.size)
        self._group.append(group)
        self.max_id = max(self.max_id, int(ids.max()))
        hashes = prefix_hashes(ids)
        self.distinct.add(hashes)
        self.distinct_in_groups.add(hashes_in_group(hashes, group))
        self._add_episode(traj, group)
        self._add_source(traj.info)
        self._add_mismatch(traj, is_action)

    def _add_episode(self, traj: Trajectory, group: int) -> None:
        episode = hash((group, traj.episode))
        if episode not in self._episodes:
            self._episodes.add(episode)
            self._episode_group.append(group)
            self._episode_reward.append(traj.reward)

    def _add_source(self, info: dict[str, Any]) -> None:
        source = str(info.get("source", "agentrl"))
        self.sources[source] = self.sources.get(source, 0) + 1
        self.num_retokenized += str(info.get("tokens", "")).startswith("retokenized")
        if "tokenizer" in info:
            self.tokenizers.add(str(info["tokenizer"]))
        self.num_without_reward += info.get("reward_recorded") is False

    def _add_mismatch(self, traj: Trajectory, is_action: NDArray[np.bool_]) -> None:
        sampler = traj.sample_logp.numpy(force=True).astype(np.float64)
        if not is_action.any() or np.isnan(sampler).any():
            return
        self.num_with_sampler += 1
        recorded = traj.info.get("trainer_logp")
        if not isinstance(recorded, list) or len(recorded) != sampler.size:
            return
        trainer = np.array(recorded, dtype=np.float64)
        both = np.flatnonzero(is_action & np.isfinite(trainer) & np.isfinite(sampler))
        self.mismatch.add(sampler[both], trainer[both], both, traj.num_tokens)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each trajectory [B]."""
        return np.array(self._length, dtype=np.int64)

    @property
    def actions(self) -> NDArray[np.int64]:
        """Action tokens of each trajectory [B]."""
        return np.array(self._actions, dtype=np.int64)

    @property
    def prompts(self) -> NDArray[np.int64]:
        """Tokens before the first action of each trajectory [B]."""
        return np.array(self._prompt, dtype=np.int64)

    @property
    def turns(self) -> NDArray[np.int64]:
        """Stretches of action tokens of each trajectory [B]: its model calls."""
        return np.array(self._turns, dtype=np.int64)

    def group_rewards(self) -> Iterator[NDArray[np.float64]]:
        """The rewards of each group's episodes, group by group."""
        group = np.array(self._episode_group, dtype=np.int64)
        reward = np.array(self._episode_reward, dtype=np.float64)
        order = np.argsort(group, kind="stable")
        cuts = np.flatnonzero(np.diff(group[order])) + 1
        yield from np.split(reward[order], cuts)
