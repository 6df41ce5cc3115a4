"""Log-probs of a policy on padded and packed rows."""

# B trajectories, T padded width, R rows, L row length, N action tokens, D width, V vocabulary

from typing import Any

import torch
from torch import Tensor, nn

from agentrl.data.packing import PackedBatch
from agentrl.models.policy import Policy, head_logits
from agentrl.ops.fused_loss import FusedLoss, TokenLoss, fused_policy_loss
from agentrl.ops.log_probs import action_log_probs, selected_log_probs


def as_policy(model: Policy | nn.Module) -> Policy:
    """The model itself if it is a Policy, else the transformers model wrapped in `HFPolicy`.

    Raises ValueError for anything else.
    """
    if isinstance(model, Policy):
        return model
    if not any(base.__module__.startswith("transformers.") for base in type(model).__mro__):
        raise ValueError(f"model must be a Policy or a transformers causal LM, got {type(model).__name__}")
    from agentrl.models.hf import HFPolicy  # transformers is an extra

    wrapped: Any = model
    return HFPolicy(wrapped)


def sequence_log_probs(model: Policy | nn.Module, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probs (nats) [B, T-1] of ids[:, 1:] under the model, for ids [B, T] padded on the right.

    The reference path: every position is computed, padding included, with full logits. Raises ValueError
    for ids of another shape, or beyond the positions of a TinyAgent.
    """
    if ids.ndim != 2:
        raise ValueError(f"ids must be [B, T], got {tuple(ids.shape)}; one trajectory is ids[None]")
    policy = as_policy(model)
    batch, width = ids.shape
    position_ids = torch.arange(width, device=ids.device).expand(batch, width)
    hidden = policy.hidden_states(ids, position_ids, torch.full_like(ids, width))
    return selected_log_probs(head_logits(policy.head(), hidden[:, :-1]) / temperature, ids[:, 1:])


def sequence_scores(
    model: Policy | nn.Module, ids: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) in nats, both [B, T-1], of ids[:, 1:] under the model, for ids [B, T].

    The log-probs are those of `sequence_log_probs`, bit for bit. Both are differentiable; an id whose logit
    is -inf adds nothing to an entropy or its gradient.
    """
    policy = as_policy(model)
    batch, width = ids.shape
    position_ids = torch.arange(width, device=ids.device).expand(batch, width)
    hidden = policy.hidden_states(ids, position_ids, torch.full_like(ids, width))
    logits = head_logits(policy.head(), hidden[:, :-1]) / temperature
    log_probs = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
    finite = log_probs.masked_fill(log_probs == -torch.inf, 0.0)
    entropy = -(log_probs.exp() * finite).sum(-1)
    return log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1), entropy


def visible_until_of(position_ids: Tensor, segment_ids: Tensor) -> Tensor:
    """Visibility [R, L] of flat rows: every token up to the end of its own segment; padding (-1) itself only.

    Raises ValueError where a segment stands in two pieces or does not start at position 0, or where positions
    jump inside one, as in a row that shares prefixes: its segments do not say which branch reads which.

    >>> visible_until_of(torch.tensor([[0, 1, 0, 0]]), torch.tensor([[0, 0, 1, -1]])).tolist()
    [[2, 2, 3, 4]]
    """
    length = segment_ids.shape[1]
    if segment_ids.numel() == 0:
        return torch.zeros_like(segment_ids)
    is_padding = segment_ids < 0
    starts = torch.ones_like(segment_ids, dtype=torch.bool)
    starts[:, 1:] = (segment_ids[:, 1:] != segment_ids[:, :-1]) | is_padding[:, 1:]
    jumps = ~starts[:, 1:] & (position_ids[:, 1:] != position_ids[:, :-1] + 1)
    if bool(jumps.any()):
        row, column = jumps.nonzero()[0].tolist()
        raise ValueError(
            f"positions jump inside a segment at row {row}, position {column + 1}; rows that share prefixes "
            "need visible_until=packed.visible_until"
        )
    late = starts & ~is_padding & (position_ids != 0)
    if bool(late.any()):
        row, column = late.nonzero()[0].tolist()
        raise ValueError(
            f"the segment at row {row}, position {column} starts at position id "
            f"{int(position_ids[row, column])}; positions restart at 0 in every segment"
        )
    for row in range(segment_ids.shape[0]):
        pieces = segment_ids[row][starts[row] & ~is_padding[row]]
        if pieces.unique().numel() != pieces.numel():
            raise ValueError(
                f"row {row} holds a segment in two pieces; a segment's tokens must be neighbours"
            )
    place = torch.arange(length, device=segment_ids.device)
    # The next start after each position, or the row's end: a running minimum from the right.
    following = torch.where(starts, place, length).roll(-1, dims=1)
    following[:, -1] = length
    return following.flip(1).cummin(1).values.flip(1)


