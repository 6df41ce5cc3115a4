"""Microbatches: the sequences of an optimizer step in portions that fit the memory."""

# N sequences, R ranks, S slots: microbatches of each rank

import itertools
import math
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from agentrl.data.atoms import Atom, Fitting, Prices, divided, evened, fitting, whole_trees
from agentrl.data.balance import Objective, balanced_ranks
from agentrl.data.bins import Bins, Overflow, pack_lengths
from agentrl.data.lengths import Lengths, as_lengths, one_of, positive_whole
from agentrl.data.prefix_tree import PrefixForest
from agentrl.data.sequence_cost import Cost

Ints = NDArray[np.int64]


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


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a plan is worth, and how far from the best possible it can be at most."""

    num_microbatches: int  # S, the same on every rank
    lower_bound: int  # no plan with these arguments has fewer microbatches on a rank
    fill: float  # tokens computed over the S * R * max_tokens that would fit
    lockstep_imbalance: float  # sum over slots of the slowest rank's cost, over the ranks' mean; 1 is perfect
    rank_sum_imbalance: float  # the costliest rank's sum over the ranks' mean; 1 is perfect
    dummies: list[tuple[int, int]]  # (rank, slot) of the empty microbatches, which count nothing
    overflowed: list[int]  # sequences longer than max_tokens, which `overflow` has treated

    @property
    def gap(self) -> int:
        """Microbatches a rank beyond the lower bound; 0 proves that no plan has fewer."""
        return self.num_microbatches - self.lower_bound


@dataclass(frozen=True, slots=True)
class MicrobatchPlan:
    """Which sequences each rank computes in each of its microbatches, for all ranks of an optimizer step."""

    ranks: list[list[list[int]]]  # [R][S] lists of indices, longest sequence first; S is the same everywhere
    costs: list[list[float]]  # [R][S] what each microbatch costs; 0 for a dummy
    certificate: Certificate

    @property
    def num_microbatches(self) -> int:
        """Microbatches of each rank, dummies included."""
        return self.certificate.num_microbatches

    @property
    def dummies(self) -> list[tuple[int, int]]:
        """(rank, slot) of the empty microbatches: run for the collectives' sake, with zero weight."""
        return self.certificate.dummies

    @property
    def overflowed(self) -> list[int]:
        """Sequences longer than max_tokens, in ascending order."""
        return self.certificate.overflowed


def plan_microbatches(
    lengths: Lengths | PrefixForest,
    *,
    max_tokens: int,
    num_ranks: int = 1,
    cost: Cost | None = None,
    objective: Objective = "lockstep",
    overflow: Overflow = "raise",
    min_microbatches: int = 1,
    multiple_of: int = 1,
) -> MicrobatchPlan:
    """One plan for all ranks: no microbatch above `max_tokens`, as many on each rank, even in cost.

    `lengths` [N] are those of all ranks' sequences; every rank that calls with the same arguments gets the
    same plan. A microbatch's tokens are the sum of its lengths: rows are packed. Given the `prefix_forest` of
    the sequences instead, prefixes that a microbatch's sequences share count once; a tree is divided where it
    is above max_tokens, would leave a bin empty, or would make the others wait longer than its repeated
    prefixes take.

    `cost(length)` is what one sequence takes to compute, in any unit (`attention_cost`; by default its
    tokens); a microbatch costs the sum, a tree's token what it costs at its own depth. The objective is the
    time of all ranks: 'lockstep' where they wait for each other after every microbatch, the sum over slots of
    the slowest rank; 'rank_sum' where they wait only once, the slowest rank's sum.

    The microbatches of a rank are the fewest that a packing was found for, at least `min_microbatches`, and a
    multiple of `multiple_of`, as pipeline schedules need. Microbatches are empty, and flagged as dummies,
    only where there are fewer sequences than microbatches. The costliest come first, so that a step that runs
    out of memory does so at once. `overflow` treats a sequence longer than max_tokens: 'raise', a longer
    microbatch of its own ('solo'), left out ('drop'), or its first max_tokens tokens ('truncate').

    Raises ValueError for an argument out of range, a sequence that is too long, a cost that is not positive
    and finite or, for a forest, falls with length.

    >>> plan = plan_microbatches([6, 6, 6, 2, 2, 2], max_tokens=8, num_ranks=2)
    >>> plan.ranks
    [[[1], [2]], [[0], [3, 4, 5]]]
    >>> plan.certificate.gap, plan.certificate.lockstep_imbalance, plan.dummies
    (0, 1.0, [])
    """
    max_tokens = positive_whole("max_tokens", max_tokens)
    num_ranks = positive_whole("num_ranks", num_ranks)
    min_microbatches = positive_whole("min_microbatches", min_microbatches)
    multiple_of = positive_whole("multiple_of", multiple_of)
    one_of("objective", objective, get_args(Objective))
    one_of("overflow", overflow, get_args(Overflow))
    forest = lengths if isinstance(lengths, PrefixForest) else _each_alone(as_lengths(lengths))
    step = fitting(forest, max_tokens, overflow)
    prices = Prices(cost or float, step)
    request = _Request(max_tokens, num_ranks, objective, min_microbatches, multiple_of)

    atoms = whole_trees(step, prices, max_tokens)
    plan = _placed(atoms, request, step, prices)
    while plan.dummies:
        more = divided(atoms, plan.num_microbatches * num_ranks, prices, max_tokens)
        if len(more) == len(atoms):
            break
        atoms = more
        plan = _placed(atoms, request, step, prices)
    if step.has_sharing:
        fair = math.fsum(atom.cost for atom in atoms) / (plan.num_microbatches * num_ranks)
        more = evened(atoms, fair, prices, max_tokens)
        if len(more) > len(atoms):
            other = _placed(more, request, step, prices)
            if other.num_microbatches <= plan.num_microbatches:
                plan = min(plan, other, key=request.duration)
    return plan


