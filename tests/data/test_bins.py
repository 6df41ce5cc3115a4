import math
import pickle
import time
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.bins import Algorithm, Bins, _fill_each, min_bins
from agentrl.data.packing import pack_lengths

ALGORITHMS: tuple[Any, ...] = get_args(Algorithm)


def chapter_lengths(num: int) -> np.ndarray:
    drawn = np.random.default_rng(0).lognormal(math.log(8192), 0.8, num)
    return drawn.round().clip(256, 65536).astype(np.int64)


def textbook(lengths: list[int], capacity: int, max_items: int, best: bool) -> list[list[int]]:
    """First or best fit decreasing, by looking at every bin."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = [b for b in range(len(bins)) if room[b] >= lengths[index] and len(bins[b]) < max_items]
        if not fits:
            bins.append([])
            room.append(capacity)
            fits = [len(bins) - 1]
        target = min(fits, key=lambda b: room[b]) if best else fits[0]
        bins[target].append(index)
        room[target] -= lengths[index]
    return bins


def assert_packed(
    bins: list[list[int]], lengths: list[int], capacity: int, max_items: int | None = None
) -> None:
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    for members in bins:
        assert members
        assert sum(lengths[i] for i in members) <= capacity
        assert max_items is None or len(members) <= max_items


def brute_force(lengths: list[int], capacity: int) -> int:
    """The fewest bins: the first sequence is in some subset that fits; try them all."""
    if not lengths:
        return 0
    first, rest = lengths[0], lengths[1:]
    fewest = len(lengths)
    for chosen in range(1 << len(rest)):
        if first + sum(v for i, v in enumerate(rest) if chosen >> i & 1) <= capacity:
            fewest = min(
                fewest, 1 + brute_force([v for i, v in enumerate(rest) if not chosen >> i & 1], capacity)
            )
    return fewest


@given(
    st.lists(st.integers(1, 30), max_size=40),
    st.integers(30, 70),
    st.sampled_from([1, 2, 3, 100]),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_fit_rules_are_the_textbook_ones(
    lengths: list[int], capacity: int, max_items: int, best: bool
) -> None:
    algorithm = "best_fit_decreasing" if best else "first_fit_decreasing"
    ours = pack_lengths(lengths, capacity, algorithm=algorithm, max_items=max_items)
    assert ours == textbook(lengths, capacity, max_items, best)


@given(
    st.lists(st.integers(1, 30), max_size=40),
    st.integers(30, 70),
    st.sampled_from([None, 1, 2, 5]),
    st.sampled_from([1, 1, 3, 8]),
    st.sampled_from(ALGORITHMS),
)
@settings(max_examples=120, deadline=None)
def test_every_rule_packs_all_within_capacity(
    lengths: list[int], capacity: int, max_items: int | None, multiple_of: int, algorithm: Algorithm
) -> None:
    capacity += multiple_of
    aligned = [-(-n // multiple_of) * multiple_of for n in lengths]
    bins = pack_lengths(lengths, capacity, algorithm=algorithm, max_items=max_items, multiple_of=multiple_of)
    assert_packed(bins, aligned, capacity, max_items)
    assert bins.overflowed == []
    assert len(bins) >= min_bins(aligned, capacity, max_items=max_items)


@given(st.lists(st.integers(1, 12), max_size=7), st.integers(12, 20))
@settings(max_examples=40, deadline=None)
def test_lower_bound_is_below_the_best_packing(lengths: list[int], capacity: int) -> None:
    fewest = brute_force(lengths, capacity)
    assert min_bins(lengths, capacity) <= fewest
    assert fewest <= len(pack_lengths(lengths, capacity, algorithm="portfolio")) <= fewest + 1


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.sampled_from([1, 2, 4, 100]))
@settings(max_examples=100, deadline=None)
def test_filling_rule_alone_packs_all(lengths: list[int], max_items: int) -> None:
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins = _fill_each(order, [lengths[i] for i in order], 32, max_items)
    assert_packed(bins, lengths, 32, max_items)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_capacity_holds_where_a_partition_of_the_mean_breaks_it(algorithm: Algorithm) -> None:
    assert sorted(pack_lengths([7] * 8, 8, algorithm=algorithm)) == [[i] for i in range(8)]


def test_ten_thousand_lengths() -> None:
    lengths = chapter_lengths(10_000)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        bins = pack_lengths(lengths, 65536)
        seconds.append(time.process_time() - start)
    assert_packed(bins, lengths.tolist(), 65536)
    assert min_bins(lengths, 65536) == 1713
    assert len(bins) <= 1714
    assert min(seconds) < 0.05  # 0.01 on an idle core


def test_a_million_lengths() -> None:
    lengths = chapter_lengths(1_000_000)
    start = time.process_time()
    bins = pack_lengths(lengths, 65536)
    assert time.process_time() - start < 5  # 1.0 on an idle core
    assert len(bins) <= 170_857
    flat = np.concatenate([np.array(members) for members in bins])
    loads = np.add.reduceat(lengths[flat], np.cumsum([0, *map(len, bins)])[:-1])
    assert loads.max() <= 65536
    assert np.array_equal(np.sort(flat), np.arange(1_000_000))


def test_portfolio_finds_the_triples() -> None:
    lengths = [26215] * 300 + [19660] * 300 + [19659] * 300
    bins = pack_lengths(lengths, 65536, algorithm="portfolio")
    assert_packed(bins, lengths, 65536)
    assert len(bins) == 300
    for plain in ("first_fit_decreasing", "best_fit_decreasing"):
        assert len(pack_lengths(lengths, 65536, algorithm=plain)) == 350


def test_filling_rule_finds_the_triples_without_the_balanced_one() -> None:
    sizes = [26215] * 300 + [19660] * 300 + [19659] * 300
    assert len(_fill_each(list(range(900)), sizes, 65536, 900)) == 300


def test_filling_rule_stays_linear_on_many_small_sequences() -> None:
    start = time.process_time()
    assert len(_fill_each(list(range(50_000)), [1] * 50_000, 40_000, 50_000)) == 2
    assert time.process_time() - start < 2


def test_balanced_rows_are_even() -> None:
    lengths = chapter_lengths(512)
    even = [int(lengths[m].sum()) for m in pack_lengths(lengths, 131072, algorithm="balanced")]
    best = [int(lengths[m].sum()) for m in pack_lengths(lengths, 131072)]
    assert len(even) <= len(best) + 1
    assert min(even) > 0.98 * max(even)
    assert min(best) < 0.9 * max(best)


def test_alignment_comes_before_packing() -> None:
    assert pack_lengths([60, 60, 1], 128, multiple_of=64) == [[0, 1], [2]]


def test_overflow() -> None:
    lengths = [3, 9, 5, 20]
    with pytest.raises(ValueError, match="length 9 at index 1 exceeds the capacity 8"):
        pack_lengths(lengths, 8)
    solo = pack_lengths(lengths, 8, overflow="solo")
    assert sorted(map(sorted, solo)) == [[0, 2], [1], [3]]
    drop = pack_lengths(lengths, 8, overflow="drop")
    assert drop == [[2, 0]]
    cut = pack_lengths(lengths, 8, overflow="truncate")
    assert cut == [[1], [3], [2, 0]]
    assert solo.overflowed == drop.overflowed == cut.overflowed == [1, 3]
    assert pack_lengths(lengths, 20, overflow="drop").overflowed == []


def test_overflow_of_aligned_lengths() -> None:
    with pytest.raises(
        ValueError, match="length 70 at index 1, 128 once aligned to 64, exceeds the capacity 100"
    ):
        pack_lengths([3, 70], 100, multiple_of=64)
    assert pack_lengths([3, 70], 128, multiple_of=64, overflow="truncate") == [[1], [0]]
    cut = pack_lengths([3, 70], 100, multiple_of=64, overflow="truncate")
    assert (cut, cut.overflowed) == ([[0], [1]], [1])
    with pytest.raises(ValueError, match="no multiple of 64 fits"):
        pack_lengths([3, 70], 60, multiple_of=64, overflow="truncate")


@pytest.mark.parametrize("wrong", [0, -3, 2.5, math.nan, math.inf, True, "4", None, 2**70, np.bool_(False)])
def test_a_wrong_length_is_named(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"length at index 2 .*got"):
        pack_lengths([4, 5, wrong, 6], 8)


@pytest.mark.parametrize(
    "lengths",
    [
        np.array([4.0, 5.0, math.nan]),
        np.array([4, 5, 0]),
        torch.tensor([4, 5, -1]),
        torch.tensor([4.0, 5.0, 1.5]),
    ],
)
def test_a_wrong_length_in_an_array_is_named(lengths: Any) -> None:
    with pytest.raises(ValueError, match="length at index 2"):
        pack_lengths(lengths, 8)
    with pytest.raises(ValueError, match="length at index 0"):
        pack_lengths(lengths > 2, 8)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("capacity", 0),
        ("capacity", 2.0),
        ("max_items", 0),
        ("multiple_of", True),
        ("overflow", "cut"),
        ("algorithm", "karmarkar_karp"),
    ],
)
def test_wrong_arguments(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"capacity": 8, name: value}
    with pytest.raises(ValueError, match=name):
        pack_lengths([3], **arguments)
    with pytest.raises(ValueError, match="vector"):
        pack_lengths(np.ones((2, 2), dtype=np.int64), 8)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_kinds_of_input_give_the_same_plan(algorithm: Algorithm) -> None:
    assert pack_lengths([], 8, algorithm=algorithm) == []
    lengths = chapter_lengths(300)
    plan = pack_lengths(lengths.tolist(), 65536, algorithm=algorithm)
    for same in (
        lengths,
        lengths.astype(np.int32),
        lengths.astype(np.float64),
        torch.tensor(lengths),
        tuple(lengths),
    ):
        assert pack_lengths(same, 65536, algorithm=algorithm) == plan  # type: ignore[arg-type]
    assert type(plan[0][0]) is int


def test_bins_survive_pickling() -> None:
    bins = pickle.loads(pickle.dumps(pack_lengths([3, 9], 8, overflow="solo")))
    assert isinstance(bins, Bins)
    assert (bins, bins.overflowed) == ([[1], [0]], [1])
