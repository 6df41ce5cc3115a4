"""Weights: the one owner of denominators. After this a loss is only ever (weights * per_token).sum()."""

# B trajectories, T padded width

import torch
from torch import Tensor

# mode -> the names that other trainers use for it
MODES: dict[str, tuple[str, ...]] = {
    "token_mean": ("token-mean", "dapo"),
    "token_sum": ("token-sum",),
    "sequence_mean": ("seq-mean-token-mean", "grpo"),
    "sequence_sum": ("seq-mean-token-sum",),
    "sequence_sum_norm": ("seq-mean-token-sum-norm", "dr_grpo"),
    "constant": (),
    "prompt_mean": ("prompt-mean",),
}
_MODE_OF = {name: mode for mode, aliases in MODES.items() for name in (mode, *aliases)}
_NEEDS_NORM = ("constant", "sequence_sum_norm")


def resolve_mode(mode: str) -> str:
    """The mode that a name or an alias of another trainer stands for; ValueError for an unknown one.

    >>> resolve_mode("dr_grpo")
    'sequence_sum_norm'
    """
    if mode not in _MODE_OF:
        raise ValueError(f"unknown loss mode {mode!r}; modes and aliases are {', '.join(_MODE_OF)}")
    return _MODE_OF[mode]


def check_mode(mode: str, norm_const: float | None) -> str:
    """The resolved mode; ValueError where it divides by norm_const and that is not positive."""
    resolved = resolve_mode(mode)
    if resolved in _NEEDS_NORM and (norm_const is None or not 0 < norm_const < float("inf")):
        raise ValueError(f"loss mode {mode!r} divides by norm_const; give a positive one, got {norm_const}")
    return resolved


def _total_by(labels: Tensor, values: Tensor) -> Tensor:
    """For each trajectory, the sum [B] of values [B] over those with its label."""
    index = torch.unique(labels, return_inverse=True)[1]
    return values.new_zeros(values.numel()).scatter_add(0, index, values)[index]


def trajectory_weights(
    num_actions: Tensor,
    mode: str = "token_mean",
    norm_const: float | None = None,
    *,
    episodes: Tensor | None = None,
    groups: Tensor | None = None,
) -> Tensor:
    """The weight, float64 [B], of each action token of the B trajectories of one optimizer step.

    num_actions [B] counts their action tokens; episodes, groups [B] int64 label what belongs together
    (default: each trajectory is its own episode). With N = num_actions.sum(), n_e the action tokens of an
    episode, n_g those of a group, and E and G the episodes and groups that have any:

        token_mean 1/N | token_sum 1 | sequence_mean 1/(n_e E) | sequence_sum 1/E
        sequence_sum_norm 1/(E norm_const) | constant 1/norm_const | prompt_mean 1/(n_g G)

    Modes without norm_const ignore it. A trajectory without action tokens counts nothing. Every rank must
    pass the trajectories of all ranks: the denominators belong to the optimizer step, not to the part of it
    that a rank or a microbatch holds.

    Raises ValueError for an unknown mode, a norm_const that does not fit it, or prompt_mean without groups.

    >>> trajectory_weights(torch.tensor([2, 10]), "sequence_mean")
    tensor([0.2500, 0.0500], dtype=torch.float64)
    """
    mode = check_mode(mode, norm_const)
    counts = num_actions.double()
    if mode == "token_sum":
        return torch.ones_like(counts)
    if mode == "constant":
        return torch.full_like(counts, 1.0 / (norm_const or 1.0))
    if mode == "token_mean":
        return torch.full_like(counts, 1.0) / counts.sum().clamp(min=1)
    if mode == "prompt_mean" and groups is None:
        raise ValueError(
            "prompt_mean averages over prompts and needs the group of each trajectory; pass groups="
        )
    labels = groups if mode == "prompt_mean" else episodes
    if labels is None:
        labels = torch.arange(counts.numel(), device=counts.device)
    if labels.shape != counts.shape:
        raise ValueError(f"labels must have shape {tuple(counts.shape)}, got {tuple(labels.shape)}")
    num_units = torch.unique(labels[counts > 0]).numel() or 1
    if mode in ("sequence_mean", "prompt_mean"):
        return 1.0 / (_total_by(labels, counts).clamp(min=1) * num_units)
    return torch.full_like(counts, 1.0 / (num_units * (norm_const or 1.0)))


def padded_weights(
    mask: Tensor,
    mode: str = "token_mean",
    norm_const: float | None = None,
    *,
    episodes: Tensor | None = None,
    groups: Tensor | None = None,
) -> Tensor:
    """The weight, float64 [B, T-1], of every entry of a padded batch; 0 where mask [B, T-1] is 0.

    >>> padded_weights(torch.tensor([[1.0, 1.0], [1.0, 0.0]]), "sequence_mean")
    tensor([[0.2500, 0.2500],
            [0.5000, 0.0000]], dtype=torch.float64)
    """
    weights = trajectory_weights(mask.sum(-1), mode, norm_const, episodes=episodes, groups=groups)
    return weights[:, None] * mask.double()
