"""The sampler's promises, for every rule with every estimator and whatever the episodes bring."""

import json
import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.curriculum.pass_rate import EMA, BetaPosterior, DiscountedVariance, LastGroup, WindowMean
from agentrl.curriculum.presets import preset
from agentrl.curriculum.rules import RULES
from agentrl.curriculum.sampler import TaskSampler, filter_by_pass_rate

PAIRS: list[tuple[Any, Any]] = [
    (rule, estimator)
    for rule in RULES
    for estimator in (LastGroup(), WindowMean(3), EMA(), BetaPosterior(), DiscountedVariance())
    if (estimator.is_pass_rate or rule not in ("band", "pools"))
    and (rule != "thompson" or isinstance(estimator, BetaPosterior))
]
REWARDS = st.sampled_from([0.0, 1.0, None, math.nan])
# Each step's groups: what anything may do, and the corners: all solved, all failed, all broken, none played.
GROUPS = st.one_of(
    st.lists(REWARDS, max_size=5),
    st.sampled_from([[1.0] * 4, [0.0] * 4, [None] * 4, [math.nan] * 2, []]),
)
REVISITS = st.sampled_from([0.07, 0.1, 0.25, 0.9, 1, 3])


def ids(value: Any) -> str:
    return value if isinstance(value, str) else type(value).__name__


def test_every_estimator_meets_every_rule_that_it_can() -> None:
    assert len(PAIRS) == 29
    assert {rule for rule, _ in PAIRS} == set(RULES)


@pytest.mark.parametrize(("rule", "estimator"), PAIRS, ids=ids)
@given(data=st.data())
@settings(max_examples=6, deadline=None)
def test_n_distinct_tasks_and_figures_whatever_is_observed(
    rule: Any, estimator: Any, data: st.DataObject
) -> None:
    num_tasks, n = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 6))
    sampler = TaskSampler(range(num_tasks), estimator, rule, revisit=data.draw(REVISITS))
    for step in range(data.draw(st.integers(1, 12))):
        keys = sampler.select(n, step)
        assert len(keys) == len(set(keys)) == min(n, num_tasks)
        sampler.observe_groups(keys, [data.draw(GROUPS) for _ in keys], step)
        json.dumps([sampler.metrics(), sampler.state_dict()], allow_nan=False)
        sizes = sampler.group_sizes(keys, 4, step)
        assert sum(sizes) == 4 * len(keys)
        assert 2 <= min(sizes) <= max(sizes) <= 16


@given(
    pair=st.sampled_from([pair for pair in PAIRS if pair[0] != "uniform"]),  # chance bounds nothing
    num_tasks=st.integers(1, 12),
    n=st.integers(1, 6),
    revisit=REVISITS,
    groups=st.lists(GROUPS, min_size=1, max_size=7),
)
@settings(max_examples=60, deadline=None)
def test_no_task_is_forgotten_for_longer_than_two_rounds(
    pair: tuple[Any, Any], num_tasks: int, n: int, revisit: float, groups: list[list[float | None]]
) -> None:
    rule, estimator = pair
    if rule == "band" and revisit >= 1:
        revisit = 0.9  # a whole number is the textbook's, at random
    sampler = TaskSampler(range(num_tasks), estimator, rule, revisit=revisit)
    bound = 2 * math.ceil(num_tasks / min(revisit if revisit >= 1 else revisit * n, n))
    visits: dict[Any, list[int]] = {key: [-1] for key in range(num_tasks)}
    num_steps = min(bound + 3, 60)
    for step in range(num_steps):
        keys = sampler.select(n, step)
        for key in keys:
            visits[key].append(step)
        # What a task brings depends on the task alone: some look good for ever, others hopeless.
        sampler.observe_groups(keys, [groups[int(key) % len(groups)] for key in keys], step)
    for steps in visits.values():
        assert max(b - a for a, b in pairwise([*steps, num_steps])) <= bound


