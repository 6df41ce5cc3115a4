"""What a step records of its batch, by counting; and that the report reads what the trainer wrote."""

from typing import Any

import pytest
import torch

from agentrl import Trajectory
from agentrl.train.recording import batch_picture, position_counts


def trajectory(ids: list[int], actions: list[int], **info: Any) -> Trajectory:
    mask = torch.tensor([float(place in actions) for place in range(1, len(ids))])
    return Trajectory(torch.tensor(ids), mask, -mask, 0.0, {"task": "t", **info})


A = trajectory([1, 2, 3, 4, 5, 6], [2, 3, 5], num_computed=5)
B = trajectory([1, 2, 3, 7], [2, 3], num_computed=1)
C = trajectory([9, 8], [1], num_computed=1)


def test_positions_by_layout() -> None:
    assert position_counts([A, B, C], [A, B]) == {
        "sampled_actions": 6,
        "positions_sampled_padded": 18,
        "positions_padded": 12,
        "positions_packed": 10,
        "positions_tree": 7,  # 1 2 3 once
        "actions_tree": 4,  # token 3, an action of both, once
        "positions_decoded": 7,
        "positions_uncached": (2 + 3 + 5) + (2 + 3) + 1,
    }


def test_without_signal_and_without_a_count() -> None:
    counts = position_counts([trajectory([1, 2], [1]), C], [])
    assert "positions_decoded" not in counts
    assert counts["positions_padded"] == counts["positions_tree"] == counts["actions_tree"] == 0


def test_rows_of_a_batch() -> None:
    picture = batch_picture([A, B, C], step=3, row_tokens=8, vocab_size=10)
    assert picture["layouts"]["padded"] == [
        {"runs": [["prompt", 2], ["action", 2], ["tool", 1], ["action", 1]], "borders": [0]},
        {"runs": [["prompt", 2], ["action", 2], ["padding", 2]], "borders": [0]},
        {"runs": [["prompt", 1], ["action", 1], ["padding", 4]], "borders": [0]},
    ]
    packed = picture["layouts"]["packed"]
    assert [row["borders"] for row in packed] == [[0, 6], [0]]
    assert all(sum(length for _, length in row["runs"]) == 8 for row in packed)
    (first, second) = picture["layouts"]["tree"]
    borders = {tuple(row["borders"]) for row in (first, second)}
    assert borders <= {(0, 4), (0, 3), (0, 6), (0,)}
    tokens = sum(n for row in (first, second) for kind, n in row["runs"] if kind != "padding")
    assert tokens == 9
    assert (picture["num_shown"], picture["vocab_size"]) == (3, 10)


def test_a_picture_holds_64_trajectories_at_most() -> None:
    picture = batch_picture([C] * 70, step=1, row_tokens=4, vocab_size=10)
    assert (picture["num_trajectories"], picture["num_shown"]) == (70, 64)
    assert len(picture["layouts"]["padded"]) == 64
    with pytest.raises(ValueError, match="has 6 tokens but a row holds 4"):
        batch_picture([A], step=1, row_tokens=4, vocab_size=10)
