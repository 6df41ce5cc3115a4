"""One update of the policy from trajectories: clipped, in one or many optimizer steps, split at will.

The weight of every action token is fixed for the optimizer step before it is split into microbatches or over
ranks; from there on a loss is a sum, so no split can change it.
"""

# B trajectories, N action tokens of a microbatch

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agentrl.data.lengths import positive_whole
from agentrl.data.trajectory import Trajectory
from agentrl.data.weights import microbatch_weight_distortion, token_weights
from agentrl.models.policy import Policy, threads_for
from agentrl.train.config import RLConfig
from agentrl.train.distributed import ONE_RANK, Ranks
from agentrl.train.metrics import Max, Mean
from agentrl.train.objective import (
    TokenLoss,
    TokenTargets,
    UpdateMetrics,
    custom_loss,
    surrogate_losses,
    token_statistics,
)
from agentrl.train.rows import Plan, at_actions, loss_of_rows, plan_step, score_rows


def accumulate(
    policy: Policy,
    trajs: Sequence[Trajectory],
    advantages: Tensor,
    cfg: RLConfig,
    plan: Plan,
    *,
    rank: int = 0,
    num_ranks: int | None = None,
    weights: Sequence[Tensor] | None = None,
    kl_weights: Sequence[Tensor] | None = None,
    entropy_weights: Sequence[Tensor] | None = None,
    reference: Policy | None = None,
    token_loss: TokenLoss | None = None,
) -> UpdateMetrics:
    """Forward and backward over the microbatches of one rank; gradients are added to `.grad`.

    trajs [B] and advantages [B] are all those of the optimizer step, and plan.ranks[rank] says which of them
    this rank computes together, in the layout cfg.packing. The loss is the sum of weight times per-token
    loss; weights default to `token_weights` of cfg.loss_mode over all of trajs. Where `trajs` are only this
    rank's, its plan has one rank: pass num_ranks and the weights of the whole step. `kl_weights` and
    `entropy_weights` (default: the same) are those of the KL term to `reference` and of the entropy bonus,
    each of which may so have a denominator of its own; `token_loss` replaces the clipped policy loss.

    The clipped policy loss, its KL term and the entropy bonus need no more of the policy than the token's
    log-prob and entropy, so packed and tree rows compute them with a head of at least rows.FUSED_HEAD_SIZE
    entries, whose gradient then takes fewer matrix products (`fused_policy_loss`); all else takes the general
    way. Either works for a head that is tied or sharded (FSDP2).

    Gradients are num_ranks times the rank's part, for wrappers that average them over ranks (FSDP2, DDP). An
    empty slot, a dummy, is computed with weight zero, since every rank must take part in communication.

    Returns the rank's part of the metrics: adding those of all ranks gives the step's. `distortion` is the
    largest factor by which means over the plan's microbatches would have changed a token's weight.
    Raises ValueError for inputs that do not fit, a plan that lacks a trajectory with action tokens (without
    `weights`) or repeats one, has no such rank or not the same number of slots on each, a KL term without a
    reference, and a token_loss that is a mean.

    >>> from agentrl.models.tiny import TinyAgent, TinyConfig
    >>> trajs = [Trajectory(torch.tensor([1, 2, 3]), torch.ones(2), -torch.ones(2), 0.0) for _ in range(3)]
    >>> from agentrl.train.rows import plan_rows
    >>> plan = plan_rows(trajs, "packed", max_tokens=6)
    >>> plan.ranks
    [[[0, 1], [2]]]
    >>> policy = TinyAgent(TinyConfig(vocab_size=5))
    >>> accumulate(policy, trajs, torch.ones(3), RLConfig(), plan).distortion.value
    1.5
    """
    _check_step(trajs, advantages)
    _check_reference(cfg, reference)
    _check_plan(trajs, plan, rank, is_whole=weights is None)
    num_ranks = positive_whole("num_ranks", len(plan.ranks) if num_ranks is None else num_ranks)
    _check_weights(trajs, weights=weights, kl_weights=kl_weights, entropy_weights=entropy_weights)
    if weights is None:
        weights = token_weights(trajs, cfg.loss_mode, norm_const=cfg.norm_const)
    per_token = {
        "old_logp": [t.sample_logp for t in trajs],
        "advantages": [a.expand(t.num_tokens - 1) for a, t in zip(advantages.cpu(), trajs, strict=True)],
        "weights": weights,
        "kl_weights": kl_weights,
        "entropy_weights": entropy_weights,
    }
    metrics = UpdateMetrics(distortion=Max(_largest_distortion(trajs, plan)))
    first = next(policy.module.parameters())
    wide = torch.empty(0, dtype=torch.promote_types(first.dtype, torch.float32), device=first.device)
    for slot in plan.ranks[rank]:
        if not slot:
            score_rows(policy, [_DUMMY], cfg.packing, cfg.temperature).logp.sum().backward()
            continue
        chosen = [trajs[i] for i in slot]
        ref_logp = None
        if reference is not None and cfg.kl_coef > 0:
            with torch.no_grad():
                ref_logp = score_rows(reference, chosen, cfg.packing, cfg.temperature).logp
        targets = TokenTargets(ref_logp=ref_logp, **_at_actions(trajs, slot, per_token, wide))
        if token_loss is None:
            loss, scores = loss_of_rows(
                policy,
                chosen,
                cfg.packing,
                lambda scores, targets=targets: surrogate_losses(scores, targets, cfg),
                cfg.temperature,
            )
        else:
            scores = score_rows(policy, chosen, cfg.packing, cfg.temperature)
            loss = custom_loss(scores, targets, cfg, token_loss)
        (num_ranks * loss).backward()
        metrics += token_statistics(scores, targets, cfg) + UpdateMetrics(loss=Mean(loss.item(), 0))
    return metrics


