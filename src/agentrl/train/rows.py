"""Rows: how the trajectories of a microbatch become what the model reads, and which of them share one.

Three layouts give the same numbers: `packed`, one row without padding; `tree`, one row in which a prefix that
several trajectories share stands once; `padded`, a row each with full logits, the plain reference.
"""

# B trajectories, N action tokens

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from agentrl.data.collate import pad_rows
from agentrl.data.microbatch import plan_microbatches, token_budget_batches
from agentrl.data.packing import PackedBatch, pack_sequences
from agentrl.data.prefix_tree import prefix_forest
from agentrl.data.sequence_cost import Cost, attention_cost
from agentrl.data.trajectory import Trajectory
from agentrl.models.policy import Policy
from agentrl.models.scoring import packed_loss, packed_scores, sequence_scores
from agentrl.models.shape import shape_of
from agentrl.train.config import Packing, RLConfig

# Compiled attention kernels are made anew for every row length; steps of 128 keep them few.
_CUDA_MULTIPLE = 128

# Entries of a head's weight from which its loss is fused. CPU time of the fused over the general head, 1,000
# tokens with entropy in float32: 1.21 at 20,000 ids of width 64 (1.3M entries), 1.05 at 8,000 of 256 (2M),
# 1.02 at 16,000 of 256 (4M), 0.85 at 32,000 of 512 (16M).
FUSED_HEAD_SIZE = 1 << 22


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What the policy says of N action tokens: by trajectory, then by offset, whatever the layout."""

    logp: Tensor  # [N] nats
    entropy: Tensor  # [N] nats, of the distribution that the token was drawn from


class Plan(Protocol):
    """Which trajectories each rank computes together: `ranks[rank][slot]` lists indices, none in a dummy."""

    @property
    def ranks(self) -> Sequence[Sequence[Sequence[int]]]: ...


@dataclass(frozen=True, slots=True)
class DealtPlan:
    """Batches dealt out to ranks in turn; the last round may leave slots empty."""

    ranks: list[list[list[int]]]

    @classmethod
    def deal(cls, batches: Sequence[list[int]], num_ranks: int) -> "DealtPlan":
        """
        >>> DealtPlan.deal([[2], [0, 1], [3]], num_ranks=2).ranks
        [[[2], [3]], [[0, 1], []]]
        """
        num_slots = -(-len(batches) // num_ranks)
        filled = [*batches, *([] for _ in range(num_slots * num_ranks - len(batches)))]
        return cls([filled[rank::num_ranks] for rank in range(num_ranks)])


def plan_rows(
    trajs: Sequence[Trajectory],
    packing: Packing,
    max_tokens: int,
    num_ranks: int = 1,
    cost: Cost | None = None,
) -> Plan:
    """A plan whose microbatches compute at most max_tokens positions each, in the given layout.

    Ranks share the cost evenly, by default the tokens; padded rows are dealt out in turn.
    Raises ValueError for a trajectory longer than max_tokens.
    """
    lengths = [t.num_tokens for t in trajs]
    for i, length in enumerate(lengths):
        if length > max_tokens:
            raise ValueError(
                f"trajectory {i} has {length} tokens but a microbatch holds {max_tokens}; "
                "raise microbatch_tokens"
            )
    if packing == "padded":
        return DealtPlan.deal(token_budget_batches(lengths, max_tokens), num_ranks)
    sequences = prefix_forest([t.ids for t in trajs]) if packing == "tree" else lengths
    return plan_microbatches(sequences, max_tokens=max_tokens, num_ranks=num_ranks, cost=cost)


def plan_step(policy: Policy, trajs: Sequence[Trajectory], cfg: RLConfig, num_ranks: int) -> Plan:
    """`plan_rows` of one optimizer step, with the costs that cfg.planning_cost names.

    The FLOPs of a sequence take the share of action tokens to be that of `trajs`. One rank has nothing to
    share, and a model whose configuration does not say its shape no FLOPs: both are planned by tokens.
    """
    shape = shape_of(policy) if cfg.planning_cost == "attention" and num_ranks > 1 else None
    cost = None
    if shape is not None:
        share = sum(t.num_actions for t in trajs) / sum(t.num_tokens for t in trajs)
        cost = attention_cost(shape, action_share=share)
    return plan_rows(trajs, cfg.packing, cfg.token_budget, num_ranks, cost)


def score_rows(
    policy: Policy, trajs: Sequence[Trajectory], packing: Packing, temperature: float = 1.0
) -> TokenScores:
    """The policy's log-probs and entropies at the action tokens of trajectories, computed in one call."""
    device = next(policy.module.parameters()).device
    if packing == "padded":
        width = max(t.num_tokens for t in trajs)
        ids = pad_rows([t.ids for t in trajs], width, 0).to(device)
        logp, entropy = sequence_scores(policy, ids, temperature)
        is_action = pad_rows([t.action_mask for t in trajs], width - 1, 0).to(device) == 1
        return TokenScores(logp[is_action], entropy[is_action])
    return TokenScores(*packed_scores(policy, _one_row(trajs, packing, device), temperature))


def loss_of_rows(
    policy: Policy,
    trajs: Sequence[Trajectory],
    packing: Packing,
    token_loss: Callable[[TokenScores], Tensor],
    temperature: float = 1.0,
) -> tuple[Tensor, TokenScores]:
    """The scalar sum of token_loss over the action tokens, and their scores, without gradient.

    `token_loss(scores)` gives weighted losses [N] that depend on no other tensor with a gradient. Packed rows
    compute it with the head (`fused_policy_loss`), unless that is smaller than FUSED_HEAD_SIZE; padded rows
    are the plain reference.
    """
    device = next(policy.module.parameters()).device
    if packing == "padded" or policy.head().weight.numel() < FUSED_HEAD_SIZE:
        scores = score_rows(policy, trajs, packing, temperature)
        return token_loss(scores).sum(), TokenScores(scores.logp.detach(), scores.entropy.detach())

    def with_head(logp: Tensor, entropy: Tensor | None, positions: Tensor) -> Tensor:
        assert entropy is not None
        return token_loss(TokenScores(logp, entropy))

    fused = packed_loss(policy, _one_row(trajs, packing, device), with_head, temperature)
    assert fused.entropy is not None
    return fused.loss, TokenScores(fused.log_probs, fused.entropy)


def _one_row(trajs: Sequence[Trajectory], packing: Packing, device: torch.device) -> PackedBatch:
    return pack_sequences(
        trajs,
        sum(t.num_tokens for t in trajs),
        share_prefixes=packing == "tree",
        pad_to=_CUDA_MULTIPLE if device.type == "cuda" else None,
    ).to(device)


def at_actions(trajs: Sequence[Trajectory], values: Sequence[Tensor]) -> Tensor:
    """Values [n - 1] of each trajectory at its action tokens, as one [N] in the order of `TokenScores`."""
    return torch.cat([value[t.action_mask == 1] for t, value in zip(trajs, values, strict=True)])