@pytest.mark.parametrize(("rule", "estimator"), PAIRS, ids=ids)
@given(data=st.data())
@settings(max_examples=6, deadline=None)
def test_a_resumed_run_goes_on_as_the_uninterrupted_one(
    rule: Any, estimator: Any, data: st.DataObject
) -> None:
    """Through JSON, and with tasks that come and go before and after."""
    sampler = TaskSampler(range(8), estimator, rule, seed=1)
    fill = sampler.select(3, 0)
    sampler.observe_groups(fill, [data.draw(GROUPS) for _ in fill], 0)
    sampler.add(["new"], 1)
    sampler.remove([0, 5])
    for step in range(1, data.draw(st.integers(2, 6))):
        keys = sampler.select(3, step)
        sampler.observe_groups(keys, [data.draw(GROUPS) for _ in keys], step)
    other = TaskSampler(sampler.keys, estimator, rule, seed=2)
    other.load_state_dict(json.loads(json.dumps(sampler.state_dict(), allow_nan=False)))
    for step in range(6, 12):
        groups = [data.draw(GROUPS) for _ in range(3)]
        keys = [each.select(3, step) for each in (sampler, other)]
        assert keys[0] == keys[1]
        for each in (sampler, other):
            each.observe_groups(keys[0], groups, step)
            if step == 8:
                each.remove([keys[0][0]])
                each.add([f"late {keys[0][0]}"], step)
    assert other.state_dict() == sampler.state_dict()
    assert other.metrics() == sampler.metrics()


@given(groups=st.lists(GROUPS, min_size=3, max_size=3), bad=st.sampled_from(["key", "reward"]))
@settings(max_examples=15, deadline=None)
def test_what_is_refused_changes_nothing(groups: list[list[float | None]], bad: str) -> None:
    sampler = TaskSampler(["a", "b", "c"])
    sampler.observe_groups(["a", "b", "c"], groups, 0)
    before = json.dumps(sampler.state_dict())
    with pytest.raises(ValueError, match=r"unknown task key 'z'|infinite reward|got a reward of 0\.5"):
        sampler.observe_groups(
            ["a", "z" if bad == "key" else "b"], [[1.0, 0.0], [0.5 if bad == "reward" else 1.0]], 1
        )
    assert json.dumps(sampler.state_dict()) == before
    assert sampler.select(3, 2)


# presets


@pytest.mark.parametrize("rule", RULES)
def test_a_preset_is_its_rule_with_the_settings_given(rule: Any) -> None:
    sampler = preset(rule, range(6))
    assert sampler.keys == tuple(range(6))
    plain = TaskSampler.textbook(range(6)) if rule == "band" else TaskSampler(range(6), select=rule)
    assert sampler.state_dict() == plain.state_dict()


def test_the_settings_of_a_preset_reach_its_sampler() -> None:
    sure = {"a": [1.0] * 8, "b": [0.0] * 8, "c": [1.0, 0.0] * 4}

    def seen(rule: Any, **given: Any) -> TaskSampler:
        sampler = preset(rule, sure, **given)
        sampler.observe_groups(list(sure), list(sure.values()), 0)
        return sampler

    assert seen("top", low=0.11, high=0.89, fill=False).select(3, 1) == ["c"]
    assert len(seen("top", low=0.11, high=0.89).select(3, 1)) == 3
    assert seen("band", revisit=0).pool(3, 1) == ["c"]
    assert len(seen("band").pool(3, 1)) == 2  # the band, and one revisit
    assert set(seen("band", revisit=0, fill=True).pool(3, 1)) == set(sure)
    assert seen("band", revisit=0, high=2).pool(3, 1) == ["a", "c"]
    assert seen("pools").metrics()["num_inside"] == 1
    assert seen("pools", low=0.05, high=0.95).metrics()["num_inside"] == 3  # .1, .9: one prior episode each
    with pytest.raises(ValueError, match="uniform draws from all tasks; leave low, fill out"):
        preset("uniform", sure, low=0.1, fill=False)
    with pytest.raises(ValueError, match=r"low < high, got \(0\.9, 0\.8\)"):
        preset("pools", sure, low=0.9)