def _at_actions(
    trajs: Sequence[Trajectory],
    slot: Sequence[int],
    per_token: Mapping[str, Sequence[Tensor] | None],
    like: Tensor,
) -> dict[str, Tensor]:
    """Each of the vectors [n - 1] of all trajectories as one [N] at the action tokens of trajs[slot]."""
    chosen = [trajs[i] for i in slot]
    return {
        name: at_actions(chosen, [values[i] for i in slot]).to(like)
        for name, values in per_token.items()
        if values is not None
    }


# Tokens that nobody sampled, so that the loss is an empty sum. Two, since attention over a single one has no
# use for queries and keys: their weights would get no gradient, and the ranks would reduce different tensors.
_DUMMY = Trajectory(torch.zeros(2, dtype=torch.int64), torch.zeros(1), torch.zeros(1), reward=0.0)


def _largest_distortion(trajs: Sequence[Trajectory], plan: Plan) -> float:
    counts = [sum(trajs[i].num_actions for i in slot) for slots in plan.ranks for slot in slots]
    return max(microbatch_weight_distortion([count for count in counts if count]), default=1.0)


def _check_step(trajs: Sequence[Trajectory], advantages: Tensor) -> None:
    if advantages.shape != (len(trajs),):
        raise ValueError(f"advantages must have shape ({len(trajs)},), got {tuple(advantages.shape)}")
    if not any(t.num_actions for t in trajs):
        raise ValueError("no trajectory of the batch has an action token: there is nothing to learn from")
    if not bool(advantages.isfinite().all()):
        rows = (~advantages.isfinite()).nonzero().flatten().tolist()
        raise ValueError(f"advantages must be finite; those of trajectories {rows} are not")
    unknown = [i for i, t in enumerate(trajs) if not bool(t.sample_logp[t.action_mask == 1].isfinite().all())]
    if unknown:
        raise ValueError(
            f"sample_logp of trajectories {unknown} is not finite at action "
            "tokens (NaN: not recorded); the update needs the sampler's log-probs, so score them first"
        )


