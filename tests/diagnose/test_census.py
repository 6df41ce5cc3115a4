"""What is counted of each trajectory, against counting it plainly."""

import gc
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.importers import import_trajectories
from agentrl.data.prefix_tree import prefix_forest
from agentrl.data.storage import save_trajectories
from agentrl.data.trajectory import Trajectory
from agentrl.diagnose.census import Census, DistinctCounter, prefix_hashes


def trajectory(
    ids: list[int], mask: list[int] | None = None, group: str = "g", **fields: object
) -> Trajectory:
    n = len(ids) - 1
    return Trajectory(
        ids=torch.tensor(ids),
        action_mask=torch.ones(n) if mask is None else torch.tensor(mask, dtype=torch.float32),
        sample_logp=fields.pop("sample_logp", torch.full((n,), math.nan)),  # pyright: ignore
        reward=fields.pop("reward", 0.0),  # pyright: ignore
        group=group,
        **fields,  # pyright: ignore
    )


sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(sequences=sequences, groups=st.data())
def test_distinct_positions_are_the_prefix_trees(sequences: list[list[int]], groups: st.DataObject) -> None:
    names = [groups.draw(st.sampled_from("ab")) for _ in sequences]
    census = Census()
    for ids, name in zip(sequences, names, strict=True):
        census.add(trajectory(ids, group=name))
    assert census.distinct.count() == prefix_forest([torch.tensor(s) for s in sequences]).num_tokens
    by_group = {
        name: [torch.tensor(s) for s, g in zip(sequences, names, strict=True) if g == name] for name in "ab"
    }
    trees = sum(prefix_forest(group).num_tokens for group in by_group.values() if group)
    assert census.distinct_in_groups.count() == trees


def test_groups_are_apart_whatever_their_tokens() -> None:
    """Hashes that only add a group's number would commute: token 0 in group 1 and token 1 in group 0."""
    census = Census()
    for ids, name in (([0], "b"), ([0], "a"), ([1], "b")):
        census.add(trajectory(ids, group=name))
    assert census.distinct_in_groups.count() == 3


def test_memory_is_numbers_only(tmp_path: Path) -> None:
    """From the file to the census, a further trajectory of 100 tokens costs some hundred bytes.

    Seven numbers of 8 bytes, which an array holds with an eighth to spare, an episode's hash in a set (about
    100 bytes with the set's spare room) and, for every fourth, a group's name (about 200 bytes).
    """
    held: list[int] = []
    generator = torch.Generator().manual_seed(0)
    for count in (400, 2000):
        path = tmp_path / f"{count}.jsonl"
        save_trajectories(
            path,
            (
                Trajectory(
                    torch.randint(100, (100,), generator=generator), torch.ones(99), torch.zeros(99), 0.0,
                    {"task": f"task {i // 4}"},
                )
                for i in range(count)
            ),
        )  # fmt: skip
        census = Census(distinct_limit=2**10)
        tracemalloc.start()
        for traj in import_trajectories(path):
            census.add(traj)
        del traj
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert len(census) == count
    assert 100 < (held[1] - held[0]) / 1600 < 400


def test_a_planted_order_blind_hash_is_seen() -> None:
    """Prefixes with the same tokens in another order are apart: a sum over tokens alone would join them."""
    a, b = prefix_hashes(np.array([1, 2, 3])), prefix_hashes(np.array([2, 1, 3]))
    assert not set(a.tolist()) & set(b.tolist())
    plain = [np.cumsum(np.array(ids)) for ids in ([1, 2, 3], [2, 1, 3])]
    assert set(plain[0].tolist()) & set(plain[1].tolist())


def test_counting_beyond_the_limit_is_close() -> None:
    """With 4,096 of the hashes kept at least, the standard error is 1.6%; 5 of it is odd at 6e-7."""
    counter = DistinctCounter(limit=8_192)
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**64, 200_000, dtype=np.uint64)
    for part in np.array_split(np.concatenate([hashes, hashes]), 50):
        counter.add(part)
    assert not counter.is_exact
    assert abs(counter.count() / np.unique(hashes).size - 1) < 5 / math.sqrt(4_096)


def test_counts_of_a_trajectory() -> None:
    census = Census()
    census.add(trajectory([1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 1, 0, 1]))
    census.add(trajectory([1, 2], [0]))
    census.add(trajectory([9], []))
    assert (census.lengths.tolist(), census.actions.tolist()) == ([7, 2, 1], [3, 0, 0])
    assert (census.prompts.tolist(), census.turns.tolist()) == ([3, 2, 1], [2, 0, 0])
    assert census.max_id == 9


def test_an_episode_counts_once() -> None:
    census = Census()
    for episode, reward in (("a", 1.0), ("a", 1.0), ("b", 0.0)):
        census.add(trajectory([1, 2], reward=reward, episode=episode))
    assert [group.tolist() for group in census.group_rewards()] == [[1.0, 0.0]]


def test_mismatch_by_quarter() -> None:
    n = 9
    sampler = torch.full((n - 1,), -1.0)
    trainer = [-1.0] * (n - 3) + [-1.5, -1.1]
    census = Census()
    census.add(trajectory(list(range(n)), sample_logp=sampler, info={"trainer_logp": trainer}))
    found = census.mismatch
    assert found.num_tokens.sum() == n - 1
    assert found.num_off.tolist() == [0, 0, 1, 0]
    assert found.gap_sum.sum() == pytest.approx(0.6)
    assert found.max_gap == pytest.approx(0.5)
