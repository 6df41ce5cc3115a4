"""Microbatches: the sequences of an optimizer step in portions that fit the memory."""

# N sequences

from typing import get_args

import numpy as np

from agentrl.data.bins import Bins, Overflow, pack_lengths
from agentrl.data.lengths import Lengths, as_lengths, one_of, positive_whole


def token_budget_batches(
    lengths: Lengths, max_tokens: int, *, packed: bool = False, overflow: Overflow = "raise"
) -> Bins:
    """Batches of indices into `lengths` [N], longest first, none of which costs more than `max_tokens`.

    A padded batch costs its count times its longest member, so neighbours in length share one; with `packed`
    it costs the sum of its lengths, so `pack_lengths` fills it. `overflow` treats a sequence longer than
    max_tokens as in `pack_lengths`, and the result's `overflowed` lists those.

    Raises ValueError for a length that is not a positive whole number, naming its index.

    >>> token_budget_batches([2, 9, 3, 8], 18)
    [[1, 3], [2, 0]]
    >>> token_budget_batches([2, 9, 3, 8], 12, packed=True)
    [[1, 2], [3, 0]]
    """
    max_tokens = positive_whole("max_tokens", max_tokens)
    one_of("overflow", overflow, get_args(Overflow))
    raw = as_lengths(lengths)
    too_long = np.flatnonzero(raw > max_tokens)
    if overflow == "raise" and too_long.size:
        first = int(too_long[0])
        raise ValueError(
            f"sequence {first} has {raw[first]} tokens but a batch may cost {max_tokens} "
            f"({too_long.size} such); raise max_tokens or set overflow='solo', 'drop' or 'truncate'"
        )
    if packed:
        return pack_lengths(raw, max_tokens, overflow=overflow)
    order = np.argsort(-raw, kind="stable")
    if overflow == "drop":
        order = order[raw[order] <= max_tokens]
    batches: list[list[int]] = []
    full = 0  # sequences that the current batch holds at most: its first member is its longest
    for index, length in zip(order.tolist(), raw[order].tolist(), strict=True):
        if not batches or len(batches[-1]) >= full:
            batches.append([])
            full = max_tokens // length
        batches[-1].append(index)
    return Bins(batches, too_long.tolist())
