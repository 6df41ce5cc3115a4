"""Whether sequences of packed rows read one another, and how far probability ratios are from 1, and where."""

# R rows, L row length, N action tokens

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentrl.data.packing import PackedBatch
from agentrl.models.policy import Policy

RATIO_OFF = 0.2  # a token is off where the probability ratio is further than this from 1
NUM_QUARTERS = 4


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


@dataclass(frozen=True, slots=True)
class RatioProfile:
    """How far probability ratios of N action tokens are from 1, and where in the rows."""

    num_tokens: int
    share_off: float  # tokens with |ratio - 1| > RATIO_OFF
    mean_gap: float  # nats, of |log ratio|
    max_gap: float  # nats
    off_by_quarter: tuple[float | None, ...]  # share_off, by quarter of the row; None: no action token there
    gap_by_quarter: tuple[float | None, ...]  # mean_gap, by quarter of the row

    @staticmethod
    def of(got: Tensor, want: Tensor, place: Tensor) -> "RatioProfile":
        """The ratios exp(got - want) of tokens [N] at `place` [N] in [0, 1) of their rows; NaN is left out.

        >>> logp = torch.tensor([-1.0, -1.0, -1.0])
        >>> found = RatioProfile.of(logp, torch.tensor([-1.0, -1.1, -1.5]), torch.tensor([0.1, 0.4, 0.9]))
        >>> round(found.share_off, 2), found.off_by_quarter
        (0.33, (0.0, 0.0, None, 1.0))
        """
        known = ~want.isnan()
        gap, place = (got - want)[known].double(), place[known]
        off = ((gap.exp() - 1).abs() <= RATIO_OFF).logical_not().double()
        quarter = (place * NUM_QUARTERS).long().clamp(max=NUM_QUARTERS - 1)
        mine = [quarter == i for i in range(NUM_QUARTERS)]
        return RatioProfile(
            num_tokens=len(gap),
            share_off=float(off.mean()) if len(gap) else 0.0,
            mean_gap=float(gap.abs().mean()) if len(gap) else 0.0,
            max_gap=float(gap.abs().max()) if len(gap) else 0.0,
            off_by_quarter=tuple(float(off[m].mean()) if bool(m.any()) else None for m in mine),
            gap_by_quarter=tuple(float(gap[m].abs().mean()) if bool(m.any()) else None for m in mine),
        )

    @property
    def grows(self) -> bool:
        """Whether the gap grows along the row, as a leak does, instead of lying flat, as rounding does."""
        known = [gap for gap in self.gap_by_quarter if gap is not None]
        return len(known) > 1 and known[-1] > 2 * known[0] and max(known) > 1e-3
