"""Advantages within groups."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import compute_advantages


def config(group_size: int = 4, advantage: str = "group_std") -> SimpleNamespace:
    return SimpleNamespace(group_size=group_size, advantage=advantage)


def test_contiguous_groups() -> None:
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1, 0.25, 0.5, 0.75, 1])
    want = []
    for group in rewards.split(4):
        want.append((group - group.mean()) / (group.std() + 1e-6) if group.max() > group.min() else group * 0)
    torch.testing.assert_close(compute_advantages({"reward": rewards}, config()), torch.cat(want))
    means = compute_advantages({"reward": rewards}, config(advantage="group_mean"))
    assert means.tolist() == [0.75, -0.25, -0.25, -0.25, 0, 0, 0, 0, -0.375, -0.125, 0.125, 0.375]


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(12)))
def test_labelled_groups_do_not_depend_on_order(order: list[int]) -> None:
    rewards = torch.arange(12.0).square().remainder(5)
    labels = torch.arange(12) // 4
    index = torch.tensor(order)
    contiguous = compute_advantages({"reward": rewards}, config())
    labelled = compute_advantages(
        {"reward": rewards[index], "group": 7 * labels[index]}, config(group_size=5)
    )
    torch.testing.assert_close(labelled, contiguous[index])


@pytest.mark.parametrize("advantage", ["group_std", "group_mean"])
def test_groups_without_signal_are_exactly_zero(advantage: str) -> None:
    rewards = torch.tensor([0.1] * 7 + [0.7] * 7)  # neither mean is exact in float32
    assert compute_advantages({"reward": rewards}, config(7, advantage)).tolist() == [0.0] * 14


def test_a_group_of_one_has_no_signal() -> None:
    assert compute_advantages({"reward": torch.tensor([1.0, 0.0])}, config(1)).tolist() == [0, 0]


def test_trajectories_of_one_episode_count_once() -> None:
    rewards, episodes = torch.tensor([1.0, 1, 1, 0, 0]), torch.tensor([4, 4, 4, 1, 9])
    batch = {"reward": rewards, "episode": episodes, "group": torch.zeros(5, dtype=torch.int64)}
    got = compute_advantages(batch, config(advantage="group_mean"))
    torch.testing.assert_close(got, torch.tensor([2 / 3, 2 / 3, 2 / 3, -1 / 3, -1 / 3]))
    batch["reward"] = torch.tensor([1.0, 0, 1, 0, 0])
    with pytest.raises(ValueError, match="must share one reward"):
        compute_advantages(batch, config())


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match="6 trajectories do not divide"):
        compute_advantages({"reward": torch.zeros(6)}, config())
    with pytest.raises(ValueError, match="advantage must be one of"):
        compute_advantages({"reward": torch.zeros(4)}, config(advantage="std"))
    with pytest.raises(ValueError, match="must be finite"):
        compute_advantages({"reward": torch.tensor([1.0, float("nan"), 0, 0])}, config())
