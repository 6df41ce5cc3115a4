"""Advantages: how much better an episode did than the others of its group."""

# B trajectories, E episodes, G groups

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

ADVANTAGES = ("group_std", "group_mean")
_STD_FLOOR = 1e-6  # keeps rewards that differ by rounding from becoming large advantages


class AdvantageConfig(Protocol):
    """What compute_advantages reads of a configuration."""

    @property
    def group_size(self) -> int: ...  # trajectories a group, where the batch carries no group labels
    @property
    def advantage(self) -> str: ...  # one of ADVANTAGES


def rewards_differ(rewards: Iterable[float]) -> bool:
    """Whether the rewards of a group differ, in float32, so that their advantages are not all zero.

    >>> rewards_differ([0.0, 1.0]), rewards_differ([0.1 + 0.2, 0.3])
    (True, False)
    """
    return torch.tensor(list(rewards), dtype=torch.float32).unique().numel() > 1


def group_labels(batch: Mapping[str, Tensor], group_size: int) -> Tensor:
    """Labels int64 [B], 0 to G-1: the batch's own `group`, else contiguous groups of `group_size`.

    Raises ValueError where the batch carries no labels and B is no multiple of group_size.
    """
    if "group" in batch:
        return torch.unique(batch["group"], return_inverse=True)[1]
    count = batch["reward"].numel()
    if count % group_size:
        raise ValueError(
            f"{count} trajectories do not divide into groups of group_size={group_size}; "
            "pass whole groups, or trajectories that name their group"
        )
    return torch.arange(count, device=batch["reward"].device) // group_size


def _episodes(batch: Mapping[str, Tensor], groups: Tensor) -> tuple[Tensor, Tensor]:
    """(index [B] of each trajectory's episode, index [E] of each episode's first trajectory)."""
    order = torch.arange(groups.numel(), device=groups.device)
    if "episode" not in batch:
        return order, order
    episode = torch.unique(batch["episode"], return_inverse=True)[1]
    first = torch.full((int(episode.max()) + 1,), groups.numel(), device=groups.device)
    first = first.scatter_reduce(0, episode, order, "amin")
    for name, value in (("group", groups), ("reward", batch["reward"])):
        if not torch.equal(value[first][episode], value):
            raise ValueError(
                f"trajectories of one episode must share one {name}; episode labels do not fit it"
            )
    return episode, first


def compute_advantages(batch: Mapping[str, Tensor], cfg: AdvantageConfig) -> Tensor:
    """Advantages [B] of a batch's rewards [B], each within its group.

    `group_std` is (reward - mean) / (std + 1e-6) with the unbiased deviation (GRPO, arXiv 2402.03300);
    `group_mean` is reward - mean (Dr. GRPO, arXiv 2503.20783). A group whose rewards are all equal carries no
    signal and gets exactly 0. Trajectories of one episode count once in mean and deviation. Groups are the
    batch's `group` labels, else contiguous runs of cfg.group_size.

    Raises ValueError for an unknown cfg.advantage or a reward that is not finite.

    >>> from types import SimpleNamespace
    >>> cfg = SimpleNamespace(group_size=4, advantage="group_mean")
    >>> compute_advantages({"reward": torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0])}, cfg)
    tensor([ 0.5000, -0.5000, -0.5000,  0.5000,  0.0000,  0.0000,  0.0000,  0.0000])
    """
    if cfg.advantage not in ADVANTAGES:
        raise ValueError(f"advantage must be one of {', '.join(ADVANTAGES)}, got {cfg.advantage!r}")
    rewards = batch["reward"]
    if not bool(rewards.isfinite().all()):
        raise ValueError(f"rewards must be finite, got {rewards[~rewards.isfinite()][0].item()}")
    groups = group_labels(batch, cfg.group_size)
    episode, first = _episodes(batch, groups)
    group, reward = groups[first], rewards[first].double()  # [E]
    num_groups = int(groups.max()) + 1 if groups.numel() else 0
    zeros = reward.new_zeros(num_groups)
    size = zeros.scatter_add(0, group, torch.ones_like(reward))
    centred = reward - (zeros.scatter_add(0, group, reward) / size)[group]
    low = zeros.scatter_reduce(0, group, reward, "amin", include_self=False)
    high = zeros.scatter_reduce(0, group, reward, "amax", include_self=False)
    if cfg.advantage == "group_std":
        variance = zeros.scatter_add(0, group, centred.square()) / (size - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + _STD_FLOOR)[group]
    return centred.where((low < high)[group], 0.0)[episode].to(rewards.dtype)
