"""Bins: which sequences share a row, decided from their lengths alone. The capacity is hard in every rule."""

# N sequences

from bisect import bisect_left
from collections.abc import Iterable
from heapq import heappop, heappush, heapreplace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from agentrl.data.lengths import Lengths, as_lengths, one_of, positive_whole

Algorithm = Literal["first_fit_decreasing", "best_fit_decreasing", "balanced", "portfolio"]
Overflow = Literal["raise", "solo", "drop", "truncate"]

# Subsets that the filling rule looks at in one bin beyond the greedy one; keeps it O(N log N).
_SUBSETS_PER_BIN = 64


class Bins(list[list[int]]):
    """Bins of indices; `overflowed` lists the indices that were longer than a bin, in ascending order."""

    __slots__ = ("overflowed",)

    def __init__(self, bins: Iterable[list[int]] = (), overflowed: Iterable[int] = ()) -> None:
        super().__init__(bins)
        self.overflowed: list[int] = list(overflowed)


def pack_lengths(
    lengths: Lengths,
    capacity: int,
    *,
    algorithm: Algorithm = "best_fit_decreasing",
    max_items: int | None = None,
    multiple_of: int = 1,
    overflow: Overflow = "raise",
) -> Bins:
    """Bins of indices into `lengths` [N]: every index in one bin, no bin above `capacity` tokens.

    - `first_fit_decreasing`: longest first, ties by index, each into the first bin with room;
    - `best_fit_decreasing`: the same order, each into the bin with the least room that still holds it;
    - `balanced`: the same order, each into the emptiest of the bins (as many as needed): even bins;
    - `portfolio`: the rules above and one that fills each bin with the best subset; the fewest bins win.

    All take O(N log N) and depend on nothing but the arguments. A bin holds at most `max_items` sequences.
    Each length is first rounded up to a multiple of `multiple_of`, as rows of aligned sequences need it.
    A rounded length above `capacity` is an error, or with `overflow` gets a bin of its own, longer than the
    capacity ('solo'), is in no bin ('drop'), or counts as the largest multiple that fits ('truncate'); the
    result's `overflowed` lists those indices.

    Raises ValueError for a length that is not a positive whole number, naming its index.

    >>> pack_lengths([60, 60, 1], 128, multiple_of=64)
    [[0, 1], [2]]
    >>> pack_lengths([9, 3, 5], 8, overflow="drop").overflowed
    [0]
    """
    one_of("algorithm", algorithm, get_args(Algorithm))
    one_of("overflow", overflow, get_args(Overflow))
    capacity = positive_whole("capacity", capacity)
    multiple_of = positive_whole("multiple_of", multiple_of)
    max_items = None if max_items is None else positive_whole("max_items", max_items)

    raw = as_lengths(lengths)
    aligned = as_lengths(-(-raw // multiple_of) * multiple_of, "rounded length")
    too_long = np.flatnonzero(aligned > capacity)
    kept = np.arange(raw.size)
    if too_long.size:
        first = int(too_long[0])
        if overflow == "raise":
            rounded = f", {aligned[first]} once aligned to {multiple_of}," if multiple_of > 1 else ""
            raise ValueError(
                f"length {raw[first]} at index {first}{rounded} exceeds the capacity {capacity} "
                f"({too_long.size} such); raise the capacity or set overflow='solo', 'drop' or 'truncate'"
            )
        if overflow == "truncate":
            if multiple_of > capacity:
                raise ValueError(
                    f"no multiple of {multiple_of} fits the capacity {capacity}; nothing can be cut"
                )
            aligned = np.minimum(aligned, capacity // multiple_of * multiple_of)
        else:
            kept = np.flatnonzero(aligned <= capacity)

    order = kept[np.argsort(-aligned[kept], kind="stable")]
    bins = _RULES[algorithm](order.tolist(), aligned[order].tolist(), capacity, max_items or raw.size)
    if overflow == "solo":
        bins = [[index] for index in too_long.tolist()] + bins
    return Bins(bins, too_long.tolist())


def min_bins(lengths: Lengths, capacity: int, *, max_items: int | None = None) -> int:
    """A lower bound on the bins that any packing of `lengths` [N], each at most `capacity`, needs.

    The largest of the bound by count, by total, and Martello and Toth's L2 (Knapsack Problems, 1990, section
    8.3): for a threshold t, lengths above capacity - t share no bin with one of at least t.

    >>> min_bins([7] * 8, 8), min_bins([3, 3, 2], 8)
    (8, 1)
    """
    capacity = positive_whole("capacity", capacity)
    sizes = np.sort(as_lengths(lengths))
    if sizes.size == 0:
        return 0
    by_count = 0 if max_items is None else -(-sizes.size // max_items)
    return max(by_count, _min_bins(sizes, capacity))


def _min_bins(sizes: NDArray[np.int64], capacity: int) -> int:
    """`min_bins` of ascending sizes without the count."""
    total = np.concatenate([[0], np.cumsum(sizes)])
    half = int(np.searchsorted(sizes, capacity // 2, side="right"))  # sizes[half:] fit at most one a bin
    threshold = np.unique(np.concatenate([[0], sizes[:half]]))
    low = np.searchsorted(sizes, threshold)  # sizes[low:half] count as small
    alone = np.searchsorted(sizes, capacity - threshold, side="right")  # sizes[alone:] exclude the small ones
    room = (alone - half) * capacity - (total[alone] - total[half])
    extra = np.maximum(total[half] - total[low] - room, 0)
    return int((sizes.size - half + -(-extra // capacity)).max())


# Each rule takes indices and their sizes, longest first. Sizes never grow, which is what makes the first two
# cheap: a bin with room for this sequence has room for all later ones, and a bin without is put to sleep
# until the sizes have come down to the room it has left.


def _first_fit(order: list[int], sizes: list[int], capacity: int, max_items: int) -> list[list[int]]:
    num = len(order)
    bins: list[list[int]] = []
    room: list[int] = []
    awake: list[int] = []  # heap of the bins with room for the current size
    asleep: list[int] = []  # heap of -room * num + bin: the most room first
    for index, size in zip(order, sizes, strict=True):
        while asleep and asleep[0] < (1 - size) * num:
            heappush(awake, heappop(asleep) % num)
        if not awake:
            awake.append(len(bins))
            bins.append([])
            room.append(capacity)
        target = awake[0]
        members = bins[target]
        members.append(index)
        left = room[target] = room[target] - size
        if len(members) == max_items:
            heappop(awake)
        elif left < size:
            heappop(awake)
            if left >= sizes[-1]:
                heappush(asleep, target - left * num)
    return bins


def _best_fit(order: list[int], sizes: list[int], capacity: int, max_items: int) -> list[list[int]]:
    # The awake bins are a stack with the least room on top: those that wake have less room than any that was
    # awake before, and the top, once it took a sequence, has still less.
    num = len(order)
    bins: list[list[int]] = []
    room: list[int] = []
    awake: list[int] = []
    asleep: list[int] = []  # heap of (1 - room) * num - 1 - bin: the most room first, ties from the last bin
    for index, size in zip(order, sizes, strict=True):
        while asleep and asleep[0] < (1 - size) * num:
            awake.append(-1 - heappop(asleep) % -num)
        if not awake:
            awake.append(len(bins))
            bins.append([])
            room.append(capacity)
        target = awake[-1]
        members = bins[target]
        members.append(index)
        left = room[target] = room[target] - size
        if len(members) == max_items:
            awake.pop()
        elif left < size:
            awake.pop()
            if left >= sizes[-1]:
                heappush(asleep, (1 - left) * num - 1 - target)
    return bins


def _worst_fit(
    order: list[int], sizes: list[int], capacity: int, max_items: int, num_bins: int
) -> list[list[int]]:
    num = len(order)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = list(range(num_bins))  # heap of load * num + bin: the emptiest first
    for index, size in zip(order, sizes, strict=True):
        if not loads or loads[0] // num + size > capacity:
            heappush(loads, len(bins))
            bins.append([])
        target = loads[0] % num
        bins[target].append(index)
        if len(bins[target]) == max_items:
            heappop(loads)
        else:
            heapreplace(loads, loads[0] + size * num)
    return bins


def _balanced(order: list[int], sizes: list[int], capacity: int, max_items: int) -> list[list[int]]:
    # A bin opened late stays emptier than the rest; opening as many from the start evens them out.
    if not order:
        return []
    bound = min_bins(sizes, capacity, max_items=max_items)
    bins = _worst_fit(order, sizes, capacity, max_items, bound)
    if len(bins) > bound:
        again = _worst_fit(order, sizes, capacity, max_items, len(bins))
        bins = min(again, bins, key=len)
    return bins


def _fill_each(order: list[int], sizes: list[int], capacity: int, max_items: int) -> list[list[int]]:
    """Each bin takes the longest sequence left and, of the subsets tried, the one that leaves the least room.

    Minimum bin slack (Gupta and Ho 1999), with the largest sequence fixed and a bounded depth-first search.
    """
    values, starts, counts = np.unique(-np.array(sizes), return_index=True, return_counts=True)
    negated: list[int] = values.tolist()  # ascending, so the largest size first
    left: list[int] = counts.tolist()
    taken: list[int] = starts.tolist()  # where in `order` the next sequence of each size stands
    following = list(range(len(left) + 1))  # the next size with a sequence left, found with path halving

    def next_fit(start: int, gap: int) -> int:
        place = bisect_left(negated, -gap, lo=start)
        while following[place] != place:
            following[place] = following[following[place]]
            place = following[place]
        while place < len(left) and not left[place]:  # used up by the subset under trial only
            place += 1
            while following[place] != place:
                place = following[place]
        return place

    bins: list[list[int]] = []
    num_left = len(order)
    while num_left:
        longest = next_fit(0, capacity)
        left[longest] -= 1
        gap, start, budget = capacity + negated[longest], longest, _SUBSETS_PER_BIN
        trial: list[int] = []
        best, best_gap = trial, capacity
        while True:
            place = next_fit(start, gap) if len(trial) + 1 < max_items else len(left)
            if place < len(left):
                trial.append(place)
                left[place] -= 1
                gap, start = gap + negated[place], place
                continue
            if gap < best_gap:
                best, best_gap = trial.copy(), gap
            budget -= 1
            if not trial or not best_gap or not budget:
                break
            start = trial.pop()
            left[start] += 1
            gap, start = gap - negated[start], start + 1
        for place in trial:
            left[place] += 1
        for place in best:
            left[place] -= 1
        members: list[int] = []
        for place in [longest, *best]:
            members.append(order[taken[place]])
            taken[place] += 1
            if not left[place]:
                following[place] = place + 1
        bins.append(members)
        num_left -= len(members)
    return bins


def _portfolio(order: list[int], sizes: list[int], capacity: int, max_items: int) -> list[list[int]]:
    if not order:
        return []
    bound = min_bins(sizes, capacity, max_items=max_items)
    bins = _best_fit(order, sizes, capacity, max_items)
    for rule in (_first_fit, _fill_each, _balanced):
        if len(bins) == bound:
            break
        bins = min(bins, rule(order, sizes, capacity, max_items), key=len)
    return bins


_RULES = {
    "first_fit_decreasing": _first_fit,
    "best_fit_decreasing": _best_fit,
    "balanced": _balanced,
    "portfolio": _portfolio,
}
