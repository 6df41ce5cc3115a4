"""GPU-hours of a run, first order and calibrated, for synchronous and overlapped schedules."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

from agentrl.plan.engine import Engine, EngineConstants
from agentrl.plan.gpus import Gpu
from agentrl.plan.inputs import Range, check_ranges
from agentrl.plan.memory import check_training_fits
from agentrl.plan.models import ModelShape
from agentrl.plan.rollout import Rollout, lifetime_context, play
from agentrl.plan.roofline import StepHours, first_order_hours
from agentrl.plan.workload import Generation, Lengths, Schedule, Training, Workload, lognormal_lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that an estimate is made from.

    Raises ValueError, naming the flag, for figures that cannot be.
    """

    shape: ModelShape
    gpu: Gpu
    gpus: Annotated[int, Range(1, 1e6, "GPUs")]
    workload: Workload
    generation: Generation
    training: Training
    constants: EngineConstants
    schedule: Schedule = "synchronous"
    lengths: Lengths | None = None  # None: log-normal with the workload's spread

    def __post_init__(self) -> None:
        check_ranges(self)
        for part in (self.workload, self.generation, self.training):
            part.check()
        if self.generation.tensor_parallel > self.gpus:
            raise ValueError(
                f"--tensor-parallel ({self.generation.tensor_parallel}) cannot be more than "
                f"--gpus ({self.gpus})"
            )

    @property
    def spread(self) -> Lengths:
        """The relative lengths of the episodes."""
        return self.lengths or lognormal_lengths(self.workload.length_cv, 64)

    @property
    def engine(self) -> Engine:
        """One engine of the run."""
        return Engine(
            shape=self.shape,
            gpu=self.gpu,
            constants=self.constants,
            tensor_parallel=self.generation.tensor_parallel,
            weight_bytes_each=self.generation.weight_bits / 8,
            kv_bytes_each=self.generation.kv_bytes_each,
            allreduce_seconds=self.generation.allreduce_seconds,
        )

    @property
    def action_share(self) -> float:
        """Share of the tokens that the policy samples."""
        return self.workload.sampled / self.workload.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a step costs under one schedule."""

    schedule: Schedule
    step_hours: StepHours  # GPU-hours; they sum to gpus * step_seconds / 3600
    step_seconds: float
    generation_gpus: int
    train_gpus: int
    rollout: Rollout
    train_tokens_per_second: float  # on one GPU, forward and backward
    steps: int

    @property
    def run_gpu_hours(self) -> float:
        """GPU-hours of the whole run."""
        return self.steps * self.step_hours.total


def first_order(plan: Plan) -> StepHours:
    """GPU-hours of a step by the first-order roofline.

    >>> from agentrl.plan.configs import find_model
    >>> from agentrl.plan.engine import VLLM_0_30_0
    >>> from agentrl.plan.gpus import find_gpu
    >>> plan = Plan(shape=find_model("Qwen3-8B"), gpu=find_gpu("H200"), gpus=8, workload=Workload(),
    ...             generation=Generation(context=16_384), training=Training(), constants=VLLM_0_30_0)
    >>> hours = first_order(plan)
    >>> round(hours.total, 2), round(300 * hours.total), round(hours.decode_share, 2)
    (1.62, 487, 0.59)
    """
    w, g, t = plan.workload, plan.generation, plan.training
    return first_order_hours(
        plan.shape,
        plan.gpu,
        episodes=w.episodes,
        tokens=w.tokens,
        sampled=w.sampled,
        batch=g.batch,
        context=g.context or lifetime_context(w, plan.spread),
        busy=g.busy,
        mfu=t.mfu,
        weight_bytes_each=g.weight_bits / 8,
        kv_bytes_each=g.kv_bytes_each,
        old_log_probs=t.old_log_probs,
        reference=t.reference,
    )


@dataclass(frozen=True, slots=True)
class _Forward:
    # GPU-seconds of one step's training work
    train: float
    old_log_probs: float
    reference: float

    @property
    def total(self) -> float:
        return self.train + self.old_log_probs + self.reference


def _forward_seconds(plan: Plan) -> _Forward:
    w, t = plan.workload, plan.training
    grown, squared = w.tokens - w.prompt, plan.spread.squared_mean
    # attention's length for a token picked at random: E[T^2] / E[T]
    length = (w.prompt**2 + 2 * w.prompt * grown + grown**2 * squared) / w.tokens
    one = (
        w.episodes
        * w.tokens
        * plan.shape.forward_flops_per_token(length)
        / (t.mfu * plan.gpu.flops_per_second)
    )
    return _Forward(3 * one, one if t.old_log_probs else 0.0, one if t.reference else 0.0)


def calibrated(plan: Plan) -> Estimate:
    """The calibrated estimate under the plan's schedule.

    synchronous: all GPUs generate, then all train. overlapped: some generate the next batch while the others
    train on this one; the split that makes a step shortest is taken.

    Raises ValueError where the model, a sequence or a microbatch does not fit.
    """
    work = _forward_seconds(plan)
    if plan.schedule == "synchronous":
        check_training_fits(plan.shape, plan.gpu, plan.gpus, plan.training, plan.action_share)
        return _assemble(plan, work, plan.gpus, plan.gpus)
    ways = plan.generation.tensor_parallel
    if plan.gpus <= ways:
        raise ValueError(
            f"an overlapped schedule needs GPUs for an engine ({ways}) and for training, got {plan.gpus}; "
            "raise --gpus"
        )
    check_training_fits(plan.shape, plan.gpu, plan.gpus - ways, plan.training, plan.action_share)
    # the more engines, the fewer GPUs to hold the training states
    most = _last(1, (plan.gpus - 1) // ways, lambda n: _trains(plan, plan.gpus - n * ways))

    def split(num_engines: int) -> Estimate:
        return _assemble(plan, work, num_engines * ways, plan.gpus - num_engines * ways)

    def generation_is_slower(num_engines: int) -> bool:
        trial = split(num_engines)
        return trial.rollout.seconds > work.total / trial.train_gpus

    # more engines make rollouts shorter and training longer: the best split is beside the crossing
    low = _last(1, most, generation_is_slower)
    sides = (split(low), split(min(low + 1, most)))
    return min(sides, key=lambda estimate: estimate.step_seconds)


def _last(first: int, last: int, holds: Callable[[int], bool]) -> int:
    # the last of first..last for which `holds`, which turns false once and stays so; else `first`
    low, high = first, last + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _trains(plan: Plan, train_gpus: int) -> bool:
    try:
        check_training_fits(plan.shape, plan.gpu, train_gpus, plan.training, plan.action_share)
    except ValueError:
        return False
    return True


def _assemble(plan: Plan, work: _Forward, generation_gpus: int, train_gpus: int) -> Estimate:
    ways = plan.generation.tensor_parallel
    num_engines = generation_gpus // ways
    rollout = play(plan.engine, plan.workload, plan.generation, plan.spread, num_engines)
    train_seconds = work.total / train_gpus
    if plan.schedule == "synchronous":
        step_seconds = rollout.seconds + train_seconds + plan.training.sync_seconds
    else:
        step_seconds = max(rollout.seconds, train_seconds) + plan.training.sync_seconds
    engines = num_engines * ways / 3600
    prefill, decode = engines * rollout.prefill_seconds, engines * rollout.decode_seconds
    useful = work.total / 3600 + prefill + decode
    hours = StepHours(
        train=work.train / 3600,
        old_log_probs=work.old_log_probs / 3600,
        reference=work.reference / 3600,
        prefill=prefill,
        decode=decode,
        waiting=max(0.0, plan.gpus * step_seconds / 3600 - useful),
    )
    trained = plan.workload.episodes * plan.workload.tokens
    return Estimate(
        schedule=plan.schedule,
        step_hours=hours,
        step_seconds=step_seconds,
        generation_gpus=generation_gpus,
        train_gpus=train_gpus,
        rollout=rollout,
        train_tokens_per_second=trained / work.train,
        steps=plan.workload.steps,
    )


def both_schedules(plan: Plan) -> list[Estimate]:
    """The estimates that are possible: synchronous first, then overlapped where the GPUs allow it."""
    found: list[Estimate] = []
    schedules: tuple[Schedule, ...] = ("synchronous", "overlapped")
    for schedule in schedules:
        try:
            found.append(calibrated(replace(plan, schedule=schedule)))
        except ValueError:
            if schedule == plan.schedule:
                raise
    return found
