"""What packed scoring must equal, each trajectory alone, and how far two classic wrong masks are from it."""

# R rows, L row length, N action tokens

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from agentrl.data.packing import PackedBatch
from agentrl.models.policy import Policy, head_logits
from agentrl.models.scoring import as_policy
from agentrl.ops.log_probs import selected_log_probs


def alone_log_probs(policy: Policy | nn.Module, packed: PackedBatch, temperature: float = 1.0) -> Tensor:
    """Log-probs (nats) [N] of the packed rows' action tokens, every trajectory run alone with full logits.

    In the order of `packed.actions`: what `packed_log_probs` must give.
    """
    policy = as_policy(policy)
    lengths = packed.lengths.tolist()
    out = [packed.ids.new_zeros(0, dtype=torch.float32)]
    for index, places in enumerate(packed.token_index.split(lengths)):
        offset = packed.actions.offset[packed.actions.trajectory == index]
        if not len(offset):
            continue
        ids = packed.ids.flatten()[places][None]
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        hidden = policy.hidden_states(ids, positions, torch.full_like(ids, ids.shape[1]))
        logits = head_logits(policy.head(), hidden[0, :-1]) / temperature
        out.append(selected_log_probs(logits, ids[0, 1:])[offset])
    return torch.cat(out[1:] or out)


@dataclass(frozen=True, slots=True)
class MaskErrors:
    """Largest error (nats) of an action token's log-prob under three ways to mask packed rows."""

    visible: float  # the rule of this package: rounding only
    causal_running_positions: float  # plain causal rows, positions counting through the row
    causal_restarted_positions: float  # plain causal rows, positions restarting with each sequence


@torch.no_grad()
def mask_errors(policy: Policy | nn.Module, packed: PackedBatch) -> MaskErrors:
    """How far packed log-probs are from each trajectory alone, right and with the two classic bugs.

    Both bugs run without an error and train on leaked context.
    """
    policy = as_policy(policy)
    want = alone_log_probs(policy, packed)
    length = packed.ids.shape[1]
    running = torch.arange(length, device=packed.ids.device).expand_as(packed.ids)
    until_row_end = torch.full_like(packed.visible_until, length)

    def error(position_ids: Tensor, visible_until: Tensor) -> float:
        hidden = policy.hidden_states(packed.ids, position_ids, visible_until).flatten(0, 1)
        logits = head_logits(policy.head(), hidden[packed.actions.source])
        return float((selected_log_probs(logits, packed.actions.target) - want).abs().max())

    return MaskErrors(
        visible=error(packed.position_ids, packed.visible_until),
        causal_running_positions=error(running, until_row_end),
        causal_restarted_positions=error(packed.position_ids, until_row_end),
    )
