"""The padded batch."""

import pytest
import torch

from agentrl import Trajectory, collate, pad_rows


def trajectory(n: int, **more: object) -> Trajectory:
    mask = torch.ones(n - 1)
    return Trajectory(torch.arange(n), mask, -mask, **{"reward": 1.0, "info": {"task": "a"}, **more})


def test_rows_are_padded_on_the_right() -> None:
    batch = collate([trajectory(2), trajectory(4, reward=0.0, info={"task": "b"})], pad_id=9)
    assert batch["ids"].tolist() == [[0, 1, 9, 9], [0, 1, 2, 3]]
    assert batch["action_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]
    assert batch["sample_logp"].tolist() == [[-1, 0, 0], [-1, -1, -1]]
    assert batch["reward"].tolist() == [1, 0]
    assert batch["group"].tolist() == [0, 1]
    assert batch["episode"].tolist() == [0, 1]


def test_labels_number_groups_and_episodes_by_first_appearance() -> None:
    trajs = [trajectory(3, group=g, episode=e) for g, e in (("x", "1"), ("y", "2"), ("x", "1"))]
    batch = collate(trajs, pad_id=0)
    assert batch["group"].tolist() == [0, 1, 0]
    assert batch["episode"].tolist() == [0, 1, 0]


def test_a_trajectory_without_group_leaves_the_batch_unlabelled() -> None:
    assert "group" not in collate([trajectory(3), trajectory(3, info={})], pad_id=0)


def test_one_token_trajectories_have_no_entries() -> None:
    batch = collate([trajectory(1), trajectory(1)], pad_id=0)
    assert batch["ids"].shape == (2, 1)
    assert batch["action_mask"].shape == (2, 0)


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one trajectory"):
        collate([], pad_id=0)
    with pytest.raises(ValueError, match="at least one tensor"):
        pad_rows([], 3, 0)
    with pytest.raises(ValueError, match="tensor 1 must be a vector of at most width=2"):
        pad_rows([torch.zeros(2), torch.zeros(3)], 2, 0)
    with pytest.raises(ValueError, match=r"tensor 1 is torch\.int64"):
        pad_rows([torch.zeros(2), torch.zeros(2, dtype=torch.int64)], 2, 0)