def _check_reference(cfg: RLConfig, reference: Policy | None) -> None:
    if cfg.kl_coef > 0 and reference is None:
        raise ValueError(
            f"kl_coef={cfg.kl_coef} needs a ref_model (of accumulate: reference) to measure the divergence "
            "from, got None"
        )


def _check_weights(trajs: Sequence[Trajectory], **named: Sequence[Tensor] | None) -> None:
    """Weights that are given fit the trajectories: a number a predicted token, finite at actions."""
    for name, weights in named.items():
        if weights is None:
            continue
        if len(weights) != len(trajs):
            raise ValueError(f"{name} must hold a tensor a trajectory, {len(trajs)}; got {len(weights)}")
        for i, (weight, traj) in enumerate(zip(weights, trajs, strict=True)):
            if weight.shape != traj.action_mask.shape:
                raise ValueError(
                    f"{name} of trajectory {i} must have shape {tuple(traj.action_mask.shape)}, "
                    f"got {tuple(weight.shape)}"
                )
            if not bool(weight[traj.action_mask == 1].isfinite().all()):
                raise ValueError(f"{name} must be finite at action tokens; those of trajectory {i} are not")


def _check_plan(trajs: Sequence[Trajectory], plan: Plan, rank: int, *, is_whole: bool) -> None:
    """Every rank meets the others in every slot, and no trajectory counts twice.

    Where the plan `is_whole`, it holds what the denominators count, or the step would not be the one they
    belong to.
    """
    if not 0 <= rank < len(plan.ranks):
        raise ValueError(f"rank must be one of the plan's {len(plan.ranks)}, from 0; got {rank}")
    num_slots = sorted({len(slots) for slots in plan.ranks})
    if len(num_slots) > 1:
        raise ValueError(
            f"the plan gives ranks between {num_slots[0]} and {num_slots[-1]} microbatches: some would wait "
            "for others forever; give each as many, empty ones where there is nothing left"
        )
    planned = sorted(i for slots in plan.ranks for slot in slots for i in slot)
    if planned and not 0 <= planned[0] <= planned[-1] < len(trajs):
        wrong = planned[0] if planned[0] < 0 else planned[-1]
        raise ValueError(f"the plan holds trajectory {wrong}, but there are {len(trajs)}, from 0")
    if len(set(planned)) != len(planned):
        raise ValueError("the plan holds a trajectory more than once")
    if not is_whole:
        return
    missing = {i for i, t in enumerate(trajs) if t.num_actions}.difference(planned)
    if missing:
        raise ValueError(
            f"trajectories {sorted(missing)[:5]} have action tokens but stand in no microbatch of the plan; "
            "leave them out of trajs before weighing, or pass weights="
        )


