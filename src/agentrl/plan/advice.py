"""What would save most, and which assumption moves the answer most: the estimate with one thing changed."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from agentrl.plan.engine import EngineConstants
from agentrl.plan.hours import Plan, calibrated
from agentrl.plan.inputs import Range, flag_of, ranges_of
from agentrl.plan.workload import Training, Workload


@dataclass(frozen=True, slots=True)
class Saving:
    """One change, and the GPU-hours of the run that it saves."""

    change: str
    flags: str
    saved_gpu_hours: float


@dataclass(frozen=True, slots=True)
class Trial:
    """Another value of an assumption, how it follows from the present one, and what the run then takes."""

    value: float
    how: str  # "half", "double", of the odds where a share cannot be doubled, or the end of what is possible
    gpu_hours: float  # infinity where the run is not possible


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """One assumption, and the run's GPU-hours with less and with more of it."""

    assumption: str
    flag: str
    value: float
    low: Trial
    high: Trial

    def swing(self, gpu_hours: float) -> float:
        """The larger of the two distances from the estimate, in GPU-hours."""
        return max(abs(trial.gpu_hours - gpu_hours) for trial in (self.low, self.high))


def run_gpu_hours(plan: Plan) -> float:
    """GPU-hours of the run, or infinity where the plan cannot be run."""
    try:
        return calibrated(plan).run_gpu_hours
    except ValueError:
        return math.inf


def savings(plan: Plan, count: int = 3) -> list[Saving]:
    """The changes that save most, each alone, best first; those that save nothing are left out."""
    now = calibrated(plan).run_gpu_hours
    found = [Saving(text, flags, now - run_gpu_hours(changed)) for text, flags, changed in _changes(plan)]
    useful = [saving for saving in found if saving.saved_gpu_hours > 1e-6 * now]
    return sorted(useful, key=lambda saving: -saving.saved_gpu_hours)[:count]


def _changes(plan: Plan) -> list[tuple[str, str, Plan]]:
    w, g, t = plan.workload, plan.generation, plan.training
    found: list[tuple[str, str, Plan]] = []

    def add(text: str, flags: str, changed: Plan) -> None:
        found.append((text, flags, changed))

    if g.kv_bits > 8:
        add("keep the KV cache in 8 bits", "--kv-bits 8", replace(plan, generation=replace(g, kv_bits=8)))
    if g.weight_bits > 8:
        add(
            "8-bit weights in the engine",
            "--weight-bits 8",
            replace(plan, generation=replace(g, weight_bits=8)),
        )
    if not g.prefix_cache:
        add(
            "prefill only what a turn adds",
            "--prefix-cache",
            replace(plan, generation=replace(g, prefix_cache=True)),
        )
    if t.old_log_probs:
        add(
            "take the old policy's log-probs from the sampler",
            "--no-old-log-probs",
            replace(plan, training=replace(t, old_log_probs=False)),
        )
    if w.zero_advantage > 0 and w.dynamic_sampling:
        chosen = replace(w, zero_advantage=0.0)
        add("choose tasks that carry signal", "--zero-advantage 0", replace(plan, workload=chosen))
    if w.zero_advantage > 0 and not w.dynamic_sampling:
        kept = max(1, round(w.episodes * (1 - w.zero_advantage)))
        chosen = replace(w, episodes=kept, zero_advantage=0.0)
        add(
            "choose tasks that carry signal",
            f"--episodes {kept} --zero-advantage 0",
            replace(plan, workload=chosen),
        )
    if not g.carry_over:
        add(
            "carry unfinished episodes over to the next step",
            "--carry-over",
            replace(plan, generation=replace(g, carry_over=True)),
        )
    if w.wait_seconds > 0:
        add("tools twice as fast", f"--tool-seconds {w.tool_seconds / 2:g}", replace(
            plan, workload=replace(w, tool_seconds=w.tool_seconds / 2)))  # fmt: skip
    add("decode twice as many sequences together", f"--batch {2 * g.batch}", replace(
        plan, generation=replace(g, batch=2 * g.batch)))  # fmt: skip
    wider = 2 * g.tensor_parallel
    if plan.gpus % wider == 0 and plan.shape.num_heads % wider == 0:
        add(f"engines of {wider} GPUs", f"--tensor-parallel {wider}", replace(
            plan, generation=replace(g, tensor_parallel=wider)))  # fmt: skip
    if plan.schedule == "synchronous":
        add("generate while training", "--schedule overlapped", replace(plan, schedule="overlapped"))
    return found


def uncertainties(plan: Plan, count: int = 2) -> list[Uncertainty]:
    """The assumptions that move the run's GPU-hours most at half and double their value, largest first.

    The share without signal, and another share that cannot be doubled, is tried at half and double its odds,
    p / (1 - p): with dynamic sampling 1 + odds episodes are played for one that is trained on.
    """
    now = calibrated(plan).run_gpu_hours
    found: list[Uncertainty] = []
    for assumption in _assumptions(plan):
        low, high = (
            Trial(value, how, run_gpu_hours(assumption.change(value))) for value, how in _trials(assumption)
        )
        found.append(Uncertainty(assumption.what, flag_of(assumption.field), assumption.value, low, high))
    return sorted(found, key=lambda item: -item.swing(now))[:count]


@dataclass(frozen=True, slots=True)
class _Assumption:
    what: str
    field: str
    value: float
    possible: Range
    change: Callable[[float], Plan]


def _trials(assumption: _Assumption) -> list[tuple[float, str]]:
    value, possible = assumption.value, assumption.possible
    half, double, of = value / 2, 2 * value, ""
    by_odds = assumption.field == "zero_advantage" or (possible.unit == "share" and double > 1)
    if by_odds and value < 1:
        odds = value / (1 - value)
        half, double, of = odds / (2 + odds), 2 * odds / (1 + 2 * odds), " the odds"
    low, high = possible.clamp(half), possible.clamp(double)
    return [
        (low, f"half{of}" if low == half else "the least possible"),
        (high, f"double{of}" if high == double else "the most possible"),
    ]


def _assumptions(plan: Plan) -> list[_Assumption]:
    w = plan.workload
    found: list[_Assumption] = []

    def add(what: str, part: str, field: str, possible: Range | None = None) -> None:
        # a field of one part of the plan, within its range and what the other figures leave
        owner: Workload | Training | EngineConstants = getattr(plan, part)
        ends = ranges_of(type(owner))[field]
        if possible is not None:
            ends = Range(max(ends.least, possible.least), min(ends.most, possible.most), ends.unit)

        def change(value: float) -> Plan:
            return replace(plan, **{part: replace(owner, **{field: value})})

        found.append(_Assumption(what, field, getattr(owner, field), ends, change))

    add("share of the peak that training reaches", "training", "mfu")
    add("tokens of an episode", "workload", "tokens", Range(w.sampled + w.prompt, math.inf, "tokens"))
    add("sampled tokens of an episode", "workload", "sampled", Range(0, w.tokens - w.prompt, "tokens"))
    add("share of the bandwidth that decoding reaches", "constants", "bandwidth_share")
    add("share of the peak that prefill reaches", "constants", "compute_share")
    add("fixed seconds of a decode step", "constants", "step_seconds")
    if w.wait_seconds > 0:
        add("seconds of a tool call", "workload", "tool_seconds")
    if w.length_cv > 0 and plan.lengths is None:
        add("spread of the episode length", "workload", "length_cv")
    if w.zero_advantage > 0:
        add("share of episodes without signal", "workload", "zero_advantage")
    return found
