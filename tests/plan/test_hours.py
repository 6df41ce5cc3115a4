"""GPU-hours: the pinned step, what the parts add up to, and the best split against trying all of them."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.plan.configs import find_model
from agentrl.plan.engine import VLLM_0_30_0
from agentrl.plan.gpus import find_gpu
from agentrl.plan.hours import Plan, both_schedules, calibrated, first_order
from agentrl.plan.memory import training_memory
from agentrl.plan.rollout import play
from agentrl.plan.workload import Generation, Lengths, Training, Workload

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


def test_the_first_order_step() -> None:
    step = first_order(PLAN)
    assert [round(value, 2) for _, value in step.items()] == [0.42, 0.14, 0, 0.11, 0.95, 0]
    assert round(300 * step.total) == 487


def test_a_reference_costs_a_forward_pass() -> None:
    with_reference = replace(PLAN, training=Training(reference=True, old_log_probs=False))
    assert first_order(with_reference).reference == first_order(PLAN).old_log_probs
    assert first_order(with_reference).old_log_probs == 0
    assert calibrated(with_reference).step_hours.reference == calibrated(PLAN).step_hours.old_log_probs


def test_training_counts_attention_and_leaves_the_look_up_out() -> None:
    plan = replace(PLAN, workload=Workload(length_cv=0.0), lengths=Lengths((1.0,)))
    flops = plan.shape.train_flops_per_token(24_000)
    step = calibrated(plan).step_hours
    assert step.train == pytest.approx(512 * 24_000 * flops / (0.4 * 989e12) / 3600)
    assert step.old_log_probs == pytest.approx(step.train / 3)


@settings(max_examples=15, deadline=None)
@given(gpus=st.integers(2, 24), tool=st.floats(0, 30), episodes=st.integers(8, 600), wide=st.booleans())
def test_the_parts_add_up_to_what_is_paid_for(gpus: int, tool: float, episodes: int, wide: bool) -> None:
    plan = replace(
        PLAN,
        gpus=gpus,
        workload=Workload(tool_seconds=tool, episodes=episodes),
        generation=Generation(tensor_parallel=2 if wide else 1),
    )
    for estimate in both_schedules(plan):
        assert estimate.step_hours.total == pytest.approx(gpus * estimate.step_seconds / 3600, rel=1e-9)
        assert estimate.step_hours.waiting >= 0
        assert estimate.run_gpu_hours == 300 * estimate.step_hours.total


@pytest.mark.parametrize(
    ("model", "gpu", "gpus", "ways", "mfu"),
    [
        ("Qwen/Qwen3-8B", "MI355X", 2, 1, 0.4),
        ("Qwen/Qwen3-8B", "H200", 5, 1, 0.1),
        ("Qwen/Qwen3-8B", "H200", 16, 2, 0.4),
        ("Qwen/Qwen3-30B-A3B", "B200", 8, 1, 0.9),  # training states need most of the GPUs
        ("Qwen/Qwen3-30B-A3B", "B200", 32, 2, 0.05),
    ],
)
def test_the_best_split_beats_every_other(model: str, gpu: str, gpus: int, ways: int, mfu: float) -> None:
    plan = replace(
        OVERLAPPED,
        shape=find_model(model),
        gpu=find_gpu(gpu),
        gpus=gpus,
        generation=Generation(tensor_parallel=ways),
        training=Training(mfu=mfu),
    )
    best = calibrated(plan)
    work = best.step_hours.train + best.step_hours.old_log_probs
    budget = plan.gpu.memory_bytes * plan.training.train_memory_share
    steps: list[float] = []
    for engines in range(1, (gpus - 1) // ways + 1):
        train_gpus = gpus - engines * ways
        if training_memory(plan.shape, train_gpus, plan.training, plan.action_share).total <= budget:
            rollout = play(plan.engine, plan.workload, plan.generation, plan.spread, engines)
            steps.append(max(rollout.seconds, 3600 * work / train_gpus) + plan.training.sync_seconds)
    assert best.step_seconds == pytest.approx(min(steps), rel=1e-9)
    assert best.generation_gpus + best.train_gpus == gpus


def test_dynamic_sampling_wastes_generation_only() -> None:
    wasteful = calibrated(replace(PLAN, workload=Workload(zero_advantage=0.5))).step_hours
    frugal = calibrated(PLAN).step_hours
    assert wasteful.train == frugal.train
    assert wasteful.decode == pytest.approx(2 * frugal.decode)
    assert wasteful.prefill == pytest.approx(2 * frugal.prefill)


def test_an_overlapped_schedule_needs_two_gpus_and_room_to_train() -> None:
    one = replace(OVERLAPPED, gpus=1, shape=find_model("Qwen/Qwen3-0.6B"))
    with pytest.raises(ValueError, match="overlapped schedule needs GPUs"):
        calibrated(one)
    assert [e.schedule for e in both_schedules(replace(one, schedule="synchronous"))] == ["synchronous"]
    with pytest.raises(ValueError, match=r"does not fit: training states .* on each of 1"):
        calibrated(replace(OVERLAPPED, gpus=2))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gpus": 0}, "--gpus must be at least 1, got 0"),
        ({"workload": Workload(episodes=0)}, "--episodes"),
        (
            {"generation": Generation(tensor_parallel=9)},
            r"--tensor-parallel \(9\) cannot be more than --gpus \(8\)",
        ),
        ({"training": Training(mfu=0)}, "--mfu"),
    ],
)
def test_impossible_plans(change: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(PLAN, **change)
