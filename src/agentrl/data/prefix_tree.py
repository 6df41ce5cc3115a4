"""Prefix trees: sequences laid out depth first, so that a prefix which several share is computed once."""

# B sequences, T tokens of all of them

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.data.bins import pack_lengths
from agentrl.data.lengths import positive_whole

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PrefixForest:
    """Sequences in depth-first order of their prefix trees; a tree is a forest of one.

    How many leading tokens each sequence shares with the one before it says everything: those stand in the
    row already, the rest is appended, and whatever is deeper than `shared` is out of sight from there on.
    """

    members: Ints  # [B] int64: indices of the sequences; one that is a prefix of others precedes them
    lengths: Ints  # [B] int64: tokens of each
    shared: Ints  # [B] int64: leading tokens in common with the sequence before it; 0 where a tree starts

    @property
    def num_tokens(self) -> int:
        """Tokens that the forest takes in a row, each shared one counted once."""
        return int(self.lengths.sum() - self.shared.sum())

    def keep(self, places: Ints) -> "PrefixForest":
        """The forest of some of the sequences: those at ascending `places` of the depth-first order."""
        if places.size == 0:
            return PrefixForest(places, places, places)
        # Two sequences share what all neighbours between them share.
        shared = np.zeros_like(places)
        if places.size > 1:
            shared[1:] = np.minimum.reduceat(self.shared[: places[-1] + 1], places[:-1] + 1)
        return PrefixForest(self.members[places], self.lengths[places], shared)

    def trees(self) -> "list[PrefixForest]":
        """The trees, by the lowest index among their members: no two have a first token in common."""
        if self.members.size == 0:
            return []
        starts = np.flatnonzero(self.shared == 0)
        ends = np.append(starts[1:], self.members.size)
        trees = [self.keep(np.arange(a, b)) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        return sorted(trees, key=lambda tree: int(tree.members.min()))


def prefix_forest(sequences: Iterable[Tensor]) -> PrefixForest:
    """The prefix trees of token sequences, each int64 [n] with n > 0 and no negative id.

    Sequences share a token where they agree on it and on all tokens before it. The time is that of sorting
    the sequences as bytes plus one pass over the tokens; no Python object is made for a token.

    >>> forest = prefix_forest([torch.tensor(x) for x in ([1, 2, 3], [9], [1, 2, 4, 5], [1, 2])])
    >>> forest.members.tolist(), forest.shared.tolist(), forest.num_tokens
    ([3, 0, 2, 1], [0, 2, 2, 0], 6)
    """
    sequences = list(sequences)
    lengths = np.array([s.numel() for s in sequences], dtype=np.int64)
    if (lengths == 0).any():
        raise ValueError(f"sequence {int(np.argmin(lengths))} is empty; a prefix tree needs a first token")
    if not sequences:
        return PrefixForest(lengths, lengths, lengths)
    tokens = torch.cat([s.cpu() for s in sequences]).numpy()
    if tokens.min() < 0:
        raise ValueError(f"token ids must not be negative, got {tokens.min()}")
    # Big-endian unsigned numbers compare as their bytes do, and a prefix compares below what extends it.
    wide = np.dtype(">u4" if tokens.max() < 2**32 else ">u8")
    text = tokens.astype(wide).tobytes()
    ends = np.cumsum(lengths)
    cuts = [0, *(ends * wide.itemsize).tolist()]
    keys = [text[a:b] for a, b in pairwise(cuts)]
    members = np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)

    sorted_lengths, starts = lengths[members], (ends - lengths)[members]
    shared = np.zeros_like(members)
    if members.size > 1:
        both = np.minimum(sorted_lengths[:-1], sorted_lengths[1:])
        first = np.cumsum(both) - both
        step = np.arange(int(both.sum())) - np.repeat(first, both)
        differ = tokens[np.repeat(starts[:-1], both) + step] != tokens[np.repeat(starts[1:], both) + step]
        shared[1:] = np.minimum.reduceat(np.where(differ, step, np.repeat(both, both)), first)
    return PrefixForest(members, sorted_lengths, shared)


