"""The sampler: the textbook's rule, exact; the promises of the default, one by one."""

import json
import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import agentrl as arl
import curriculum as simulation
from agentrl.curriculum.pass_rate import (
    EMA,
    BetaPosterior,
    DiscountedVariance,
    LastGroup,
    WindowMean,
)
from agentrl.curriculum.rules import RULES
from agentrl.curriculum.sampler import TaskSampler, filter_by_pass_rate

ALL_RULES: Any = tuple(RULES)


def play(
    sampler: TaskSampler, rates: dict[Any, float], n: int, steps: range, seed: int = 0
) -> list[list[Any]]:
    """Select, play groups of 8 at the given pass rates, observe; the selections."""
    selections: list[list[Any]] = []
    for step in steps:
        keys = sampler.select(n, step)
        rng = np.random.default_rng((seed, step))
        passed = rng.random((len(keys), 8)) < np.array([[rates[key]] for key in keys])
        sampler.observe_groups(keys, passed.astype(float).tolist(), step)
        selections.append(keys)
    return selections


def spread_rates(num_tasks: int) -> dict[int, float]:
    return {i: float(x) for i, x in enumerate(np.random.default_rng(5).beta(0.3, 0.3, num_tasks))}


# the textbook


def test_filter_is_strict_on_both_sides() -> None:
    rates = [0.0, 1e-9, 0.5, 1.0, float("nan")]
    assert filter_by_pass_rate(list("abcde"), rates) == ["b", "c"]
    assert filter_by_pass_rate(list("abcde"), rates, low=-1, high=2) == ["a", "b", "c", "d"]
    assert filter_by_pass_rate(list("abcde"), rates, low=0.5) == []
    assert filter_by_pass_rate([], []) == []


def test_filter_takes_task_objects_and_rates_by_name() -> None:
    tasks = [SimpleNamespace(name=name) for name in "abc"]
    assert filter_by_pass_rate(tasks, {"c": 0.5, "a": 0.1, "b": 1.0, "z": 0.5}) == [tasks[0], tasks[2]]
    assert filter_by_pass_rate(tasks, [0.5, 1.0, 0.0]) == [tasks[0]]
    with pytest.raises(ValueError, match="no pass rate for 1 of 3 tasks, first 'b'"):
        filter_by_pass_rate(tasks, {"a": 0.1, "c": 0.2})
    with pytest.raises(ValueError, match="got 2 pass rates for 3 tasks"):
        filter_by_pass_rate(tasks, [0.1, 0.2])


@given(seed=st.integers(0, 10_000), low=st.sampled_from([0.0, 0.2, -1.0]), revisit=st.integers(0, 3))
@settings(max_examples=10, deadline=None)
def test_textbook_pool_against_a_plain_loop(seed: int, low: float, revisit: int) -> None:
    rng = np.random.default_rng(seed)
    tasks = [f"task{i}" for i in range(12)]
    sampler = TaskSampler.textbook(tasks, low, 0.9, revisit, seed)
    estimates = dict.fromkeys(tasks, 0.5)
    for step in range(12):
        inside = filter_by_pass_rate(tasks, estimates, low, 0.9)
        pool = sampler.pool(4, step)
        if inside or revisit:
            num_outside = len(tasks) - len(inside)
            assert pool[: len(inside)] == inside
            assert len(pool) == len(set(pool)) == len(inside) + min(revisit, num_outside)
            assert set(pool) <= set(tasks)
        else:
            assert len(pool) == 1  # an empty step would end the run
        for task in rng.permutation(pool)[:4].tolist():
            rewards = rng.integers(0, 2, 4) * rng.integers(0, 2)
            sampler.observe(task, rewards.tolist(), step)
            estimates[task] = rewards.mean()


def test_textbook_revisits_are_uniform_over_the_tasks_outside() -> None:
    # 2,000 picks of 5: standard error .0089, six of them, a false alarm in 1e8 runs.
    sampler = TaskSampler.textbook(range(6), revisit=1)
    for key in range(1, 6):
        sampler.observe(key, [0, 0], step=0)
    picks = np.bincount([int(sampler.pool(1, 1)[1]) for _ in range(2_000)], minlength=6)
    assert picks[0] == 0
    assert (np.abs(picks[1:] / 2_000 - 0.2) < 0.054).all()


