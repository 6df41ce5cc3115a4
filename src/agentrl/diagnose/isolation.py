"""Whether sequences of packed rows read one another: a probe, and the classic bugs to try it on."""

# R rows, L row length

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from agentrl.data.packing import PackedBatch
from agentrl.models.policy import Policy


@torch.no_grad()
def isolation(policy: Policy, packed: PackedBatch) -> tuple[float, int]:
    """(largest change of a hidden state over the largest hidden state, positions watched).

    In each row one sequence gets other tokens, first the first, then the last, where only it stands; the
    positions of the row's other sequences are watched. Rows of one sequence are left alone.
    """
    before = policy.hidden_states(packed.ids, packed.position_ids, packed.visible_until).flatten(0, 1)
    vocab_size = policy.head().weight.shape[0]
    places = packed.token_index.split(packed.lengths.tolist())
    worst, num_watched = 0.0, 0
    for from_the_end in (False, True):
        ids, watched = packed.ids.flatten().clone(), torch.zeros(packed.ids.numel(), dtype=torch.bool)
        for row in packed.rows:
            changed, kept = _apart(row[::-1] if from_the_end else row, places)
            ids[changed] = (ids[changed] + 1) % vocab_size
            watched[kept.cpu()] = True
        if not watched.any():
            continue
        after = policy.hidden_states(ids.view_as(packed.ids), packed.position_ids, packed.visible_until)
        change = (after.flatten(0, 1) - before)[watched.to(before.device)].abs().max()
        change = float(change / before.abs().max())
        worst = change if not change <= worst else worst  # a NaN stays
        num_watched += int(watched.sum())
    return worst, num_watched


def _apart(row: Sequence[int], places: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(places of the row's first sequence that has some of its own, places of all the others)."""
    for index in row:
        others = [places[i] for i in row if i != index]
        if not others:
            break
        kept = torch.cat(others)
        own = places[index][~torch.isin(places[index], kept)]
        if len(own):
            return own, kept
    nothing = places[row[0]][:0]
    return nothing, nothing


def with_leak(packed: PackedBatch) -> PackedBatch:
    """The rows under a plain causal mask: every token reads all that stands before it in its row."""
    until = torch.full_like(packed.visible_until, packed.ids.shape[1])
    return replace(packed, visible_until=until)


def with_running_positions(packed: PackedBatch) -> PackedBatch:
    """The rows with positions that count through the row instead of restarting with each sequence."""
    running = torch.arange(packed.ids.shape[1], device=packed.ids.device).expand_as(packed.ids)
    return replace(packed, position_ids=running.contiguous())
