"""Trajectories as one padded batch: the plain layout that every saving is compared with."""

# B trajectories, T padded width, n tokens of one trajectory

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from agentrl.data.trajectory import Trajectory


def pad_rows(tensors: Sequence[Tensor], width: int, value: float) -> Tensor:
    """1-D tensors of one dtype, stacked to [B, width] and filled on the right with `value`.

    Raises ValueError where a tensor is not a vector, is longer than `width`, or has another dtype.

    >>> pad_rows([torch.tensor([1, 2]), torch.tensor([3])], 3, 0)
    tensor([[1, 2, 0],
            [3, 0, 0]])
    """
    if not tensors:
        raise ValueError("pad_rows needs at least one tensor to know the dtype, got none")
    rows = tensors[0].new_full((len(tensors), width), value)
    for i, tensor in enumerate(tensors):
        if tensor.ndim != 1 or tensor.numel() > width:
            raise ValueError(
                f"tensor {i} must be a vector of at most width={width} entries, got {tuple(tensor.shape)}"
            )
        if tensor.dtype != rows.dtype:
            raise ValueError(
                f"tensor {i} is {tensor.dtype}, tensor 0 is {rows.dtype}; pad one dtype at a time"
            )
        rows[i, : tensor.numel()] = tensor
    return rows


def label_numbers(names: Sequence[str]) -> Tensor:
    """Names as int64 [B], numbered in the order in which they first appear."""
    numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([numbers[name] for name in names])


def collate(trajs: Iterable[Trajectory], pad_id: int) -> dict[str, Tensor]:
    """The padded batch of B trajectories, T tokens wide (the longest).

        ids         [B, T]   int64, filled with pad_id
        action_mask [B, T-1] float32: 1 where ids[:, t+1] was sampled by the policy; 0 on padding
        sample_logp [B, T-1] float32, nats; 0 on padding
        reward      [B]      float32
        episode     [B]      int64: equal where trajectories belong to one episode
        group       [B]      int64: equal where trajectories are compared with each other; absent where a
                             trajectory names no group

    Raises ValueError for an empty list.

    >>> t = Trajectory(torch.tensor([5, 7]), torch.ones(1), torch.zeros(1), reward=1.0, info={"task": "abs"})
    >>> batch = collate([t, t], pad_id=0)
    >>> batch["ids"], batch["group"]
    (tensor([[5, 7],
            [5, 7]]), tensor([0, 0]))
    """
    trajs = list(trajs)
    if not trajs:
        raise ValueError("collate needs at least one trajectory, got none")
    width = max(t.num_tokens for t in trajs)
    batch = {
        "ids": pad_rows([t.ids for t in trajs], width, pad_id),
        "action_mask": pad_rows([t.action_mask for t in trajs], width - 1, 0),
        "sample_logp": pad_rows([t.sample_logp for t in trajs], width - 1, 0),
        "reward": torch.tensor([t.reward for t in trajs], dtype=torch.float32),
        "episode": label_numbers([t.episode for t in trajs]),
    }
    if all(t.group for t in trajs):
        batch["group"] = label_numbers([t.group for t in trajs])
    return batch