def test_an_open_band_is_the_uniform_rule_whatever_is_observed() -> None:
    # The caller draws from the pool with its own generator, so equal pools are equal runs.
    tasks = [f"task{i}" for i in range(20)]
    textbook, uniform = TaskSampler.textbook(tasks, low=-1, high=2), TaskSampler(tasks, select="uniform")
    state = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    for step in range(5):
        assert textbook.pool(8, step) == uniform.pool(8, step) == tasks
        for sampler in (textbook, uniform):
            sampler.observe(tasks[step], [step % 2] * 8, step)
    assert torch.equal(torch.random.get_rng_state(), state[0])
    assert np.array_equal(np.random.get_state()[1], state[1])  # noqa: NPY002


# the promises


@pytest.mark.parametrize("select", ALL_RULES)
@pytest.mark.parametrize("rate", [0.0, 1.0, 0.3])
def test_always_n_distinct_tasks(select: Any, rate: float) -> None:
    sampler = TaskSampler(range(21), select=select)
    for keys in play(sampler, dict.fromkeys(range(21), rate), 8, range(12)):
        assert len(keys) == len(set(keys)) == 8
    assert sorted(sampler.select(40, 12)) == list(range(21))
    assert sorted(sampler.select(21, 13)) == list(range(21))


@pytest.mark.parametrize("estimator", [LastGroup(), WindowMean(2), EMA(), DiscountedVariance()], ids=repr)
@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_everything_solved_or_nothing_for_point_estimates(estimator: Any, rate: float) -> None:
    rules = ("top", "proportional", "skip") + (("band", "pools") if estimator.is_pass_rate else ())
    for select in rules:
        sampler = TaskSampler(range(10), estimator, select)
        for keys in play(sampler, dict.fromkeys(range(10), rate), 4, range(8)):
            assert len(keys) == len(set(keys)) == 4


def test_without_fill_certain_tasks_cost_nothing_but_the_revisits() -> None:
    sampler = TaskSampler(range(20), LastGroup(), "band", fill=False)
    rates = {i: 0.5 if i < 3 else 1.0 for i in range(20)}
    selections = play(sampler, rates, 8, range(60))
    assert len(selections[0]) == 8
    assert np.mean([len(keys) for keys in selections[20:]]) < 4.5
    assert all(selections)


