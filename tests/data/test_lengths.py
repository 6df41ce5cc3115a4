"""Lengths as users have them: any vector of whole numbers, and a clear no to everything else."""

import sys
from typing import Any

import numpy as np
import pytest
import torch

import agentrl as arl
from agentrl.data.bins import min_bins
from agentrl.data.lengths import as_lengths

ALGORITHMS = ("first_fit_decreasing", "best_fit_decreasing", "balanced", "portfolio")


@pytest.mark.parametrize(
    "given",
    [
        [3, 5],
        (3, 5.0),
        range(3, 6, 2),
        np.array([3, 5], dtype=object),
        np.array([3.0, 5.0], dtype=np.float16),
        np.array([3, 5], dtype=np.uint8),
        torch.tensor([3, 5], dtype=torch.int16),
        torch.tensor([3.0, 5.0], dtype=torch.bfloat16),
        [torch.tensor(3), torch.tensor([5])],
        [np.int32(3), np.float32(5)],
    ],
)
def test_any_vector_of_whole_numbers(given: Any) -> None:
    found = as_lengths(given)
    assert found.dtype == np.int64
    assert found.tolist() == [3, 5]


def test_an_iterator_is_read_once() -> None:
    assert arl.pack_lengths((n for n in (3, 5)), 8) == [[1, 0]]
    assert arl.plan_microbatches((n for n in (3, 5)), max_tokens=8).ranks == [[[1, 0]]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([3, torch.tensor([3, 4])], r"at index 1 must be a positive whole number, got tensor\(\[3, 4\]\)"),
        ([3, np.array([3, 4])], r"at index 1 must be a positive whole number, got array\(\[3, 4\]\)"),
        (np.array([3, None], dtype=object), "at index 1 must be a positive whole number, got None"),
        (np.array([3, True], dtype=object), "at index 1 must be a positive whole number, got True"),
        (np.array([True, False]), "at index 0 must be a positive whole number, got True"),
        (np.array([3, 0]), "at index 1 must be a positive whole number, got 0"),
        ([3.0, float("nan")], "at index 1 must be a positive whole number, got nan"),
        ([3, 2**62 + 1], "at index 1 must be at most"),
        ([3, 2**70], "at index 1 must be at most"),
        ([3.0, 1e300], "at index 1 must be at most"),
        ([3, -(2**70)], "at index 1 must be a positive whole number"),
        ([2**62, 2**62], r"lengths must add up to at most 2\*\*62, got 9223372036854775808"),
        (torch.ones(2, 2), r"lengths must be a vector, got shape \(2, 2\)"),
        (5, "lengths must be a vector, got 5"),
    ],
)
def test_anything_else_is_named(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_lengths(given)


@pytest.mark.parametrize("capacity", [sys.maxsize, 2**63, 10**30])
def test_a_capacity_beyond_int64_is_no_limit(capacity: int) -> None:
    for algorithm in ALGORITHMS:
        assert arl.pack_lengths([3, 5], capacity, algorithm=algorithm) == [[1, 0]]
        assert arl.pack_lengths([3, 5], capacity, algorithm=algorithm, overflow="truncate") == [[1, 0]]
    assert min_bins([3, 5], capacity) == 1
    assert arl.token_budget_batches([3, 5], capacity) == [[1, 0]]
    plan = arl.plan_microbatches([3, 5], max_tokens=capacity, num_ranks=2)
    assert plan.ranks == [[[1]], [[0]]]


def test_a_multiple_beyond_int64_is_refused() -> None:
    with pytest.raises(ValueError, match="rounded lengths must add up to at most"):
        arl.pack_lengths([3, 5], 2**63, multiple_of=2**63)
    with pytest.raises(ValueError, match="capacity must be a positive whole number, got 0"):
        min_bins([3], 0)


def test_trajectories_may_come_from_an_iterator() -> None:
    trajs = [arl.Trajectory(torch.arange(n), torch.ones(n - 1), torch.zeros(n - 1), 0.0) for n in (3, 5)]
    packed, again = (arl.pack_sequences(given, 8) for given in (trajs, iter(trajs)))
    assert torch.equal(packed.ids, again.ids)
    assert torch.equal(arl.collate(iter(trajs), 0)["ids"], arl.collate(trajs, 0)["ids"])
    for one, other in zip(arl.token_weights(trajs), arl.token_weights(iter(trajs)), strict=True):
        assert torch.equal(one, other)
    ids = [t.ids for t in trajs]
    assert arl.prefix_forest(iter(ids)).num_tokens == arl.prefix_forest(ids).num_tokens == 5
