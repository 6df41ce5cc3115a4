"""Advice: each saving and each swing is the estimate made again with one flag changed."""

from dataclasses import replace

import pytest

from agentrl.plan.advice import Trial, run_gpu_hours, savings, uncertainties
from agentrl.plan.configs import find_model
from agentrl.plan.engine import VLLM_0_30_0
from agentrl.plan.gpus import find_gpu
from agentrl.plan.hours import Plan, calibrated
from agentrl.plan.workload import Generation, Training, Workload

PLAN = Plan(
    shape=find_model("Qwen/Qwen3-8B"),
    gpu=find_gpu("H200"),
    gpus=8,
    workload=Workload(),
    generation=Generation(context=16_384),
    training=Training(),
    constants=VLLM_0_30_0,
)
OVERLAPPED = replace(PLAN, schedule="overlapped")
NOW = calibrated(PLAN).run_gpu_hours


def test_savings_are_sorted_and_real() -> None:
    every = savings(PLAN, count=100)
    assert savings(PLAN) == every[:3]
    assert [s.saved_gpu_hours for s in every] == sorted((s.saved_gpu_hours for s in every), reverse=True)
    saved = {s.flags: s.saved_gpu_hours for s in every}
    eight_bits = replace(PLAN, generation=replace(PLAN.generation, kv_bits=8))
    assert saved["--kv-bits 8"] == pytest.approx(NOW - calibrated(eight_bits).run_gpu_hours)
    assert saved["--no-old-log-probs"] == pytest.approx(300 * calibrated(PLAN).step_hours.old_log_probs)
    assert saved["--schedule overlapped"] == pytest.approx(NOW - calibrated(OVERLAPPED).run_gpu_hours)


def test_what_is_done_already_is_not_advised() -> None:
    frugal = replace(
        PLAN,
        generation=Generation(kv_bits=8, weight_bits=8, carry_over=True),
        training=Training(old_log_probs=False),
        workload=Workload(tool_seconds=0),
    )
    flags = {s.flags for s in savings(frugal, 100)}
    assert flags <= {"--batch 128", "--tensor-parallel 2", "--schedule overlapped"}


def test_no_engine_is_advised_that_cannot_split_the_heads() -> None:
    def advised(num_heads: int) -> bool:
        small = replace(PLAN.gpu, memory_bytes=30e9)  # one GPU holds few sequences
        shape = replace(PLAN.shape, num_heads=num_heads)
        tight = replace(PLAN, shape=shape, gpu=small, training=Training(microbatch_tokens=1024))
        return "--tensor-parallel 2" in {s.flags for s in savings(tight, 100)}

    assert advised(32)
    assert not advised(33)


def test_waste_is_named() -> None:
    wasteful = replace(PLAN, workload=Workload(zero_advantage=0.4), generation=Generation(prefix_cache=False))
    flags = {s.flags for s in savings(wasteful, 100)}
    assert {"--zero-advantage 0", "--prefix-cache"} <= flags
    trained_on = replace(PLAN, workload=Workload(zero_advantage=0.5, dynamic_sampling=False))
    assert "--episodes 256 --zero-advantage 0" in {s.flags for s in savings(trained_on, 100)}


def test_uncertainties_are_half_and_double() -> None:
    every = uncertainties(PLAN, 100)
    assert uncertainties(PLAN) == every[:2]
    assert [u.swing(NOW) for u in every] == sorted((u.swing(NOW) for u in every), reverse=True)
    by_flag = {u.flag: u for u in every}
    mfu = by_flag["--mfu"]
    at_half = calibrated(replace(PLAN, training=Training(mfu=0.2))).run_gpu_hours
    assert mfu.low == Trial(0.2, "half", at_half)
    assert (mfu.value, mfu.high.value, mfu.high.how) == (0.4, 0.8, "double")
    assert by_flag["--tokens"].high.gpu_hours > NOW > by_flag["--tokens"].low.gpu_hours


def test_a_share_of_waste_is_tried_at_double_its_odds() -> None:
    def trials(share: float) -> tuple[Trial, Trial]:
        wasteful = replace(PLAN, workload=Workload(zero_advantage=share))
        found = {u.flag: u for u in uncertainties(wasteful, 100)}["--zero-advantage"]
        now = calibrated(wasteful).run_gpu_hours
        assert found.low.gpu_hours < now < found.high.gpu_hours  # whatever the share
        return found.low, found.high

    low, high = trials(0.2)  # odds of 1/4
    assert (low.value, high.value) == (pytest.approx(1 / 9), pytest.approx(1 / 3))
    low, high = trials(0.75)  # odds of 3
    assert (low.value, high.value) == (pytest.approx(1.5 / 2.5), pytest.approx(6 / 7))
    assert (low.how, high.how) == ("half the odds", "double the odds")
    low, high = trials(0.97)
    assert high.value == pytest.approx(0.97 / 0.03 * 2 / (1 + 0.97 / 0.03 * 2))
    _, high = trials(0.9985)
    assert (high.value, high.how) == (0.999, "the most possible")


def test_a_share_that_cannot_be_doubled_is_tried_at_double_its_odds() -> None:
    by_flag = {u.flag: u for u in uncertainties(replace(PLAN, training=Training(mfu=0.6)), 100)}
    odds = VLLM_0_30_0.bandwidth_share / (1 - VLLM_0_30_0.bandwidth_share)
    for flag, of in (("--mfu", 1.5), ("--bandwidth-share", odds)):
        low, high = by_flag[flag].low, by_flag[flag].high
        assert (low.how, high.how) == ("half the odds", "double the odds")
        assert low.value == pytest.approx((of / 2) / (1 + of / 2))
        assert high.value == pytest.approx((2 * of) / (1 + 2 * of))
        assert low.gpu_hours > high.gpu_hours


def test_half_and_double_keep_to_what_the_other_figures_leave() -> None:
    tight = replace(PLAN, workload=Workload(tokens=10_000, sampled=7_000, prompt=2_000))
    by_flag = {u.flag: u for u in uncertainties(tight, 100)}
    assert (by_flag["--tokens"].low.value, by_flag["--tokens"].low.how) == (9_000, "the least possible")
    assert (by_flag["--sampled"].high.value, by_flag["--sampled"].high.how) == (8_000, "the most possible")
    long = replace(PLAN, generation=Generation(), workload=Workload(tokens=1_000_000))
    worst = uncertainties(long, 1)[0]  # of twice as many tokens not one sequence fits
    assert (worst.flag, worst.high.gpu_hours) == ("--tokens", float("inf"))


def test_a_plan_that_cannot_be_run_costs_infinitely_much() -> None:
    assert run_gpu_hours(replace(PLAN, gpus=1)) == float("inf")