# what arrives from numpy, and what is no number


def test_numbers_of_numpy_give_the_same_state_and_plain_json() -> None:
    plain, other = TaskSampler(range(6), seed=3), TaskSampler(range(6), seed=np.int64(3))  # type: ignore[arg-type]
    share = TaskSampler(range(6), revisit=np.float32(0.25))  # type: ignore[arg-type]
    for step in range(3):
        keys = plain.select(2, step)
        assert other.select(np.int64(2), np.int64(step)) == keys  # type: ignore[arg-type]
        share.select(2, float(step))  # type: ignore[arg-type]
        for sampler in (plain, other, share):
            sampler.observe_groups(keys, [np.array([1, 0])] * 2, np.int64(step))  # type: ignore
    assert json.dumps(other.state_dict(), allow_nan=False) == json.dumps(plain.state_dict())
    json.dumps(share.state_dict(), allow_nan=False)


@pytest.mark.parametrize("bad", [1.5, None, "1", [1], 10**30, math.nan, math.inf])
def test_what_is_no_whole_number_is_refused(bad: Any) -> None:
    sampler = TaskSampler(range(3), select="skip")
    before = sampler.state_dict()
    for act in (
        lambda: sampler.select(2, bad),
        lambda: sampler.pool(2, bad),
        lambda: sampler.observe(0, [1, 0], bad),
        lambda: sampler.add([7], bad),
        lambda: sampler.admit(8, bad),
    ):
        with pytest.raises(ValueError, match=r"step must be"):
            act()
    if bad != 10**30:
        with pytest.raises(ValueError, match="n, the number of tasks wanted, must be a whole number"):
            sampler.select(bad, 0)
        with pytest.raises(ValueError, match="seed must be a whole number"):
            TaskSampler(range(3), seed=bad)
    assert {**sampler.state_dict(), "num_draws": 0} == {**before, "num_draws": 0}


@pytest.mark.parametrize("rewards", [1.0, None, [[1], [0]], "11", iter([1, 0])])
def test_what_is_no_list_of_rewards_is_refused(rewards: Any) -> None:
    with pytest.raises(ValueError, match="the rewards of task 0 must be a list of numbers"):
        TaskSampler(range(3)).observe(0, rewards, 0)


def test_a_reward_whose_square_overflows_is_refused() -> None:
    sampler = TaskSampler(range(3), DiscountedVariance())
    with pytest.raises(ValueError, match=r"task 1 has a reward of -1e\+200"):
        sampler.observe_groups([0, 1], [[1, 2], [0, -1e200]], 0)
    sampler.observe(1, [1e100, -1e100], 0)
    assert math.isfinite(sampler.metrics()["mean_signal"])


def test_the_filter_takes_any_iterable_and_no_rate_of_none() -> None:
    assert filter_by_pass_rate((name for name in "abc"), [0, 0.5, 1]) == ["b"]  # type: ignore[arg-type]
    for rates in ([0.5, None], {"a": 0.5, "b": None}):
        with pytest.raises(ValueError, match="no pass rate for 1 of 2 tasks, first 'b'"):
            filter_by_pass_rate(["a", "b"], rates)  # type: ignore[arg-type]


# states that are none


