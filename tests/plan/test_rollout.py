"""A rollout: its time against a simulation of every episode, the tail, the tools, the prefill."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.plan.configs import find_model
from agentrl.plan.engine import VLLM_0_30_0, Engine
from agentrl.plan.gpus import find_gpu
from agentrl.plan.rollout import Rollout, drain_seconds, lifetime_context, play, prefill_tokens
from agentrl.plan.workload import Generation, Lengths, Workload, lognormal_lengths

ENGINE = Engine(shape=find_model("Qwen/Qwen3-8B"), gpu=find_gpu("H200"), constants=VLLM_0_30_0)
EVEN = Lengths((1.0,))
WORK = Workload(tokens=8000, sampled=2000, prompt=1000)


def played(
    workload: Workload = WORK, lengths: Lengths = EVEN, num_engines: int = 8, **generation: object
) -> Rollout:
    return play(ENGINE, workload, Generation(**generation), lengths, num_engines)  # type: ignore[arg-type]


def test_equal_episodes_without_tools_take_their_steps() -> None:
    r = played(replace(WORK, tool_seconds=0.0))
    step = ENGINE.step_seconds(64, 4500, 3.0, 4500)
    assert r.batch == r.decoding == 64
    assert r.seconds == pytest.approx(2000 * step, rel=1e-9)
    assert r.tokens_per_second == pytest.approx(64 / step)
    assert r.waiting_seconds == pytest.approx(0, abs=1e-6)
    assert r.busy == pytest.approx(1)
    assert r.decode_seconds + r.prefill_seconds == pytest.approx(r.seconds)


def test_one_waits_for_its_tools() -> None:
    r = played(replace(WORK, episodes=1, tool_seconds=2.0), num_engines=1)
    step = ENGINE.step_seconds(r.decoding, 4500, 3.0, 4500)
    assert r.seconds == pytest.approx(2000 * step + 19 * 2.0, rel=1e-6)
    assert r.waiting_seconds > 0.9 * 38


def simulated(lengths: list[float], slots: int, pace: Callable[[float], float]) -> float:
    waiting, running, seconds = list(lengths), [], 0.0
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop())
        move = min(running)
        seconds += move * pace(len(running))
        running = [left - move for left in running if left - move > 1e-9]
    return seconds


@settings(max_examples=60, deadline=None)
@given(raw=st.lists(st.floats(0.1, 10), min_size=1, max_size=12), slots=st.integers(1, 12))
def test_drain_equals_playing_every_episode(raw: list[float], slots: int) -> None:
    mean = sum(raw) / len(raw)
    relative = [x / mean for x in raw]
    order = sorted(range(len(raw)), key=lambda i: (i * 0.6180339887498949) % 1)

    def pace(active: float) -> float:
        return 1.0 + 0.1 * active

    expected = simulated([100.0 * relative[i] for i in order], slots, pace)
    found = drain_seconds(100.0, Lengths(tuple(relative)), len(raw), slots, pace)
    assert found == pytest.approx(expected, rel=1e-6)


def test_groups_of_episodes_come_close_to_all_of_them() -> None:
    lengths = lognormal_lengths(0.5, 2048)

    def pace(active: float) -> float:
        return 1.0 + 0.05 * active

    order = sorted(range(2048), key=lambda i: (i * 0.6180339887498949) % 1)
    expected = simulated([100.0 * lengths.relative[i] for i in order], 256, pace)
    assert drain_seconds(100.0, lengths, 2048, 256, pace) == pytest.approx(expected, rel=0.1)


@settings(max_examples=60, deadline=None)
@given(
    episodes=st.integers(1, 40_000),
    batch=st.integers(1, 128),
    zero=st.floats(0, 0.999),
    cv=st.floats(0, 2),
    tool=st.floats(0, 5),
)
def test_no_rollout_is_faster_than_its_work(
    episodes: int, batch: int, zero: float, cv: float, tool: float
) -> None:
    workload = replace(WORK, episodes=episodes, zero_advantage=zero, tool_seconds=tool)
    r = played(workload, lognormal_lengths(cv, 64), num_engines=4, batch=batch, context=4500)
    assert r.seconds >= (r.decode_seconds + r.prefill_seconds) * (1 - 1e-9)
    assert 0 < r.busy <= 1


@pytest.mark.parametrize("episodes", [300, 1000, 2816, 3000, 6000])
def test_many_episodes_take_what_a_simulation_of_all_takes(episodes: int) -> None:
    lengths = lognormal_lengths(0.5, 64)

    def pace(active: float) -> float:
        return 1.0 + 0.05 * active

    order = sorted(range(episodes), key=lambda i: (i * 0.6180339887498949) % 1)
    expected = simulated([100.0 * lengths.relative[i * 64 // episodes] for i in order], 64, pace)
    assert drain_seconds(100.0, lengths, episodes, 64, pace) == pytest.approx(expected, rel=0.03)


def test_the_tail_costs_and_carrying_over_saves_it() -> None:
    spread = lognormal_lengths(1.0, 64)
    even, tail = played(lengths=EVEN), played(lengths=spread, context=4500)
    carried = played(lengths=spread, context=4500, carry_over=True)
    assert tail.seconds > 1.5 * even.seconds
    assert carried.seconds == pytest.approx(even.seconds, rel=1e-6)
    assert tail.decode_seconds == carried.decode_seconds


def test_long_episodes_live_longer() -> None:
    workload = Workload(tokens=9000, prompt=1000, sampled=2000)
    assert lifetime_context(workload, EVEN) == 5000
    # one of 4000 and one of 12,000 more: the second has three quarters of the steps
    two = Lengths((0.5, 1.5))
    assert lifetime_context(workload, two) == 0.25 * 3000 + 0.75 * 7000


def test_prefill_with_and_without_a_prefix_cache() -> None:
    workload = Workload(tokens=1000, sampled=200, prompt=100, turns=3)
    assert prefill_tokens(workload, prefix_cache=True) == 800
    assert prefill_tokens(workload, prefix_cache=False) == 100 + 400 + 700  # what is there before each turn
    assert prefill_tokens(replace(workload, turns=1), prefix_cache=False) == 800
    assert played(prefix_cache=False).seconds > played().seconds


def test_the_batch_is_what_the_cache_holds() -> None:
    assert played(context=16_384).batch == 47
    assert played(context=2048).batch == 64
    assert played(replace(WORK, episodes=80), context=2048).batch == 10  # no more than an engine has
    assert played(context=16_384, kv_bits=16).sequences_that_fit == pytest.approx(47.3, abs=0.05)


def test_a_sequence_that_does_not_fit_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"a sequence of 1,000,000 tokens \(--context\) does not fit .* --tensor-parallel"
    ):
        played(context=1e6)
    with pytest.raises(ValueError, match="at least one engine"):
        played(num_engines=0)


@pytest.mark.parametrize("episodes", [2, 3, 8, 64, 512])
def test_one_episode_more_is_never_cheaper_where_unfinished_ones_carry_over(episodes: int) -> None:
    # rounding an engine's share of the episodes up to whole ones would halve the time at one a share
    now, more = (
        played(replace(WORK, episodes=n), num_engines=8, carry_over=True) for n in (episodes, episodes + 1)
    )
    assert more.seconds >= now.seconds * (1 - 1e-9)
    assert more.batch >= now.batch