@given(
    num_tasks=st.integers(1, 24),
    n=st.integers(1, 8),
    revisit=st.sampled_from([0.07, 0.1, 0.25, 0.9, 1, 3]),
    select=st.sampled_from(["top", "proportional", "thompson", "skip", "pools"]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=15, deadline=None)
def test_a_forgotten_task_is_back_within_two_rounds(
    num_tasks: int, n: int, revisit: float, select: Any, seed: int
) -> None:
    sampler = TaskSampler(range(num_tasks), select=select, revisit=revisit, seed=seed)
    slots = min(revisit if revisit >= 1 else revisit * n, n)
    bound = 2 * math.ceil(num_tasks / slots)
    steps = range(min(2 * bound + 2, 60))
    selections = play(sampler, spread_rates(num_tasks), n, steps, seed)
    for key in range(num_tasks):
        visits = [
            -1,
            *(step for step, keys in zip(steps, selections, strict=True) if key in keys),
            steps.stop,
        ]
        assert max(b - a for a, b in pairwise(visits)) <= bound


@pytest.mark.parametrize(("revisit", "holds"), [(0.1, True), (0.0, False)])
def test_the_bound_fails_without_revisits(revisit: float, holds: bool) -> None:
    # Eight good tasks among solved ones, eight slots: what the bound's test sees where the guard is missing.
    sampler = TaskSampler(range(40), revisit=revisit)
    rates = {i: 0.5 if i < 8 else 1.0 for i in range(40)}
    selections = play(sampler, rates, 8, range(110))
    last = {key: max((s for s, keys in enumerate(selections) if key in keys), default=-1) for key in rates}
    assert (110 - min(last.values()) <= 2 * math.ceil(40 / 0.8)) is holds


def test_a_share_too_small_for_any_revisit_gives_none() -> None:
    rates = spread_rates(20)
    small, least = (TaskSampler(range(20), revisit=revisit) for revisit in (1e-9, 5e-324))  # W: 5e9 and inf
    assert play(least, rates, 4, range(40)) == play(small, rates, 4, range(40))


def test_a_changed_task_is_noticed() -> None:
    sampler = TaskSampler(range(20))
    rates = {i: 0.5 if i < 8 else 1.0 for i in range(20)}
    play(sampler, rates, 8, range(60))
    rates[15] = 0.5  # regressed
    selections = play(sampler, rates, 8, range(60, 140))
    assert sum(15 in keys for keys in selections[-20:]) > 10


def test_few_slots_and_many_tasks_do_not_circle() -> None:
    # 1,000 tasks for 4 slots: a visited task rests for 4 steps as long as there are unseen ones.
    rates = {i: 0.5 if i % 3 == 0 else 0.0 for i in range(1000)}
    most: dict[float, int] = {}
    for rested in (0.65, 1.0):
        selections = play(TaskSampler(range(1000), rested=rested), rates, 4, range(100))
        most[rested] = int(np.bincount([int(key) for keys in selections for key in keys]).max())
        if rested < 1:
            for step in range(96):
                window = [key for keys in selections[step : step + 5] for key in keys]
                assert len(set(window)) == 20
    assert most[0.65] <= 20
    assert most[1.0] > 40  # what the guard prevents


# evidence


def test_errored_episodes_are_not_evidence() -> None:
    plain, broken = TaskSampler(["a", "b"]), TaskSampler(["a", "b"])
    plain.observe("a", [1, 0, 1], step=0)
    broken.observe("a", [1, None, 0, float("nan"), 1], step=0)
    assert plain.state_dict()["tasks"] == broken.state_dict()["tasks"]
    assert broken.metrics()["num_errored_episodes"] == 2
    assert broken.metrics()["n_episodes"] == 5


@pytest.mark.parametrize("rewards", [[None] * 4, [float("nan")], []])
def test_a_group_that_broke_as_a_whole_is_a_visit_only(rewards: list[None]) -> None:
    sampler = TaskSampler(["a", "b"])
    sampler.observe("a", rewards, step=3)
    tasks = sampler.state_dict()["tasks"]
    assert tasks["state"] == [[0.0, 0.0], [0.0, 0.0]]
    assert tasks["since"] == [3, -1]
    assert sampler.metrics()["num_groups"] == 0
    assert sampler.metrics()["zero_adv_frac"] == 0.0


def test_a_task_that_always_breaks_does_not_hold_the_revisit_slots() -> None:
    sampler = TaskSampler(range(12), revisit=1)
    visits = np.zeros(12)
    for step in range(120):
        for key in sampler.select(4, step):
            visits[int(key)] += 1
            sampler.observe(key, [None] * 8 if key == 0 else [1.0] * 8, step)
    assert visits.min() >= 5
    assert sampler.metrics()["num_errored_episodes"] == 8 * visits[0]


def test_a_step_in_one_call_one_by_one_and_in_any_order() -> None:
    rng = np.random.default_rng(0)
    keys = ["a", "b", "c", "a", "a"]
    groups = [rng.integers(0, 2, size).tolist() for size in (8, 8, 4, 3, 8)]
    samplers = [TaskSampler(["a", "b", "c"]) for _ in range(3)]
    samplers[0].observe_groups(keys, groups, step=2)
    for key, rewards in zip(keys, groups, strict=True):
        samplers[1].observe(key, rewards, step=2)
    order = [1, 0, 3, 2, 4]  # the groups of one task keep theirs
    samplers[2].observe_groups([keys[i] for i in order], [groups[i] for i in order], step=2)
    states = [sampler.state_dict() for sampler in samplers]
    assert states[0] == states[1] == states[2]


def trajectory(task: str, reward: float, episode: str = "", group: str = "", **info: Any) -> arl.Trajectory:
    ids = torch.tensor([1, 2])
    zero = torch.zeros(1)
    return arl.Trajectory(ids, zero, zero, reward, {"task": task, **info}, group=group, episode=episode)


def test_trajectories_count_episodes_once_and_leave_errors_out() -> None:
    played = [
        trajectory("a", 1.0, episode="e1"),
        trajectory("a", 1.0, episode="e1"),  # the episode's context was rewritten: the same episode
        trajectory("a", 0.0, episode="e2"),
        trajectory("b", 0.0, group="b/0"),
        trajectory("b", 0.0, group="b/0", error="sandbox died"),
        trajectory("b", 1.0, group="b/1"),
    ]
    ours, plain = TaskSampler(["a", "b"]), TaskSampler(["a", "b"])
    ours.observe_trajectories(played, step=1)
    plain.observe_groups(["a", "b", "b"], [[1, 0], [0, None], [1]], step=1)
    assert ours.state_dict() == plain.state_dict()


def test_another_metric_than_the_shaped_reward_decides() -> None:
    played = [trajectory("a", 0.83, passed=True), trajectory("a", -0.1, passed=False)]
    with pytest.raises(ValueError, match="DiscountedVariance"):
        TaskSampler(["a"]).observe_trajectories(played, step=0)
    sampler = TaskSampler(["a"], metric="passed")
    sampler.observe_trajectories(played, step=0)
    assert sampler.state_dict()["tasks"]["state"] == [[1.0, 1.0]]
    with pytest.raises(ValueError, match="has no 'passed'"):
        sampler.observe_trajectories([trajectory("a", 1.0)], step=0)


def test_metrics() -> None:
    sampler = TaskSampler.textbook(range(4))
    assert sampler.metrics()["zero_adv_frac"] == 0.0
    sampler.observe_groups([0, 1], [[1, 1], [1, 0]], step=0)
    sampler.pool(2, 1)
    sampler.observe_groups([1, 2, 3], [[0, 0], [1, 0], [0, 0]], step=1)
    metrics = sampler.metrics()
    assert metrics["pool"] == 4  # three inside, one revisited
    assert metrics["n_episodes"] == 6
    assert metrics["zero_adv_frac"] == pytest.approx(2 / 3)
    assert (metrics["num_groups"], metrics["num_zero_adv_groups"], metrics["num_episodes"]) == (5, 3, 10)
    assert metrics["num_inside"] == 1
    assert metrics["longest_wait"] == 1
    json.dumps(metrics, allow_nan=False)


# resume


@pytest.mark.parametrize("select", ALL_RULES)
def test_a_resumed_run_selects_what_the_uninterrupted_one_would(select: Any) -> None:
    rates = spread_rates(30)
    whole, first = (
        TaskSampler(range(30), select=select, seed=3),
        TaskSampler(range(30), select=select, seed=3),
    )
    expected = play(whole, rates, 7, range(40))
    play(first, rates, 7, range(20))
    resumed = TaskSampler(range(30), select=select, seed=99)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert play(resumed, rates, 7, range(20, 40)) == expected[20:]
    assert resumed.state_dict() == whole.state_dict()
    assert resumed.metrics() == whole.metrics()


@pytest.mark.parametrize("estimator", [LastGroup(), WindowMean(3), EMA(), DiscountedVariance()], ids=repr)
def test_every_estimator_resumes(estimator: Any) -> None:
    rates = spread_rates(12)
    whole, first = TaskSampler(range(12), estimator), TaskSampler(range(12), estimator)
    expected = play(whole, rates, 3, range(16))
    play(first, rates, 3, range(8))
    resumed = TaskSampler(range(12), estimator)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert play(resumed, rates, 3, range(8, 16)) == expected[8:]


def test_state_survives_added_and_removed_tasks() -> None:
    first = TaskSampler(["a", "b", "c"])
    first.observe_groups(["a", "b"], [[1] * 8, [1, 0] * 4], step=5)
    second = TaskSampler(["new", "b", "a"])
    second.load_state_dict(first.state_dict())
    tasks = second.state_dict()["tasks"]
    assert tasks["key"] == ["a", "b", "new"]
    assert tasks["state"] == [[8.0, 0.0], [4.0, 4.0], [0.0, 0.0]]
    assert tasks["since"] == [5, 5, 5]
    assert tasks["visited"] == [True, True, False]
    second.add(["late"], step=7)
    second.remove(["a"])
    assert second.keys == ("b", "new", "late")
    assert sorted(map(str, second.select(3, 8))) == ["b", "late", "new"]


def test_a_foreign_or_damaged_state_changes_nothing() -> None:
    sampler = TaskSampler(range(3))
    sampler.observe(0, [1, 0], step=0)
    before = sampler.state_dict()
    with pytest.raises(ValueError, match="this sampler has BetaPosterior"):
        sampler.load_state_dict(TaskSampler(range(3), LastGroup()).state_dict())
    with pytest.raises(ValueError, match="estimator None"):
        sampler.load_state_dict({})
    for name in ("credit", "total", "tasks"):
        damaged = {k: v for k, v in TaskSampler(range(3)).state_dict().items() if k != name}
        with pytest.raises(ValueError, match="not a TaskSampler's state"):
            sampler.load_state_dict(damaged)
    assert sampler.state_dict() == before


# streams, sizes, errors


def test_admit_passes_over_certain_tasks_of_a_stream() -> None:
    sampler = TaskSampler(["a"], select="skip", revisit=0.05)
    assert sampler.admit("b", step=0)
    assert sampler.keys == ("a", "b")
    for step in range(4):
        sampler.observe("a", [1, 1], step)
    # 2,000 draws at 1/16: standard error .0054, six of them, a false alarm in 5e8 runs
    assert abs(np.mean([sampler.admit("a", step=4) for _ in range(2_000)]) - 1 / 16) < 0.033
    sampler.observe("a", [1, 0], step=5)
    assert all(sampler.admit("a", step=6) for _ in range(50))
    with pytest.raises(ValueError, match="admit needs select='skip'"):
        TaskSampler(["a"]).admit("a", step=0)


def test_group_sizes_follow_the_expected_spread() -> None:
    sampler = TaskSampler(["sure", "even", "new"])
    for _ in range(4):
        sampler.observe_groups(["sure", "even"], [[1] * 8, [1, 0] * 4], step=0)
    sizes = sampler.group_sizes(["sure", "even", "new"], 8, step=1)
    assert sum(sizes) == 24
    assert sizes[1] > sizes[2] > sizes[0] >= 2
    assert sampler.group_sizes([], 8, step=1) == []
    with pytest.raises(ValueError, match="cannot sum"):
        sampler.group_sizes(["sure"], 1, step=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TaskSampler([]), "keys is empty"),
        (lambda: TaskSampler(5), "keys must be a list of tasks, got 5"),  # type: ignore[arg-type]
        (lambda: TaskSampler(["a"], BetaPosterior), "estimator must be one such as"),  # type: ignore[arg-type]
        (lambda: TaskSampler(["a"], "beta"), "estimator must be one such as"),  # type: ignore[arg-type]
        (lambda: TaskSampler(["a"], select=["top"]), "no selection rule"),  # type: ignore[arg-type]
        (lambda: TaskSampler("abs"), "single string 'abs'"),
        (lambda: TaskSampler(["a", "b", "a"]), "duplicate task key 'a'"),
        (lambda: TaskSampler([1.5]), "has .key or .name"),
        (lambda: TaskSampler(["a", "b"], select="best"), "no selection rule 'best'"),  # type: ignore[arg-type]
        (lambda: TaskSampler(["a", "b"], low=1, high=0), "low < high"),
        (lambda: TaskSampler(["a", "b"], revisit=-0.1), "revisit"),
        (lambda: TaskSampler(["a", "b"], revisit=1.5), "revisit"),
        (lambda: TaskSampler(["a", "b"], revisit=float("nan")), "revisit"),
        (lambda: TaskSampler(["a", "b"], revisit=float("inf")), "revisit"),
        (lambda: TaskSampler(["a", "b"], seed=-1), "seed"),
        (lambda: TaskSampler(["a", "b"], rested=0), "rested"),
        (lambda: TaskSampler(["a", "b"], DiscountedVariance(), "band"), "a band on the mean says nothing"),
        (lambda: TaskSampler(["a", "b"], DiscountedVariance(), high=0.9), "a band on the mean says nothing"),
        (lambda: TaskSampler(["a", "b"], LastGroup(), "thompson"), "draws from a posterior"),
        (lambda: TaskSampler.textbook(["a", "b"], revisit=0.5), "number of tasks"),  # type: ignore[arg-type]
        (lambda: TaskSampler(["a", "b"]).select(0, 0), "n, the number of tasks wanted"),
        (lambda: TaskSampler(["a", "b"]).select(1, -1), "step must not be negative"),
        (lambda: TaskSampler(["a", "b"]).observe("a", [1], -1), "step must not be negative"),
        (lambda: TaskSampler(["a", "b"]).observe("z", [1], 0), "unknown task key 'z'"),
        (
            lambda: TaskSampler(["a", "b"]).observe("a", [1, float("inf")], 0),
            "task 'a' has an infinite reward",
        ),
        (lambda: TaskSampler(["a", "b"]).observe_groups(["a"], [], 0), "got 1 keys for 0 groups"),
    ],
)
def test_errors_say_what_is_wrong(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_public_names() -> None:
    assert arl.TaskSampler is TaskSampler
    assert arl.filter_by_pass_rate is filter_by_pass_rate
    assert TaskSampler(["a", "b"]).state_dict()["estimator"] == repr(BetaPosterior())


# the simulation


@pytest.mark.parametrize(("num_tasks", "n"), [(200, 64), (2000, 8)])
def test_the_default_wastes_ten_points_less_than_the_textbook(num_tasks: int, n: int) -> None:
    # 2 of the 12 seeds and 100 of the 300 steps; docs/curriculum.md has the whole table.
    waste = {
        name: np.mean(
            [simulation.simulate(name, num_tasks, n, seed, 100, None).zero_advantage for seed in (0, 1)]
        )
        for name in ("top (default)", "band, last group (textbook)")
    }
    assert waste["top (default)"] < waste["band, last group (textbook)"] - 0.10


def test_headroom_is_worth_its_place() -> None:
    final = {
        name: np.mean([simulation.simulate(name, 20, 8, seed, 150, 0.3).final for seed in range(3)])
        for name in ("top (default)", "top, no headroom")
    }
    assert final["top (default)"] > final["top, no headroom"] + 0.03