def split_tree(tree: PrefixForest, max_tokens: int, *, min_parts: int = 1) -> list[PrefixForest]:
    """The tree in parts of at most `max_tokens`, repeating as few prefix tokens as it can find a way to.

    Two ways are tried and the one with fewer tokens is kept: bin packing of the branches at every node, from
    the leaves up, and the best of all splits into stretches of the depth-first order. (The least possible is
    a bin packing problem; 98% of the splits of random trees of up to 8 sequences are the best there is.)
    Where that gives fewer than `min_parts`, the largest parts are halved until it does or each holds one
    sequence. Raises ValueError where a sequence alone is longer than max_tokens.

    >>> ids = [torch.tensor([7, 7, 7, i, i]) for i in range(4)]
    >>> [part.num_tokens for part in split_tree(prefix_forest(ids), 7)]
    [7, 7]
    """
    max_tokens = positive_whole("max_tokens", max_tokens)
    min_parts = positive_whole("min_parts", min_parts)
    if tree.members.size == 0:
        return []
    at = int(np.argmax(tree.lengths))
    if tree.lengths[at] > max_tokens:
        raise ValueError(
            f"sequence {tree.members[at]} has {tree.lengths[at]} tokens but a part holds {max_tokens}; "
            "raise max_tokens"
        )
    parts = [tree]
    if tree.num_tokens > max_tokens:
        ways = (_pack_branches(tree, max_tokens), _cut_stretches(tree, max_tokens))
        parts = min(ways, key=lambda way: sum(part.num_tokens for part in way))
    while len(parts) < min_parts:
        largest = max(parts, key=lambda part: part.num_tokens if part.members.size > 1 else 0)
        if largest.members.size == 1:
            break
        at = parts.index(largest)
        parts[at : at + 1] = _halves(largest)
    return parts


def _pack_branches(tree: PrefixForest, max_tokens: int) -> list[PrefixForest]:
    """Bottom up: the branches below a node that do not fit together become the fewest bins, each a branch."""
    # A frame is an open node: the depth at which it ends, and the branches below it, each with the tokens it
    # has beyond that depth and its places.
    frames: list[tuple[int, list[tuple[int, list[int]]]]] = []
    places = range(tree.members.size)
    for place, length, common in [
        *zip(places, tree.lengths.tolist(), tree.shared.tolist(), strict=True),
        (-1, 0, 0),
    ]:
        while frames and frames[-1][0] > common:
            depth, branches = frames.pop()
            if not frames or frames[-1][0] < common:
                frames.append((common, []))
            parent_depth, siblings = frames[-1]
            for size, members in _bundle(branches, max_tokens - depth):
                siblings.append((size + depth - parent_depth, members))
        if place >= 0:
            if not frames or frames[-1][0] < length:
                frames.append((length, []))
            frames[-1][1].append((0, [place]))
    return [tree.keep(np.sort(np.array(members))) for _, members in frames[0][1]]


def _bundle(branches: list[tuple[int, list[int]]], room: int) -> list[tuple[int, list[int]]]:
    """Branches joined into the fewest bundles of at most `room` tokens."""
    sizes = [size for size, _ in branches]
    if sum(sizes) <= room:
        bins = [list(range(len(branches)))]
    else:
        some = [i for i, size in enumerate(sizes) if size]
        bins = [
            [some[j] for j in b] for b in pack_lengths([sizes[i] for i in some], room, algorithm="portfolio")
        ]
        bins[0].extend(i for i, size in enumerate(sizes) if not size)
    return [(sum(sizes[i] for i in b), [place for i in b for place in branches[i][1]]) for b in bins]


def _cut_stretches(tree: PrefixForest, max_tokens: int) -> list[PrefixForest]:
    """The least repeated tokens over all splits into stretches of the depth-first order, in O(B).

    A stretch that starts at place i repeats shared[i] tokens. So best[j], the least that a split of the first
    j sequences repeats, is the minimum of best[i] + shared[i] over the starts i whose stretch up to j fits.
    The first such start only moves forward with j, so a queue of rising candidates gives the minimum.
    """
    shared: list[int] = tree.shared.tolist()
    appended = [0, *np.cumsum(tree.lengths - tree.shared).tolist()]
    best, cut = [0], [0]
    queue: deque[tuple[int, int]] = deque()  # cost and start
    for end in range(1, len(appended)):
        start = end - 1
        cost = best[start] + shared[start]
        while queue and queue[-1][0] > cost:
            queue.pop()
        queue.append((cost, start))
        while appended[end] - appended[queue[0][1]] + shared[queue[0][1]] > max_tokens:
            queue.popleft()
        best.append(queue[0][0])
        cut.append(queue[0][1])
    parts: list[PrefixForest] = []
    end = len(appended) - 1
    while end:
        parts.append(tree.keep(np.arange(cut[end], end)))
        end = cut[end]
    return parts[::-1]


def _halves(tree: PrefixForest) -> list[PrefixForest]:
    """Two stretches of the depth-first order, the larger one as small as can be."""
    appended = np.cumsum(tree.lengths - tree.shared)
    left, right = appended[:-1], appended[-1] - appended[:-1] + tree.shared[1:]
    at = int(np.argmin(np.maximum(left, right))) + 1
    return [tree.keep(np.arange(at)), tree.keep(np.arange(at, tree.members.size))]
