"""One update of the policy from a batch of trajectories: clipped, in one or many optimizer steps.

A layout (padded here) turns trajectories into two things about the same N action tokens: TokenScores, what
the policy says of them, and TokenTargets, what the objective needs besides. Everything after is shared.
"""

# B trajectories, T padded width, N action tokens

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import cast

import torch
from torch import Tensor, nn

from agentrl.data.weights import padded_weights
from agentrl.models.policy import Policy
from agentrl.models.scoring import sequence_log_probs, sequence_scores
from agentrl.ops.losses import kl_to_reference, policy_loss
from agentrl.train.config import RLConfig
from agentrl.train.metrics import Max, Mean


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What the policy says of N action tokens."""

    logp: Tensor  # [N] nats, with gradient
    entropy: Tensor  # [N] nats of the distribution that the token was drawn from, without gradient


@dataclass(frozen=True, slots=True)
class TokenTargets:
    """What the objective needs of N action tokens besides the policy's scores."""

    old_logp: Tensor  # [N] nats, under the policy that sampled them
    advantages: Tensor  # [N]
    weights: Tensor  # [N], fixed for the optimizer step; the loss is a sum
    ref_logp: Tensor | None = None  # [N] nats, under the reference; None without a KL term


@dataclass(frozen=True, slots=True)
class UpdateMetrics:
    """Statistics of an update; adding those of its parts gives exactly those of the whole."""

    loss: Mean = field(default_factory=Mean)  # over optimizer steps
    grad_norm: Mean = field(default_factory=Mean)  # over optimizer steps, before clipping
    entropy: Mean = field(default_factory=Mean)  # nats, over action tokens
    ratio_mean: Mean = field(default_factory=Mean)  # over action tokens
    ratio_max: Max = field(default_factory=Max)
    clip_frac: Mean = field(default_factory=Mean)  # share of action tokens whose gradient the clip removed
    kl: Mean = field(default_factory=Mean)  # nats to the reference, over action tokens

    def __add__(self, other: "UpdateMetrics") -> "UpdateMetrics":
        return UpdateMetrics(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def values(self) -> dict[str, float]:
        """Plain numbers by name; a metric that counted nothing is left out."""
        named = ((f.name, cast(Mean | Max, getattr(self, f.name)).value) for f in fields(self))
        return {name: value for name, value in named if value is not None}


def surrogate_loss(scores: TokenScores, targets: TokenTargets, cfg: RLConfig) -> tuple[Tensor, UpdateMetrics]:
    """The scalar (weights * (clipped policy loss + kl_coef * k3)).sum() and its token statistics.

    A sum: parts of an optimizer step are added, whatever the split.
    """
    per_token = policy_loss(scores.logp, targets.old_logp, targets.advantages, cfg.clip_low, cfg.clip_high)
    with torch.no_grad():
        ratio = (scores.logp - targets.old_logp).exp()
        too_high = (targets.advantages > 0) & (ratio > 1 + cfg.clip_high)
        too_low = (targets.advantages < 0) & (ratio < 1 - cfg.clip_low)
    kl = Mean()
    if targets.ref_logp is not None:
        per_token_kl = kl_to_reference(scores.logp, targets.ref_logp)
        per_token = per_token + cfg.kl_coef * per_token_kl
        kl = Mean.of(per_token_kl.detach())
    metrics = UpdateMetrics(
        entropy=Mean.of(scores.entropy),
        ratio_mean=Mean.of(ratio),
        ratio_max=Max.of(ratio),
        clip_frac=Mean.of((too_high | too_low).double()),
        kl=kl,
    )
    return (targets.weights * per_token).sum(), metrics


def apply_gradients(model: Policy, optimizer: torch.optim.Optimizer, loss: float, cfg: RLConfig) -> float:
    """Clip the gradients that backward left and take one optimizer step; returns their norm before clipping.

    Raises ValueError, with the weights still as they were, where loss or norm is not finite.
    """
    norm = float(nn.utils.clip_grad_norm_(model.module.parameters(), cfg.max_grad_norm))
    if not (abs(loss) < float("inf") and norm < float("inf")):  # NaN compares false
        optimizer.zero_grad(set_to_none=True)
        raise ValueError(
            f"loss is {loss} and the gradient norm {norm}; this optimizer step was not taken. "
            "Check rewards and log-probs for NaN, or lower lr"
        )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


@dataclass(frozen=True, slots=True)
class PaddedStep:
    """The trajectories of one optimizer step in the plain padded layout, with full logits."""

    ids: Tensor  # [B, T]
    is_action: Tensor  # [B, T-1] bool
    old_logp: Tensor  # [B, T-1]
    advantages: Tensor  # [B]
    weights: Tensor  # [B, T-1]
    ref_logp: Tensor | None  # [B, T-1]

    def scores(self, model: Policy, temperature: float) -> TokenScores:
        """The policy's log-probs and entropies at the action tokens, row by row."""
        logp, entropy = sequence_scores(model, self.ids, temperature)
        return TokenScores(logp[self.is_action], entropy[self.is_action])

    def targets(self, dtype: torch.dtype) -> TokenTargets:
        """What the objective needs of the same tokens, in the dtype of their log-probs."""
        advantages = self.advantages[:, None].expand_as(self.old_logp)
        old_logp, advantages, weights = (
            values[self.is_action].to(dtype) for values in (self.old_logp, advantages, self.weights)
        )
        ref_logp = None if self.ref_logp is None else self.ref_logp[self.is_action].to(dtype)
        return TokenTargets(old_logp, advantages, weights, ref_logp)


def _check_batch(batch: Mapping[str, Tensor], advantages: Tensor) -> None:
    mask = batch["action_mask"]
    if advantages.shape != mask.shape[:1]:
        raise ValueError(f"advantages must have shape {tuple(mask.shape[:1])}, got {tuple(advantages.shape)}")
    if not bool(mask.any()):
        raise ValueError("no trajectory of the batch has an action token: there is nothing to learn from")
    if not bool(advantages.isfinite().all()):
        rows = (~advantages.isfinite()).nonzero().flatten().tolist()
        raise ValueError(f"advantages must be finite; those of trajectories {rows} are not")
    known = (batch["sample_logp"].isfinite() | (mask == 0)).all(-1)
    if not bool(known.all()):
        raise ValueError(
            f"sample_logp of trajectories {(~known).nonzero().flatten().tolist()} is not finite at action "
            "tokens (NaN: not recorded); the update needs the sampler's log-probs, so score them first"
        )


def _padded_steps(
    batch: Mapping[str, Tensor],
    advantages: Tensor,
    cfg: RLConfig,
    ref_logp: Tensor | None,
    generator: torch.Generator | None,
) -> Iterable[PaddedStep]:
    """num_epochs times num_minibatches optimizer steps over the rows that have action tokens, shuffled."""
    rows = batch["action_mask"].any(-1).nonzero().flatten()
    for _ in range(cfg.num_epochs):
        order = rows[torch.randperm(rows.numel(), generator=generator).to(rows.device)]
        for part in order.tensor_split(min(cfg.num_minibatches, rows.numel())):
            mask = batch["action_mask"][part]
            episodes, groups = (batch[name][part] if name in batch else None for name in ("episode", "group"))
            yield PaddedStep(
                ids=batch["ids"][part],
                is_action=mask == 1,
                old_logp=batch["sample_logp"][part],
                advantages=advantages[part],
                weights=padded_weights(mask, cfg.loss_mode, cfg.norm_const, episodes=episodes, groups=groups),
                ref_logp=None if ref_logp is None else ref_logp[part],
            )


def rl_update(
    model: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Mapping[str, Tensor],
    advantages: Tensor,
    cfg: RLConfig,
    ref_model: Policy | None,
    generator: torch.Generator | None,
) -> dict[str, float]:
    """Update the model in place from a collated batch of B trajectories with advantages [B].

    cfg.num_epochs passes of cfg.num_minibatches optimizer steps each, over trajectories shuffled by
    `generator`. The loss is the clipped policy-gradient loss against the sampler's log-probs, plus
    cfg.kl_coef times the k3 estimate of the KL divergence to `ref_model`; its weights are those of
    cfg.loss_mode over the trajectories of each optimizer step. Every position is computed, with full logits:
    the reference path.

    Returns `loss` and `grad_norm` (means over optimizer steps), `entropy`, `ratio_mean`, `ratio_max`,
    `clip_frac` and, with a KL term, `kl` (over the action tokens of all passes), and `tokens` (action tokens
    of the batch). Raises ValueError for a batch without action tokens, advantages or log-probs that are not
    finite, a KL term without ref_model, and a loss or gradient that is not finite.
    """
    device = next(model.module.parameters()).device
    batch = {name: value.to(device) for name, value in batch.items()}
    advantages = advantages.to(device)
    _check_batch(batch, advantages)
    ref_logp = None
    if cfg.kl_coef > 0:
        if ref_model is None:
            raise ValueError(
                f"kl_coef={cfg.kl_coef} needs a ref_model to measure the divergence from, got None"
            )
        with torch.no_grad():
            ref_logp = sequence_log_probs(ref_model, batch["ids"], cfg.temperature)
    metrics = UpdateMetrics()
    optimizer.zero_grad(set_to_none=True)
    for step in _padded_steps(batch, advantages, cfg, ref_logp, generator):
        scores = step.scores(model, cfg.temperature)
        loss, token_metrics = surrogate_loss(scores, step.targets(scores.logp.dtype), cfg)
        loss.backward()
        norm = apply_gradients(model, optimizer, loss.item(), cfg)
        metrics += token_metrics + UpdateMetrics(loss=Mean(loss.item(), 1), grad_norm=Mean(norm, 1))
    return {**metrics.values(), "tokens": float(batch["action_mask"].sum())}
