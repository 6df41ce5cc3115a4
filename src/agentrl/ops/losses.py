"""Losses: per-token losses without a reduction, and their one reduction on padded batches."""

# B trajectories, T padded width, N action tokens

import torch
from torch import Tensor

from agentrl.data.weights import padded_weights


def policy_loss(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, clip_low: float = 0.2, clip_high: float = 0.2
) -> Tensor:
    """The clipped policy-gradient loss of every token, not reduced, of the shape of logp.

    With r = exp(logp - old_logp): -min(r A, clamp(r, 1 - clip_low, 1 + clip_high) A)   (PPO, arXiv
    1707.06347; two bounds: DAPO, arXiv 2503.14476). old_logp and advantages broadcast to logp.

    >>> policy_loss(torch.tensor([0.0, 1.0]), torch.zeros(2), torch.tensor([1.0, 1.0]))
    tensor([-1.0000, -1.2000])
    """
    ratio = (logp - old_logp).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def kl_to_reference(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """The k3 estimate of KL(policy || reference) of every token, not reduced; never negative.

    With d = ref_logp - logp: exp(d) - d - 1   (http://joschu.net/blog/kl-approx.html).

    >>> kl_to_reference(torch.tensor([-1.0]), torch.tensor([-1.0]))
    tensor([0.])
    """
    difference = ref_logp - logp
    return difference.expm1() - difference


def aggregate_loss(
    per_token: Tensor,
    mask: Tensor,
    mode: str = "token_mean",
    norm_const: float | None = None,
    *,
    episodes: Tensor | None = None,
    groups: Tensor | None = None,
) -> Tensor:
    """The scalar (weights * per_token).sum() of a padded batch that is one whole optimizer step.

    per_token and mask are [B, T-1]; entries where mask is 0 do not matter, whatever they hold. The modes
    and their weights are those of `trajectory_weights`. The sum and its result are float32 at least, whatever
    the dtype of per_token. A part of an optimizer step must not be reduced with this: its denominators would
    be its own. Raises ValueError for shapes that differ, a mask of other values than 0 and 1, a per_token of
    whole numbers, and as trajectory_weights does.

    >>> per_token, mask = torch.tensor([[5.0, 5.0], [1.0, 9.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    >>> aggregate_loss(per_token, mask, "sequence_mean")
    tensor(3.)
    """
    if per_token.shape != mask.shape or mask.ndim != 2:
        raise ValueError(
            "per_token and mask must share one shape [B, T-1], "
            f"got {tuple(per_token.shape)} and {tuple(mask.shape)}"
        )
    if not per_token.is_floating_point():
        raise ValueError(f"per_token must be of a floating-point dtype, got {per_token.dtype}")
    weights = padded_weights(mask, mode, norm_const, episodes=episodes, groups=groups)
    wide = torch.promote_types(per_token.dtype, torch.float32)
    return (weights.to(wide) * per_token.to(wide).masked_fill(mask == 0, 0.0)).sum()


def reinforce_loss(
    logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    mode: str = "token_mean",
    norm_const: float | None = None,
    *,
    episodes: Tensor | None = None,
    groups: Tensor | None = None,
) -> Tensor:
    """The scalar policy-gradient loss: -advantage * logp a token, aggregated as `aggregate_loss` does.

    logp, mask [B, T-1], advantages [B]   (REINFORCE, Williams 1992).

    >>> reinforce_loss(torch.tensor([[-1.0, -3.0]]), torch.tensor([0.5]), torch.tensor([[1.0, 1.0]]))
    tensor(1.)
    """
    if advantages.shape != logp.shape[:1]:
        raise ValueError(f"advantages must have shape {tuple(logp.shape[:1])}, got {tuple(advantages.shape)}")
    per_token = -advantages[:, None] * logp
    return aggregate_loss(per_token, mask, mode, norm_const, episodes=episodes, groups=groups)
