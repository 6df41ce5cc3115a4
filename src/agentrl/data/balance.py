"""Balance: which atoms share a microbatch, and on which rank, so that no rank waits long for another.

An atom (a sequence, or a prefix tree) is never divided here. All arithmetic is on whole numbers, so that the
result depends on nothing but the arguments and every rank finds the same one.
"""

# N atoms, S slots, R ranks, K = S * R bins; bin b stands in slot b // R

from heapq import heapify, heappop, heappush, heapreplace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Objective = Literal["lockstep", "rank_sum"]
Ints = NDArray[np.int64]

_PER_LANE = 4  # exchanges within a slot, at most, for each of its lanes
_WORK = 500_000  # pairs of atoms that are looked at, over all bins, after the exchanges within each slot
_WORK_EACH = 1500  # pairs that take as long as an exchange takes otherwise
_PAIRS = 1 << 15  # pairs of atoms that one exchange is chosen from, at most
_NO_ROOM = 1 << 60  # above any load
_NEGLIGIBLE = 1 << 14  # a group whose slowest lane exceeds the mean by less than 1 part in this is done


def balanced_ranks(
    sizes: Ints,
    costs: Ints,
    capacity: int,
    packed: list[list[int]],
    *,
    num_ranks: int,
    num_slots: int,
    objective: Objective,
) -> list[list[list[int]]]:
    """Atoms by rank and slot, costliest slot first; no bin is empty while another holds two.

    sizes [N] are tokens, at most `capacity`; costs [N] positive whole numbers with a sum below 2**49;
    `packed` bins that are known to fit, at most K of them. Starting from the best of several packings, bins
    of like cost form a slot, and atoms are exchanged while that shortens the time that all ranks take.
    """
    num_bins = num_ranks * num_slots
    starts = [_opened(packed, num_bins, costs)]
    for keys in (sizes, costs):
        if (bins := _longest_first(keys, sizes, capacity, num_bins)) is not None:
            starts.append(bins)
    if objective == "lockstep":
        bins = _beside_the_costliest(sizes, costs, capacity, num_ranks, num_slots)
        if bins is not None:
            starts.append(_opened(bins, num_bins, costs))
    bin_of = min((_slotted(bins, costs, num_ranks) for bins in starts), key=lambda way: way[0])[1]

    lanes = np.arange(num_bins)
    exchange = _Exchange(sizes, costs, capacity, bin_of, lanes, num_ranks)
    for slot in range(num_slots):
        for _ in range(_PER_LANE * num_ranks):
            if exchange.improve(slot, within=True) is None:
                break
    exchange.improve_all()
    bin_of = _slotted(_members(exchange.bin_of, num_bins), costs, num_ranks)[1]
    bin_of = _dealt(bin_of, costs, num_ranks, num_slots)
    if objective == "rank_sum":
        exchange = _Exchange(sizes, costs, capacity, bin_of, lanes % num_ranks, num_ranks)
        exchange.improve_all()
        bin_of = exchange.bin_of
    bins = _members(bin_of, num_bins)
    slowest = _loads(bin_of, costs, num_bins).reshape(num_slots, num_ranks).max(1)
    slots = np.argsort(-slowest, kind="stable").tolist()
    return [[bins[slot * num_ranks + rank] for slot in slots] for rank in range(num_ranks)]


def _loads(bin_of: Ints, costs: Ints, num_bins: int) -> Ints:
    loads = np.zeros(num_bins, dtype=np.int64)
    np.add.at(loads, bin_of, costs)
    return loads


