"""Atoms: the parts of an optimizer step that a plan places whole, sequences or prefix trees."""

# B sequences, N atoms

import math
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from agentrl.data.bins import Overflow, min_bins
from agentrl.data.prefix_tree import PrefixForest, split_tree
from agentrl.data.sequence_cost import Cost

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Atom:
    """A prefix tree, or a sequence as a tree of one."""

    tree: PrefixForest
    size: int  # tokens that it takes in a microbatch, at most the cap
    cost: float


@dataclass(frozen=True, slots=True, eq=False)
class Fitting:
    """The sequences of a step after `overflow` has treated those that are longer than a microbatch."""

    forest: PrefixForest  # sequences of at most max_tokens
    solo: list[PrefixForest]  # longer ones, each of which gets a microbatch of its own
    overflowed: list[int]

    @property
    def has_sharing(self) -> bool:
        """Whether any two sequences share a prefix."""
        return bool(self.forest.shared.any())

    def trees_of(self, members: Ints) -> PrefixForest:
        """The forest of some of its sequences."""
        places = np.argsort(self.forest.members)[np.searchsorted(np.sort(self.forest.members), members)]
        return self.forest.keep(np.sort(places))

    def min_microbatches(self, max_tokens: int) -> int:
        """A lower bound on the microbatches of all ranks that hold the sequences.

        Every token of the forest is computed at least once, and the longest sequence of each tree stands
        whole in one microbatch and shares nothing with those of other trees.
        """
        if self.forest.members.size == 0:
            return len(self.solo)
        longest = np.maximum.reduceat(self.forest.lengths, np.flatnonzero(self.forest.shared == 0))
        by_tokens = -(-self.forest.num_tokens // max_tokens)
        return len(self.solo) + max(by_tokens, min_bins(longest, max_tokens))


def fitting(forest: PrefixForest, max_tokens: int, overflow: Overflow) -> Fitting:
    """The forest without sequences longer than `max_tokens`; ValueError where `overflow` is 'raise'."""
    too_long = forest.lengths > max_tokens
    if not too_long.any():
        return Fitting(forest, [], [])
    overflowed = np.sort(forest.members[too_long])
    if overflow == "raise":
        first = int(overflowed[0])
        length = forest.lengths[forest.members == first][0]
        raise ValueError(
            f"sequence {first} has {length} tokens but a microbatch holds {max_tokens} "
            f"({overflowed.size} such); raise max_tokens or set overflow='solo', 'drop' or "
            "'truncate'"
        )
    if overflow == "truncate":
        lengths, shared = np.minimum(forest.lengths, max_tokens), np.minimum(forest.shared, max_tokens)
        return Fitting(PrefixForest(forest.members, lengths, shared), [], overflowed.tolist())
    solo = [forest.keep(np.array([place])) for place in np.flatnonzero(too_long).tolist()]
    rest = forest.keep(np.flatnonzero(~too_long))
    return Fitting(rest, solo if overflow == "solo" else [], overflowed.tolist())


class Prices:
    """What trees cost when a sequence of n tokens costs cost(n): each token once, at its own depth.

    A causal token reads what precedes it in its own sequence only, so the tokens that a sequence adds to a
    row which has its first `shared` ones cost cost(length) - cost(shared).
    """

    def __init__(self, cost: Cost, step: Fitting) -> None:
        trees = [step.forest, *step.solo]
        needed = np.unique(np.concatenate([[0], step.forest.shared, *(tree.lengths for tree in trees)]))
        prices = np.array([0.0] + [_price(cost, n) for n in needed[1:].tolist()])
        if step.has_sharing and (np.diff(prices) < 0).any():
            at = int(np.argmax(np.diff(prices) < 0))
            raise ValueError(
                "the cost of sequences that share prefixes must not fall with length, got "
                f"cost({needed[at]}) = {prices[at]} and cost({needed[at + 1]}) = {prices[at + 1]}"
            )
        self._lengths, self._prices = needed, prices
        with np.errstate(over="ignore"):
            total = sum(float(self.per_sequence(tree).sum()) for tree in trees)
        if not math.isfinite(total):
            raise ValueError("costs add up to more than a float holds; give them in a larger unit")

    def per_sequence(self, forest: PrefixForest) -> NDArray[np.float64]:
        """What each sequence [B] adds to the cost of the one before it."""
        whole = self._prices[np.searchsorted(self._lengths, forest.lengths)]
        return whole - self._prices[np.searchsorted(self._lengths, forest.shared)]

    def __call__(self, tree: PrefixForest) -> float:
        """The cost of a tree or forest."""
        return math.fsum(self.per_sequence(tree))


def _price(cost: Cost, num_tokens: int) -> float:
    """What cost gives for a length, as a float; ValueError where that is not one positive finite number."""
    price: Any = cost(num_tokens)
    if isinstance(price, np.generic | np.ndarray | Tensor) and math.prod(price.shape) == 1:
        price = price.item()
    if isinstance(price, int | float) and not isinstance(price, bool) and 0 < price <= sys.float_info.max:
        return float(price)
    raise ValueError(f"cost must be positive and finite, got cost({num_tokens}) = {price!r}")


def whole_trees(step: Fitting, prices: Prices, max_tokens: int) -> list[Atom]:
    """The fewest atoms: each tree, in parts where it is larger than `max_tokens`."""
    forest = step.forest
    starts = np.flatnonzero(forest.shared == 0)
    atoms = [Atom(tree, max_tokens, prices(tree)) for tree in step.solo]
    if starts.size == 0:
        return atoms
    sizes = np.add.reduceat(forest.lengths - forest.shared, starts).tolist()
    costs = np.add.reduceat(prices.per_sequence(forest), starts).tolist()
    ends = [*starts.tolist(), forest.members.size]
    for (a, b), size, cost in zip(pairwise(ends), sizes, costs, strict=True):
        tree = PrefixForest(forest.members[a:b], forest.lengths[a:b], forest.shared[a:b])
        if size <= max_tokens:
            atoms.append(Atom(tree, size, cost))
        else:
            atoms += _parts(tree, 1, prices, max_tokens)
    return atoms


def divided(atoms: list[Atom], num_atoms: int, prices: Prices, max_tokens: int) -> list[Atom]:
    """The atoms, the costliest that can be divided into two until there are `num_atoms` or none can."""
    atoms = list(atoms)
    while len(atoms) < num_atoms:
        divisible = [k for k, atom in enumerate(atoms) if atom.tree.members.size > 1]
        if not divisible:
            break
        at = max(divisible, key=lambda k: (atoms[k].cost, -k))
        atoms[at : at + 1] = _parts(atoms[at].tree, 2, prices, max_tokens)
    return atoms


def evened(atoms: list[Atom], largest: float, prices: Prices, max_tokens: int) -> list[Atom]:
    """The atoms, each tree that costs more than `largest` in as many parts as should bring it below."""
    found: list[Atom] = []
    for atom in atoms:
        if atom.cost > largest and atom.tree.members.size > 1:
            found += _parts(atom.tree, math.ceil(atom.cost / largest), prices, max_tokens)
        else:
            found.append(atom)
    return found


def _parts(tree: PrefixForest, num_parts: int, prices: Prices, max_tokens: int) -> list[Atom]:
    parts = split_tree(tree, max_tokens, min_parts=num_parts)
    return [Atom(part, part.num_tokens, prices(part)) for part in parts]