def packed_logits(
    model: Policy | nn.Module,
    ids: Tensor,
    position_ids: Tensor,
    segment_ids: Tensor,
    *,
    visible_until: Tensor | None = None,
) -> Tensor:
    """Full logits [R, L, V] of packed rows ids [R, L], each segment as if it stood alone.

    position_ids [R, L] restart in every segment; segment_ids [R, L] say which sequence of its row a token
    belongs to, -1 for padding. Rows that share prefixes need `visible_until` [R, L] as well, which then takes
    the segments' place. The model is a Policy or a transformers causal LM. Raises ValueError where the
    vectors do not describe such rows, or the model cannot keep segments apart.
    """
    policy = as_policy(model)
    for name, value in (("position_ids", position_ids), ("segment_ids", segment_ids)):
        if value.shape != ids.shape or ids.ndim != 2:
            raise ValueError(f"{name} must be [R, L] like ids {tuple(ids.shape)}, got {tuple(value.shape)}")
    if visible_until is None:
        visible_until = visible_until_of(position_ids, segment_ids)
    hidden = policy.hidden_states(ids, position_ids, visible_until)
    return head_logits(policy.head(), hidden)


def action_hidden(policy: Policy, packed: PackedBatch) -> Tensor:
    """Hidden states [N, D] that predict the packed rows' action tokens, in the order of `packed.actions`."""
    hidden = policy.hidden_states(packed.ids, packed.position_ids, packed.visible_until)
    return hidden.flatten(0, 1).index_select(0, packed.actions.source)


def packed_log_probs(policy: Policy | nn.Module, packed: PackedBatch, temperature: float = 1.0) -> Tensor:
    """Log-probs (nats) [N] of the packed rows' action tokens, in the order of `packed.actions`.

    The head is applied to the N hidden states that predict an action and to no others.
    """
    return _head_scores(policy, packed, temperature, return_entropy=False)


def packed_scores(
    policy: Policy | nn.Module, packed: PackedBatch, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) in nats, both [N], as `packed_log_probs`; both are differentiable."""
    return _head_scores(policy, packed, temperature, return_entropy=True)


def packed_loss(
    policy: Policy | nn.Module, packed: PackedBatch, token_loss: TokenLoss, temperature: float = 1.0
) -> FusedLoss:
    """The summed loss of the packed rows' action tokens, with their log-probs and entropies [N], in nats.

    `token_loss` is as in `fused_policy_loss`, which computes the head's gradient along with the loss: for a
    loss of the token's own log-prob and entropy, the same as through `packed_scores` with fewer matrix
    products.
    """
    hidden, weight, keywords = _head_arguments(policy, packed, temperature)
    return fused_policy_loss(hidden, weight, packed.actions.target, token_loss, with_entropy=True, **keywords)


def _head_scores(
    policy: Policy | nn.Module, packed: PackedBatch, temperature: float, return_entropy: bool
) -> Any:
    hidden, weight, keywords = _head_arguments(policy, packed, temperature)
    return action_log_probs(hidden, weight, packed.actions.target, return_entropy=return_entropy, **keywords)


def _head_arguments(
    policy: Policy | nn.Module, packed: PackedBatch, temperature: float
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Hidden states [N, D], the head's weight, and what else maps them to logits."""
    policy = as_policy(policy)
    hidden = action_hidden(policy, packed)
    head = policy.head()  # after the hidden states: a sharded head is whole from then on
    others = {"bias": head.bias, "temperature": temperature, "softcap": head.softcap, "scale": head.scale}
    return hidden, head.weight, others