def _each_alone(lengths: Ints) -> PrefixForest:
    return PrefixForest(np.arange(lengths.size), lengths, np.zeros_like(lengths))


@dataclass(frozen=True, slots=True)
class _Request:
    """What a plan is asked for, checked."""

    max_tokens: int
    num_ranks: int
    objective: Objective
    min_microbatches: int
    multiple_of: int

    def num_slots(self, num_bins: int) -> int:
        """Microbatches of each rank where all ranks together need `num_bins`."""
        needed = max(-(-num_bins // self.num_ranks), self.min_microbatches)
        return -(-needed // self.multiple_of) * self.multiple_of

    def duration(self, plan: MicrobatchPlan) -> float:
        """What the objective makes small, in units of cost."""
        if self.objective == "rank_sum":
            return max(map(math.fsum, plan.costs))
        return math.fsum(map(max, zip(*plan.costs, strict=True)))


def _placed(atoms: list[Atom], request: _Request, step: Fitting, prices: Prices) -> MicrobatchPlan:
    """The plan that places these atoms."""
    sizes = np.array([atom.size for atom in atoms], dtype=np.int64)
    bound = request.num_slots(step.min_microbatches(request.max_tokens))
    packed = pack_lengths(sizes, request.max_tokens)
    if request.num_slots(len(packed)) > bound:
        packed = pack_lengths(sizes, request.max_tokens, algorithm="portfolio")
    placed = balanced_ranks(
        sizes,
        _whole_numbers([atom.cost for atom in atoms]),
        request.max_tokens,
        packed,
        num_ranks=request.num_ranks,
        num_slots=request.num_slots(len(packed)),
        objective=request.objective,
    )
    filled = [[_joined([atoms[i] for i in slot], step, prices) for slot in rank] for rank in placed]
    ranks = [[_longest_first(microbatch) for microbatch in rank] for rank in filled]
    costs = [[math.fsum(atom.cost for atom in microbatch) for microbatch in rank] for rank in filled]
    mean = math.fsum(itertools.chain(*costs)) / request.num_ranks
    room = len(ranks[0]) * request.num_ranks * request.max_tokens
    return MicrobatchPlan(
        ranks,
        costs,
        Certificate(
            num_microbatches=len(ranks[0]),
            lower_bound=bound,
            fill=sum(atom.size for rank in filled for atom in itertools.chain(*rank)) / room,
            lockstep_imbalance=math.fsum(map(max, zip(*costs, strict=True))) / mean if mean else 1.0,
            rank_sum_imbalance=max(map(math.fsum, costs)) / mean if mean else 1.0,
            dummies=[(r, s) for r, rank in enumerate(ranks) for s, slot in enumerate(rank) if not slot],
            overflowed=step.overflowed,
        ),
    )


def _whole_numbers(costs: list[float]) -> Ints:
    """Costs as whole numbers that add up to about 2**48: their sums are exact in any order."""
    total = math.fsum(costs)
    return np.array([max(round(cost / total * 2.0**48), 1) for cost in costs], dtype=np.int64)


def _joined(atoms: list[Atom], step: Fitting, prices: Prices) -> list[Atom]:
    """The atoms of a microbatch, where parts of one tree that meet in it are one again."""
    if len(atoms) < 2 or not step.has_sharing:
        return atoms
    tree = step.trees_of(np.concatenate([atom.tree.members for atom in atoms]))
    return [Atom(tree, tree.num_tokens, prices(tree))]


def _longest_first(atoms: list[Atom]) -> list[int]:
    pairs = [
        (-length, index)
        for atom in atoms
        for length, index in zip(atom.tree.lengths.tolist(), atom.tree.members.tolist(), strict=True)
    ]
    return [index for _, index in sorted(pairs)]
