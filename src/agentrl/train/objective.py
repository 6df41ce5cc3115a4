"""The objective: what the action tokens of an optimizer step lose, and the figures that are kept of them."""

# N action tokens of a microbatch

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch
from torch import Tensor

from agentrl.data.weights import step_in_parts
from agentrl.ops.losses import kl_to_reference, policy_loss
from agentrl.train.config import RLConfig
from agentrl.train.metrics import Max, Mean
from agentrl.train.rows import TokenScores


@dataclass(frozen=True, slots=True)
class TokenTargets:
    """What the objective needs of N action tokens besides the policy's scores."""

    old_logp: Tensor  # [N] nats, under the policy that sampled them
    advantages: Tensor  # [N]
    weights: Tensor  # [N], fixed for the optimizer step; the loss is a sum
    kl_weights: Tensor | None = None  # [N], those of the KL term; None: the same
    ref_logp: Tensor | None = None  # [N] nats, under the reference; None without a KL term
    entropy_weights: Tensor | None = None  # [N], those of the entropy bonus; None: the same


@dataclass(frozen=True, slots=True)
class UpdateMetrics:
    """Statistics of an update; adding those of its parts gives exactly those of the whole."""

    loss: Mean = field(default_factory=Mean)  # sum over an optimizer step, mean over optimizer steps
    grad_norm: Mean = field(default_factory=Mean)  # over optimizer steps, before clipping
    entropy: Mean = field(default_factory=Mean)  # nats, over action tokens
    ratio_mean: Mean = field(default_factory=Mean)  # over action tokens
    ratio_max: Max = field(default_factory=Max)
    clip_frac: Mean = field(default_factory=Mean)  # share of action tokens whose gradient the clip removed
    kl: Mean = field(default_factory=Mean)  # nats to the reference, over action tokens
    distortion: Max = field(default_factory=Max)  # what local means would have done to a token's weight

    def __add__(self, other: "UpdateMetrics") -> "UpdateMetrics":
        return UpdateMetrics(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def values(self) -> dict[str, float]:
        """Plain numbers by name; a metric that counted nothing is left out."""
        named = ((f.name, cast(Mean | Max, getattr(self, f.name)).value) for f in fields(self))
        return {name: value for name, value in named if value is not None}


# The loss of every token [N], not reduced.
TokenLoss = Callable[[TokenScores, TokenTargets], Tensor]


def surrogate_losses(scores: TokenScores, targets: TokenTargets, cfg: RLConfig) -> Tensor:
    """The weighted losses [N] of the tokens, which the step sums:

    weights * clipped policy loss + kl_weights * kl_coef * k3 - entropy_weights * entropy_coef * entropy
    """
    clipped = policy_loss(scores.logp, targets.old_logp, targets.advantages, cfg.clip_low, cfg.clip_high)
    return _with_further_parts(targets.weights * clipped, scores, targets, cfg)


def _with_further_parts(losses: Tensor, scores: TokenScores, targets: TokenTargets, cfg: RLConfig) -> Tensor:
    """Weighted policy losses [N] with the KL term and the entropy bonus, those of them that are on."""
    if targets.ref_logp is not None:
        weights = targets.weights if targets.kl_weights is None else targets.kl_weights
        losses = losses + cfg.kl_coef * weights * kl_to_reference(scores.logp, targets.ref_logp)
    if cfg.entropy_coef > 0:
        weights = targets.weights if targets.entropy_weights is None else targets.entropy_weights
        losses = losses - cfg.entropy_coef * weights * scores.entropy
    return losses


def custom_loss(scores: TokenScores, targets: TokenTargets, cfg: RLConfig, token_loss: TokenLoss) -> Tensor:
    """The scalar sum of `surrogate_losses` with token_loss in place of the clipped policy loss.

    Raises ValueError where token_loss does not give one number a token.
    """
    with step_in_parts():
        per_token: Any = token_loss(scores, targets)
    if not isinstance(per_token, Tensor):
        raise ValueError(
            f"the loss must be a tensor of one number a token, got {type(per_token).__name__}: return the "
            "tokens' losses"
        )
    if per_token.shape != scores.logp.shape:
        raise ValueError(
            f"the loss must be one number a token, of shape {tuple(scores.logp.shape)}, got "
            f"{tuple(per_token.shape)}: this is a part of an optimizer step, and a mean over it is not "
            "a part of the step's mean; return the tokens' losses, their weights are fixed already"
        )
    return _with_further_parts(targets.weights * per_token, scores, targets, cfg).sum()


@torch.no_grad()
def token_statistics(scores: TokenScores, targets: TokenTargets, cfg: RLConfig) -> UpdateMetrics:
    """The statistics of N action tokens; those of parts of an optimizer step are added."""
    ratio = (scores.logp - targets.old_logp).exp()
    too_high = (targets.advantages > 0) & (ratio > 1 + cfg.clip_high)
    too_low = (targets.advantages < 0) & (ratio < 1 - cfg.clip_low)
    kl = Mean()
    if targets.ref_logp is not None:
        kl = Mean.of(kl_to_reference(scores.logp, targets.ref_logp))
    return UpdateMetrics(
        entropy=Mean.of(scores.entropy),
        ratio_mean=Mean.of(ratio),
        ratio_max=Max.of(ratio),
        clip_frac=Mean.of((too_high | too_low).double()),
        kl=kl,
    )
