"""Log-probs of a policy on padded and packed rows."""

# B trajectories, T padded width, D width, V vocabulary

import torch
from torch import Tensor

from agentrl.models.policy import Head, Policy
from agentrl.ops.log_probs import selected_log_probs


def head_logits(head: Head, hidden: Tensor) -> Tensor:
    """Full logits [..., V] of hidden [..., D]: the plain computation that the fast head is tested against."""
    logits = hidden @ head.weight.T
    if head.bias is not None:
        logits = logits + head.bias
    if head.scale is not None:
        logits = logits * head.scale
    return logits if head.softcap is None else torch.tanh(logits / head.softcap) * head.softcap


def sequence_log_probs(model: Policy, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probs (nats) [B, T-1] of ids[:, 1:] under the model, for ids [B, T] padded on the right.

    The reference path: every position is computed, padding included, with full logits.
    """
    batch, width = ids.shape
    position_ids = torch.arange(width, device=ids.device).expand(batch, width)
    hidden = model.hidden_states(ids, position_ids, torch.full_like(ids, width))
    return selected_log_probs(head_logits(model.head(), hidden[:, :-1]) / temperature, ids[:, 1:])


def sequence_scores(model: Policy, ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) in nats, both [B, T-1], of ids[:, 1:] under the model, for ids [B, T].

    The log-probs are those of `sequence_log_probs`, bit for bit; the entropies carry no gradient.
    """
    batch, width = ids.shape
    position_ids = torch.arange(width, device=ids.device).expand(batch, width)
    hidden = model.hidden_states(ids, position_ids, torch.full_like(ids, width))
    logits = head_logits(model.head(), hidden[:, :-1]) / temperature
    with torch.no_grad():
        log_probs = torch.log_softmax(
            logits.double() if logits.dtype == torch.float64 else logits.float(), -1
        )
        entropy = -(log_probs.exp() * log_probs).nan_to_num(nan=0.0).sum(-1)
    return selected_log_probs(logits, ids[:, 1:]), entropy