def damages() -> list[tuple[list[Any], Any]]:
    """(path into a state, value) of everything that a damaged or foreign file may hold there."""
    none = (None, "x", [], 1.5, 10**30)
    found: list[tuple[list[Any], Any]] = [
        ([name], value) for name in ("num_draws", "pool_size", "last_step") for value in (*none, -2)
    ]
    found += [(["seed"], value) for value in (None, "x", [], 1.5, -1)]
    found += [(["credit"], value) for value in (None, "x", [], -1.0, 1.5, math.nan)]
    for name in ("total", "of_step"):
        found += [([name], value) for value in (None, [], "x", {"x": 1})]
        found += [([name, "num_groups"], value) for value in (*none, -1)]
    found += [(["admitted"], value) for value in (None, 5, "x", [1.5], ["nobody"], [[]])]
    found += [(["tasks"], value) for value in (None, [], "x", {})]
    for name in ("since", "evidence", "num_certain"):
        found += [(["tasks", name, 0], value) for value in (*none, -2, 1e300, math.nan)]
    found += [(["tasks", "visited", 0], value) for value in (None, "x", [1], 2)]
    found += [(["tasks", "key", 0], value) for value in (None, 1.5, [1], {}, 1)]
    found += [(["tasks", "state", 0], value) for value in (None, 3, "ab", [1.0], [1.0, 2.0, 3.0])]
    return found + [
        (["tasks", "state", 0, 0], value) for value in (None, "3", [1], -5.0, math.inf, math.nan, 1e308)
    ]


@pytest.mark.parametrize(("path", "value"), damages(), ids=repr)
def test_a_damaged_state_is_refused_and_changes_nothing(path: list[Any], value: Any) -> None:
    sampler = TaskSampler(range(3))
    sampler.observe(0, [1, 0], step=0)
    before = json.dumps(sampler.state_dict())
    state = place = json.loads(before)
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=r"not a TaskSampler's state|not the columns of a task table"):
        sampler.load_state_dict(state)
    assert json.dumps(sampler.state_dict()) == before


@pytest.mark.parametrize("state", [None, [], "x", 5])
def test_what_is_no_state_at_all_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match="not a TaskSampler's state"):
        TaskSampler(range(3)).load_state_dict(state)


# streams


def test_a_resumed_stream_remembers_the_tasks_that_it_brought() -> None:
    """The keys that the sampler is made with are those of the first one; the stream's are in the state."""
    whole = TaskSampler(["known"], select="skip")
    for key in range(40):
        assert whole.admit(key, 0)
        whole.observe_groups([key, key], [[1.0] * 4] * 2, 0)
    whole.remove([0])
    resumed = TaskSampler(["known"], select="skip")
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict(), allow_nan=False)))
    assert resumed.keys == whole.keys == ("known", *range(1, 40))
    admitted = [whole.admit(key, 1) for key in range(1, 40)]
    assert [resumed.admit(key, 1) for key in range(1, 40)] == admitted
    assert not all(admitted)
    assert resumed.select(8, 2) == whole.select(8, 2)
    assert resumed.state_dict() == whole.state_dict()
    resumed.load_state_dict(whole.state_dict())  # where they are already
    assert resumed.state_dict() == whole.state_dict()


def test_a_state_without_a_stream_still_drops_what_is_gone() -> None:
    state = TaskSampler(["a", "gone"], select="skip").state_dict()
    del state["admitted"]  # as states before it were
    sampler = TaskSampler(["a", "new"], select="skip")
    sampler.load_state_dict(state)
    assert sampler.keys == ("a", "new")
    other = TaskSampler(["a"])
    stream = TaskSampler(["a"], select="skip")
    stream.admit("b", 0)
    other.load_state_dict(stream.state_dict())
    assert other.keys == ("a",)


# tasks whose environment is broken


@pytest.mark.parametrize(("rule", "fill"), [("top", True), ("proportional", True), ("top", False)])
def test_a_task_that_always_breaks_is_left_to_the_revisits(rule: Any, fill: bool) -> None:
    """It stays unseen, so worth more than every solved task: without the count it has a slot each step.

    20 tasks in 8 slots: due every 25 steps at the earliest, so 200 steps have 8 such visits. The tries that
    chance lets through come to 1 + 1/2 + 1/4 + ...: 2 on average, whatever is unfilled apart.
    """
    sampler = TaskSampler(range(20), select=rule, fill=fill)
    num_visits = 0
    for step in range(200):
        keys = sampler.select(8, step)
        assert len(set(keys)) == len(keys) == 8
        num_visits += 0 in keys
        groups = [[None] * 8 if key == 0 else [1.0, 0.0] * 4 if int(key) < 9 else [1.0] * 8 for key in keys]
        sampler.observe_groups(keys, groups, step)
    assert 4 <= num_visits <= 16
    for step in range(200, 260):  # repaired
        for key in sampler.select(8, step):
            sampler.observe(key, [1.0, 0.0] * 4 if int(key) < 9 else [1.0] * 8, step)
    assert sampler.state_dict()["tasks"]["num_broken"] == [0] * 20
    assert rule != "top" or 0 in sampler.select(9, 260)


