"""Plain data crosses as text: exact types survive, nothing else passes, and comparison is strict."""

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.gym.plain import MAX_DEPTH, TOO_DEEP, TOO_LARGE, decode, encode, same_value

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=()))
)
keys = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
plain = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.sets(keys, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@given(plain)
@settings(max_examples=100, deadline=None)
def test_round_trip_keeps_value_and_types(value: object) -> None:
    assert same_value(decode(encode(value)), value)


@given(st.text(alphabet='[]{}"tsd:,0123456789nulNaIfiy.-e', max_size=40))
@settings(max_examples=100, deadline=None)
def test_hostile_text_gives_plain_data_or_value_error(text: str) -> None:
    try:
        value = decode(text)
    except ValueError:
        return
    assert same_value(decode(encode(value)), value)


@pytest.mark.parametrize(
    "text",
    ["[" * 99_999, '{"t":' * 50_000, '{"s":[[1]]}', '{"d":[1]}', '{"d":[[1,2,3]]}', '{"x":[]}', "{}",
     '{"t":1}', "", "1" * 5000, "\x00", '{"__class__":"os.system"}'],
)  # fmt: skip
def test_garbage_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        decode(text)


class Liar(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


@pytest.mark.parametrize("value", [Liar(3), object(), print, b"x", 1j, frozenset(), range(3), [Liar(1)]])
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="not plain data"):
        encode(value)
    with pytest.raises(ValueError, match="only plain data"):
        same_value(value, value)


def test_size_and_depth_are_bounded() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(ValueError, match=TOO_DEEP):
        encode(loop)
    with pytest.raises(ValueError, match="too deeply"):
        same_value(loop, loop)
    for value in ("x" * 101, [0] * 101, 10**5000, ["€" * 20] * 2):
        with pytest.raises(ValueError, match=TOO_LARGE):
            encode(value, 100)
    deepest: object = 1
    for _ in range(MAX_DEPTH):
        deepest = (deepest,)
    assert same_value(decode(encode(deepest)), deepest)


@pytest.mark.parametrize(
    ("a", "b"),
    [(True, 1), (0, False), (1, 1.0), (0, None), ((1,), [1]), ("1", 1), ([1, 2], [2, 1]), ({1}, {True}),
     ({1: 2}, {1.0: 2}), ({1: 2}, {1: 2.0}), ([[True]], [[1]]), (set(), {}), ("a", "b"), ([1], [1, 1])],
)  # fmt: skip
def test_different(a: object, b: object) -> None:
    assert not same_value(a, b)
    assert not same_value(b, a)


def test_same() -> None:
    nan = float("nan")
    assert same_value([nan, {nan}, {"a": nan}], [math.nan, {float("nan")}, {"a": -nan}])
    assert same_value({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert same_value({1, 2, (3,)}, {(3,), 2, 1})
    assert same_value([0.0, {0.0}], [-0.0, {-0.0}])


def test_numbers_whose_hashes_collide_are_compared_fast() -> None:
    prime = 2**61 - 1  # the hash of an int is its remainder
    numbers = [k * prime for k in range(1, 2000)]
    collide = set(numbers)
    start = time.process_time()
    assert same_value(collide, collide)
    assert not same_value(collide, [collide])
    assert time.process_time() - start < 0.5  # five seconds if it hashed them
