"""Advice: each saving and each swing is the estimate made again with one flag changed."""

from dataclasses import replace

import pytest

from agentrl.plan.advice import run_gpu_hours, savings, uncertainties
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
    assert (mfu.low, mfu.value, mfu.high) == (0.2, 0.4, 0.8)
    assert mfu.gpu_hours_at_low == calibrated(replace(PLAN, training=Training(mfu=0.2))).run_gpu_hours
    assert by_flag["--bandwidth-share"].high == 1.0  # no more than all of it
    assert by_flag["--tokens"].gpu_hours_at_high > NOW > by_flag["--tokens"].gpu_hours_at_low


def test_a_plan_that_cannot_be_run_costs_infinitely_much() -> None:
    assert run_gpu_hours(replace(PLAN, gpus=1)) == float("inf")