def _longest_first(keys: Ints, sizes: Ints, capacity: int, num_bins: int) -> list[list[int]] | None:
    """Each atom, largest key first, into the least loaded bin that has room; None where none has."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = [capacity] * num_bins
    load = [0] * num_bins
    awake = [(0, b) for b in range(num_bins)]  # heap by load
    asleep: list[tuple[int, int]] = []  # heap by room, the most first: those that lacked it for some atom
    order = np.argsort(-keys, kind="stable")
    for index, size, key in zip(order.tolist(), sizes[order].tolist(), keys[order].tolist(), strict=True):
        while asleep and -asleep[0][0] >= size:
            _, b = heappop(asleep)
            heappush(awake, (load[b], b))
        while awake and room[awake[0][1]] < size:
            _, b = heappop(awake)
            heappush(asleep, (-room[b], b))
        if not awake:
            return None
        b = awake[0][1]
        bins[b].append(index)
        room[b] -= size
        load[b] += key
        heapreplace(awake, (load[b], b))
    return bins


def _beside_the_costliest(
    sizes: Ints, costs: Ints, capacity: int, num_ranks: int, num_slots: int
) -> list[list[int]] | None:
    """Each atom, costliest first, where it makes its slot last least longer; None where a bin lacks room.

    So what fits beside a long sequence, whose slot lasts as long anyway, is computed there. Of bins that are
    equal in this the one with the least cost so far takes the atom. Empty bins are left out.
    """
    load = np.zeros((num_slots, num_ranks), dtype=np.int64)
    room = np.full((num_slots, num_ranks), capacity, dtype=np.int64)
    slowest = np.zeros((num_slots, 1), dtype=np.int64)
    bins: list[list[int]] = [[] for _ in range(load.size)]
    order = np.argsort(-costs, kind="stable")
    for index, size, cost in zip(order.tolist(), sizes[order].tolist(), costs[order].tolist(), strict=True):
        longer = np.maximum(load + (cost - slowest), 0)
        longer[room < size] = _NO_ROOM
        least = longer.min()
        if least == _NO_ROOM:
            return None
        at = int(np.where(longer == least, load, _NO_ROOM).argmin())
        slot, rank = divmod(at, num_ranks)
        bins[at].append(index)
        room[slot, rank] -= size
        load[slot, rank] += cost
        slowest[slot, 0] = max(slowest[slot, 0], load[slot, rank])
    return [members for members in bins if members]


def _opened(packed: list[list[int]], num_bins: int, costs: Ints) -> list[list[int]]:
    """The bins, the costliest of them halved until there are `num_bins` or each holds one atom."""
    bins = [sorted(members, key=lambda i: (-int(costs[i]), i)) for members in packed]
    # A bin of one atom is never halved, so it waits below all others.
    heap = [(-int(costs[b].sum()) if len(b) > 1 else 1, k) for k, b in enumerate(bins)]
    heapify(heap)
    while len(bins) < num_bins and heap and heap[0][0] < 0:
        _, k = heappop(heap)
        for half, at in ((bins[k][0::2], k), (bins[k][1::2], len(bins))):
            bins[at : at + 1] = [half]
            heappush(heap, (-int(costs[half].sum()) if len(half) > 1 else 1, at))
    return bins + [[] for _ in range(num_bins - len(bins))]


def _slotted(bins: list[list[int]], costs: Ints, num_ranks: int) -> tuple[int, Ints]:
    """The sum over slots of the costliest bin, and the bin of each atom [N], where bins are slotted by cost.

    Neighbours in cost share a slot: no other way to slot the same bins has a smaller sum.
    """
    loads = np.array([int(costs[members].sum()) for members in bins], dtype=np.int64)
    order = np.argsort(-loads, kind="stable")
    bin_of = np.empty(costs.size, dtype=np.int64)
    for place, index in enumerate(order.tolist()):
        bin_of[bins[index]] = place
    return int(loads[order[::num_ranks]].sum()), bin_of


def _members(bin_of: Ints, num_bins: int) -> list[list[int]]:
    order = np.argsort(bin_of, kind="stable")
    ends = np.cumsum(np.bincount(bin_of, minlength=num_bins))
    return [part.tolist() for part in np.split(order, ends[:-1])]


class _Exchange:
    """Atoms in bins, exchanged while that lowers the sum, over groups, of a group's most loaded lane.

    A lane is what one rank computes before it waits: a bin, or all bins of the rank. A group is the R lanes
    that wait for each other. Atom N + b is the nothing in bin b, so that moving an atom is an exchange too.
    """

    def __init__(
        self, sizes: Ints, costs: Ints, capacity: int, bin_of: Ints, lane_of_bin: Ints, num_ranks: int
    ) -> None:
        num_bins = lane_of_bin.size
        nothing = np.zeros(num_bins, dtype=np.int64)
        self.num_atoms = sizes.size
        self.num_ranks = num_ranks
        self.sizes = np.concatenate([sizes, nothing])
        self.costs = np.concatenate([costs, nothing])
        self.bin = np.concatenate([bin_of, np.arange(num_bins)])
        self.lane_of_bin = lane_of_bin
        self.lane = lane_of_bin[self.bin]
        self.room = np.full(num_bins, capacity)
        np.subtract.at(self.room, self.bin, self.sizes)
        self.count = np.bincount(bin_of, minlength=num_bins)
        self.load = _loads(self.lane, self.costs, int(lane_of_bin.max()) + 1)

    @property
    def bin_of(self) -> Ints:
        """The bin of each atom [N]."""
        return self.bin[: self.num_atoms]

    def improve_all(self) -> None:
        """Improve the group with the most to gain, until none can be or the work is used up."""
        loads = self.load.reshape(-1, self.num_ranks)  # a view
        stuck = np.zeros(loads.shape[0], dtype=bool)
        work = 0
        while work < _WORK:
            excess = np.where(stuck, -1, loads.max(1) * self.num_ranks - loads.sum(1))
            group = int(excess.argmax())
            if excess[group] <= 0:
                return
            slowest = int(
                self.count[self.lane_of_bin == group * self.num_ranks + loads[group].argmax()].sum()
            )
            work += _WORK_EACH + min(slowest * self.costs.size, _PAIRS)
            partner = self.improve(group, within=False)
            stuck[group] = partner is None
            if partner is not None:
                stuck[partner] = False

    def improve(self, group: int, *, within: bool) -> int | None:
        """Make the best exchange between the group's most loaded lane and any other, or any of the group.

        Returns the group of the other lane, or None where no exchange helps.
        """
        loads = self.load.reshape(-1, self.num_ranks)
        top, second, third = [*np.sort(loads[group])[::-1].tolist(), 0, 0][:3]
        if (top * self.num_ranks - int(loads[group].sum())) * _NEGLIGIBLE <= top * self.num_ranks:
            return None
        slowest = group * self.num_ranks + int(loads[group].argmax())
        atoms, others = self._pairs(slowest, group if within else None)
        if atoms.size == 0:
            return None
        shed = self.costs[atoms] - self.costs[others]
        lanes = self.lane[others]
        load, groups = self.load[lanes], lanes // self.num_ranks
        # Within a group the largest load afterwards is that of the two lanes or of a third.
        slower = np.maximum(top - shed, load + shed)
        gain = top - np.maximum(slower, np.where(load == second, third, second))
        if not within:
            across = top - np.maximum(top - shed, second)
            across -= np.maximum(load + shed - loads.max(1)[groups], 0)
            gain = np.where(groups == group, gain, across)
        best = int(gain.argmax())
        if gain[best] <= 0:
            # Two lanes may be the slowest: then it helps to lower one of them.
            gain = np.where(groups == group, top - slower, 0)
            best = int(gain.argmax())
            if gain[best] <= 0:
                return None
        self._swap(int(atoms[best]), int(others[best]))
        return int(groups[best])

    def _pairs(self, slowest: int, group: int | None) -> tuple[Ints, Ints]:
        """Atoms of the slowest lane, and others of the group if given, whose exchange fits and helps it."""
        mine = np.flatnonzero(self.lane[: self.num_atoms] == slowest)
        elsewhere = self.lane != slowest
        if group is not None:
            elsewhere &= self.lane // self.num_ranks == group
        theirs = np.flatnonzero(elsewhere)
        theirs = theirs[:: -(-mine.size * theirs.size // _PAIRS)]
        more = self.sizes[mine][:, None] - self.sizes[theirs]
        my_bin = self.bin[mine]
        fits = self.costs[mine][:, None] > self.costs[theirs]
        fits &= (more <= self.room[self.bin[theirs]]) & (-more <= self.room[my_bin][:, None])
        fits &= (self.count[my_bin] > 1)[:, None] | (theirs < self.num_atoms)  # no bin becomes empty
        rows, columns = np.nonzero(fits)
        return mine[rows], theirs[columns]

    def _swap(self, atom: int, other: int) -> None:
        source, target = int(self.bin[atom]), int(self.bin[other])
        size, cost = self.sizes[atom] - self.sizes[other], self.costs[atom] - self.costs[other]
        self.room[source] += size
        self.room[target] -= size
        self.load[self.lane_of_bin[source]] -= cost
        self.load[self.lane_of_bin[target]] += cost
        self._put(atom, target)
        if other < self.num_atoms:
            self._put(other, source)

    def _put(self, atom: int, target: int) -> None:
        self.count[self.bin[atom]] -= 1
        self.count[target] += 1
        self.bin[atom] = target
        self.lane[atom] = self.lane_of_bin[target]


def _dealt(bin_of: Ints, costs: Ints, num_ranks: int, num_slots: int) -> Ints:
    """The bins of each slot dealt to the ranks, the costliest to the rank with the least so far."""
    loads = _loads(bin_of, costs, num_slots * num_ranks).reshape(num_slots, num_ranks)
    total = np.zeros(num_ranks, dtype=np.int64)
    place = np.empty(loads.size, dtype=np.int64)
    for slot in np.argsort(loads.min(1) - loads.max(1), kind="stable").tolist():
        bins, ranks = np.argsort(-loads[slot], kind="stable"), np.argsort(total, kind="stable")
        place[slot * num_ranks + bins] = slot * num_ranks + ranks
        total[ranks] += loads[slot][bins]
    return place[bin_of]
