import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.data.prefix_tree import PrefixForest, prefix_forest, split_tree

sequences_of = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=12)


def tensors(sequences: list[list[int]]) -> list[Tensor]:
    return [torch.tensor(s, dtype=torch.int64) for s in sequences]


def prefixes(sequences: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(s[: n + 1]) for s in sequences for n in range(len(s))}


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def assert_forest(forest: PrefixForest, sequences: list[list[int]], members: list[int]) -> None:
    assert sorted(forest.members.tolist()) == sorted(members)
    ordered = [sequences[i] for i in forest.members.tolist()]
    assert forest.lengths.tolist() == [len(s) for s in ordered]
    if ordered:
        assert forest.shared.tolist() == [0, *(common(a, b) for a, b in pairwise(ordered))]
    assert forest.num_tokens == len(prefixes(ordered))


@given(sequences_of, st.data())
@settings(max_examples=80, deadline=None)
def test_forest_counts_each_prefix_once(sequences: list[list[int]], data: st.DataObject) -> None:
    forest = prefix_forest(tensors(sequences))
    assert_forest(forest, sequences, list(range(len(sequences))))
    kept = sorted(data.draw(st.sets(st.sampled_from(range(len(sequences)))))) if sequences else []
    part = forest.keep(np.array(kept, dtype=np.int64))
    assert_forest(part, sequences, forest.members[kept].tolist() if kept else [])
    trees = forest.trees()
    assert [int(tree.members.min()) for tree in trees] == sorted(
        min(i for i, s in enumerate(sequences) if s[0] == first) for first in {s[0] for s in sequences}
    )
    for tree in trees:
        assert_forest(tree, sequences, tree.members.tolist())


@given(sequences_of.filter(len), st.integers(9, 40), st.integers(1, 5))
@settings(max_examples=80, deadline=None)
def test_parts_hold_every_sequence_within_the_limit(
    sequences: list[list[int]], limit: int, min_parts: int
) -> None:
    for tree in prefix_forest(tensors(sequences)).trees():
        parts = split_tree(tree, limit, min_parts=min_parts)
        assert sorted(i for p in parts for i in p.members.tolist()) == sorted(tree.members.tolist())
        assert len(parts) >= min(min_parts, tree.members.size)
        for part in parts:
            assert_forest(part, sequences, part.members.tolist())
            assert part.num_tokens <= limit
        if tree.num_tokens <= limit and min_parts == 1:
            assert len(parts) == 1


def partitions(items: list[int]) -> list[list[list[int]]]:
    if not items:
        return [[]]
    found = []
    for partition in partitions(items[1:]):
        found.append([[items[0]], *partition])
        found.extend(
            [*partition[:i], [items[0], *group], *partition[i + 1 :]] for i, group in enumerate(partition)
        )
    return found


def random_tree(generator: np.random.Generator, num: int) -> list[list[int]]:
    sequences: list[list[int]] = []

    def grow(prefix: list[int], num_below: int) -> None:
        path = prefix + [int(generator.integers(1 << 40))] * int(generator.integers(1, 11))
        if num_below == 1:
            sequences.append(path)
            return
        cut = int(generator.integers(1, num_below))
        grow(path, cut)
        grow(path, num_below - cut)

    grow([], num)
    return sequences


def test_splits_are_close_to_the_best_there_is() -> None:
    generator = np.random.default_rng(0)
    every = partitions(list(range(6)))
    ours = best = num_best = 0
    for _ in range(150):
        sequences = random_tree(generator, 6)
        tree = prefix_forest(tensors(sequences))
        limit = max(max(map(len, sequences)), int(tree.num_tokens * generator.uniform(0.3, 0.9)))
        cost: dict[tuple[int, ...], int] = {}
        for mask in range(1, 64):
            group = tuple(i for i in range(6) if mask >> i & 1)
            cost[group] = len(prefixes([sequences[i] for i in group]))
        costs = [[cost[tuple(group)] for group in partition] for partition in every]
        least = min(sum(c) for c in costs if max(c) <= limit)
        got = sum(part.num_tokens for part in split_tree(tree, limit))
        assert got >= least
        ours, best, num_best = ours + got, best + least, num_best + (got == least)
    assert num_best >= 145
    assert ours <= 1.002 * best


def test_a_caterpillar_of_growing_prefixes() -> None:
    line = torch.arange(2000)
    forest = prefix_forest([line[: n + 1] for n in range(1999, -1, -1)])
    assert forest.members.tolist() == list(range(1999, -1, -1))
    assert forest.num_tokens == 2000
    assert len(split_tree(forest, 2000)) == 1


def test_starved_ranks_get_halves() -> None:
    tree = prefix_forest([torch.tensor([5, 5, 5, 5, i]) for i in range(8)])
    parts = split_tree(tree, 100, min_parts=2)
    assert [part.num_tokens for part in parts] == [8, 8]
    assert [part.members.size for part in split_tree(tree, 100, min_parts=99)] == [1] * 8


def test_ids_beyond_32_bits_keep_their_order() -> None:
    forest = prefix_forest(tensors([[2**40, 1], [3, 2], [2**40, 2], [2**33]]))
    assert forest.members.tolist() == [1, 3, 0, 2]
    assert forest.shared.tolist() == [0, 0, 0, 1]


def test_a_million_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(50_000, (20, 1024), generator=generator)
    sequences = [
        torch.cat([prompts[i % 20], torch.randint(50_000, (300,), generator=generator)]) for i in range(760)
    ]
    start = time.process_time()
    forest = prefix_forest(sequences)
    assert time.process_time() - start < 0.5  # 0.04 on an idle core
    assert int(forest.lengths.sum()) > 1_000_000
    assert forest.num_tokens <= 20 * 1024 + 760 * 300


def test_wrong_input() -> None:
    assert prefix_forest([]).trees() == split_tree(prefix_forest([]), 3) == []
    with pytest.raises(ValueError, match="sequence 1 is empty"):
        prefix_forest(tensors([[1], []]))
    with pytest.raises(ValueError, match="must not be negative"):
        prefix_forest(tensors([[1], [-4]]))
    with pytest.raises(ValueError, match="sequence 1 has 3 tokens but a part holds 2"):
        split_tree(prefix_forest(tensors([[1], [1, 2, 3]])), 2)