def test_broken_groups_are_counted_in_order_and_saved() -> None:
    one, other = TaskSampler(["a", "b"]), TaskSampler(["a", "b"])
    keys, groups = ["a", "b", "a", "b"], [[1.0], [None], [None], [math.nan]]
    one.observe_groups(keys, groups, 0)
    for key, group in zip(keys, groups, strict=True):
        other.observe(key, group, 0)
    state = one.state_dict()
    assert state == other.state_dict()
    assert state["tasks"]["num_broken"] == [1, 2]
    back = TaskSampler(["b", "a"])
    back.load_state_dict(json.loads(json.dumps(state)))
    assert back.state_dict()["tasks"]["num_broken"] == [1, 2]
    del state["tasks"]["num_broken"]  # as states before it were
    back.load_state_dict(state)
    assert back.state_dict()["tasks"]["num_broken"] == [0, 0]


def test_a_group_that_comes_late_is_no_part_of_the_last_step() -> None:
    sampler = TaskSampler(range(3))
    sampler.observe(0, [1, 0], 5)
    sampler.observe_groups([1, 2], [[1, 1], [1, 1]], 3)
    metrics = sampler.metrics()
    assert (metrics["n_episodes"], metrics["zero_adv_frac"], metrics["num_episodes"]) == (2, 0.0, 6)
    sampler.observe(1, [0, 0], 5)
    assert sampler.metrics()["zero_adv_frac"] == 0.5


def test_a_metric_of_none_is_no_evidence() -> None:
    played: list[Any] = [
        SimpleNamespace(reward=0.3, info={"task": "a", "passed": passed}, group="a", episode=str(i))
        for i, passed in enumerate([True, None, False])
    ]
    sampler = TaskSampler(["a"], metric="passed")
    sampler.observe_trajectories(played, 0)
    assert sampler.state_dict()["tasks"]["state"] == [[1.0, 1.0]]
    assert sampler.metrics()["num_errored_episodes"] == 1


@pytest.mark.parametrize("rule", RULES)
def test_a_resumed_run_does_not_depend_on_the_order_of_its_keys(rule: Any) -> None:
    """Keys may come from a set or a listing; `add` and `remove` have moved those of the first sampler."""
    whole = TaskSampler([f"task{i}" for i in range(20)], select=rule, seed=3)
    for step in range(30):
        if step % 5 == 2:
            whole.add([f"late{step}"], step)
            whole.remove([whole.keys[step % 7]])
        if step >= 10:
            resumed = TaskSampler(whole.keys[::-1], select=rule)
            resumed.load_state_dict(json.loads(json.dumps(whole.state_dict(), allow_nan=False)))
            assert resumed.keys == whole.keys
            assert resumed.pool(6, step) == whole.pool(6, step)
        keys = whole.select(6, step)
        for key in map(str, keys):
            whole.observe(key, [float(len(key) + step > i) for i in range(30, 34)], step)


def test_a_stream_passes_over_a_task_that_always_breaks() -> None:
    sampler = TaskSampler(["a"], select="skip", revisit=0)
    for step in range(40):
        sampler.observe("a", [None] * 4, step)
    assert not any(sampler.admit("a", 40) for _ in range(100))
    sampler.observe("a", [1, 0], 41)
    assert all(sampler.admit("a", 42) for _ in range(100))
