"""Trajectories and gradients that the tests of scoring and of Hugging Face models share."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl.data.trajectory import Trajectory
from agentrl.models.policy import Policy


def _trajectory(rng: np.random.Generator, ids: list[int]) -> Trajectory:
    mask = torch.tensor(rng.random(len(ids) - 1) < 0.6).float()
    return Trajectory(torch.tensor(ids), mask, -mask, reward=0.0)


def _related_trajectories(seed: int, num_trajs: int = 7, vocab: int = 23) -> list[Trajectory]:
    """Trajectories of which many begin like another: nested prefixes, duplicates, branches in an action."""
    rng = np.random.default_rng(seed)
    known: list[list[int]] = []
    for _ in range(num_trajs):
        prefix: list[int] = []
        if known and rng.random() < 0.7:
            other = known[rng.integers(len(known))]
            prefix = other[: rng.integers(0, len(other) + 1)]
        fresh = rng.integers(1, vocab, size=rng.integers(0, 9)).tolist()
        known.append((prefix + fresh)[:24] or [1])
    return [_trajectory(rng, ids) for ids in known]


def _gradients(policy: Policy, log_probs: Tensor, weights: Tensor) -> dict[str, Tensor]:
    policy.module.zero_grad()
    (log_probs * weights).sum().backward()
    return {
        name: p.grad.clone() if p.grad is not None else torch.zeros_like(p)
        for name, p in policy.module.named_parameters()
    }


@pytest.fixture(scope="session")
def related_trajectories() -> Callable[..., list[Trajectory]]:
    return _related_trajectories


@pytest.fixture(scope="session")
def gradients() -> Callable[..., dict[str, Tensor]]:
    return _gradients