def apply_gradients(model: Policy, optimizer: torch.optim.Optimizer, loss: float, cfg: RLConfig) -> float:
    """Clip the gradients that backward left and take one optimizer step; returns their norm before clipping.

    Raises ValueError, with the weights still as they were, where loss or norm is not finite.
    """
    total = nn.utils.clip_grad_norm_(model.module.parameters(), cfg.max_grad_norm)
    norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
    if not (abs(loss) < float("inf") and norm < float("inf")):  # NaN compares false
        optimizer.zero_grad(set_to_none=True)
        raise ValueError(
            f"loss is {loss} and the gradient norm {norm}; this optimizer step was not taken. Weights that "
            f"diverged need an lr below {optimizer.param_groups[0]['lr']} from the start; otherwise look for "
            "NaN or far too large values in rewards, log-probs and the coefficients of the loss"
        )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def update_policy(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    trajs: Sequence[Trajectory],
    advantages: Tensor,
    cfg: RLConfig,
    reference: Policy | None = None,
    generator: torch.Generator | None = None,
    ranks: Ranks = ONE_RANK,
) -> dict[str, float]:
    """Update the policy in place from trajectories with advantages [B], the same on every rank.

    cfg.num_epochs passes of cfg.num_minibatches optimizer steps each, over trajectories shuffled by
    `generator`; each optimizer step is split into microbatches of at most cfg.token_budget tokens. The loss
    is the clipped policy-gradient loss against the sampler's log-probs, plus cfg.kl_coef times the k3
    estimate of the KL divergence to `reference`, minus cfg.entropy_coef times the entropy; the weights of
    each part are those of cfg.loss_mode over the trajectories of each optimizer step.

    Returns `loss` and `grad_norm` (means over optimizer steps), `entropy`, `ratio_mean`, `ratio_max`,
    `clip_frac` and, with a KL term, `kl` (over the action tokens of all passes), `distortion` (the largest
    factor by which means over microbatches would have changed a token's weight), and `tokens` (action tokens
    of the trajectories). Raises ValueError for trajectories without action tokens, advantages or log-probs
    that are not finite, a KL term without a reference, and a loss or gradient that is not finite.
    """
    _check_step(trajs, advantages)
    _check_reference(cfg, reference)
    learning = torch.tensor([i for i, t in enumerate(trajs) if t.num_actions])
    metrics = UpdateMetrics()
    optimizer.zero_grad(set_to_none=True)
    with threads_for(policy):
        for _ in range(cfg.num_epochs):
            order = learning[torch.randperm(learning.numel(), generator=generator)]
            for part in order.tensor_split(min(cfg.num_minibatches, learning.numel())):
                chosen = [trajs[i] for i in part.tolist()]
                plan = plan_step(policy, chosen, cfg, ranks.num_ranks)
                own = accumulate(
                    policy, chosen, advantages[part], cfg, plan, rank=ranks.rank, reference=reference
                )
                step = sum(ranks.gather(own), start=UpdateMetrics())
                norm = apply_gradients(policy, optimizer, step.loss.total, cfg)
                metrics += step + UpdateMetrics(loss=Mean(0.0, 1), grad_norm=Mean(norm, 1))
    return {**metrics.values(), "tokens": float(sum(t.num_actions for t in trajs))}


def rl_update(
    model: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Mapping[str, Tensor],
    advantages: Tensor,
    cfg: RLConfig,
    ref_model: Policy | None,
    generator: torch.Generator | None,
) -> dict[str, float]:
    """`update_policy` on a collated batch of B trajectories: updates the model, returns statistics.

    `batch` is what `collate` gives, `advantages` [B]. A row is read up to its last action token: nothing
    after it takes part in the loss, the clipped surrogate of PPO (Schulman et al., arXiv 1707.06347).

    Raises ValueError for a batch without action tokens and as `update_policy` does: for advantages or
    log-probs that are not finite, a KL term without `ref_model`, a loss or gradient that is not finite.
    """
    if not bool(batch["action_mask"].any()):
        raise ValueError("no trajectory of the batch has an action token: there is nothing to learn from")
    return update_policy(model, optimizer, _rows_of(batch), advantages.cpu(), cfg, ref_model, generator)


def _rows_of(batch: Mapping[str, Tensor]) -> list[Trajectory]:
    """The rows of a collated batch as trajectories."""
    batch = {name: value.cpu() for name, value in batch.items()}
    trajs: list[Trajectory] = []
    for row, mask in enumerate(batch["action_mask"]):
        actions = mask.nonzero().flatten()
        length = int(actions[-1]) + 2 if actions.numel() else 1
        logp = batch["sample_logp"][row, : length - 1]
        is_action = mask[: length - 1] == 1
        known = not bool(logp[is_action].isnan().any())
        trajs.append(
            Trajectory(
                ids=batch["ids"][row, :length],
                action_mask=mask[: length - 1],
                sample_logp=logp.where(is_action, 0.0) if known else torch.full_like(logp, torch.nan),
                reward=float(batch["reward"][row]) if "reward" in batch else 0.0,
                group=str(int(batch["group"][row])) if "group" in batch else "",
                episode=str(int(batch["episode"][row])) if "episode" in batch else "",
            )
        )
    return trajs
