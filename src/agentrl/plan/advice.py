"""What would save most, and which assumption moves the answer most: the estimate with one thing changed."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from agentrl.plan.hours import Plan, calibrated
from agentrl.plan.workload import lognormal_lengths


@dataclass(frozen=True, slots=True)
class Saving:
    """One change, and the GPU-hours of the run that it saves."""

    change: str
    flags: str
    saved_gpu_hours: float


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """One assumption, and the run's GPU-hours at half and at double its value (or as near as it can be)."""

    assumption: str
    flag: str
    value: float
    low: float
    high: float
    gpu_hours_at_low: float
    gpu_hours_at_high: float

    def swing(self, gpu_hours: float) -> float:
        """The larger of the two distances from the estimate, in GPU-hours."""
        return max(abs(self.gpu_hours_at_low - gpu_hours), abs(self.gpu_hours_at_high - gpu_hours))


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
    if plan.gpus % wider == 0:
        add(f"engines of {wider} GPUs", f"--tensor-parallel {wider}", replace(
            plan, generation=replace(g, tensor_parallel=wider)))  # fmt: skip
    if plan.schedule == "synchronous":
        add("generate while training", "--schedule overlapped", replace(plan, schedule="overlapped"))
    return found


def uncertainties(plan: Plan, count: int = 2) -> list[Uncertainty]:
    """The assumptions that move the run's GPU-hours most at half and double their value, largest first."""
    now = calibrated(plan).run_gpu_hours
    found: list[Uncertainty] = []
    for assumption, flag, value, least, most, change in _assumptions(plan):
        low, high = max(value / 2, least), min(2 * value, most)
        at_low, at_high = run_gpu_hours(change(low)), run_gpu_hours(change(high))
        if math.isfinite(at_low) and math.isfinite(at_high):
            found.append(Uncertainty(assumption, flag, value, low, high, at_low, at_high))
    return sorted(found, key=lambda item: -item.swing(now))[:count]


_Change = Callable[[float], Plan]


def _assumptions(plan: Plan) -> list[tuple[str, str, float, float, float, _Change]]:
    # (what, flag, value, least, most, the plan with another value)
    w, t, c = plan.workload, plan.training, plan.constants
    known: list[tuple[str, str, float, float, float, _Change]] = [
        ("share of the peak that training reaches", "--mfu", t.mfu, 0.0, 1.0,
         lambda v: replace(plan, training=replace(t, mfu=v))),
        ("tokens of an episode", "--tokens", w.tokens, w.sampled + w.prompt, math.inf,
         lambda v: replace(plan, workload=replace(w, tokens=v))),
        ("sampled tokens of an episode", "--sampled", w.sampled, 0.0, w.tokens - w.prompt,
         lambda v: replace(plan, workload=replace(w, sampled=v))),
        ("share of the bandwidth that decoding reaches", "--bandwidth-share", c.bandwidth_share, 0.0, 1.0,
         lambda v: replace(plan, constants=replace(c, bandwidth_share=v))),
        ("share of the peak that prefill reaches", "--compute-share", c.compute_share, 0.0, 1.0,
         lambda v: replace(plan, constants=replace(c, compute_share=v))),
        ("fixed seconds of a decode step", "--step-seconds", c.step_seconds, 0.0, math.inf,
         lambda v: replace(plan, constants=replace(c, step_seconds=v))),
    ]  # fmt: skip
    if w.wait_seconds > 0:
        known.append(("seconds of a tool call", "--tool-seconds", w.tool_seconds, 0.0, math.inf,
                      lambda v: replace(plan, workload=replace(w, tool_seconds=v))))  # fmt: skip
    if w.length_cv > 0 and plan.lengths is None:
        known.append(("spread of the episode length", "--length-cv", w.length_cv, 0.0, math.inf,
                      lambda v: replace(plan, lengths=lognormal_lengths(v, 64))))  # fmt: skip
    if w.zero_advantage > 0:
        known.append(("share of episodes without signal", "--zero-advantage", w.zero_advantage, 0.0, 0.95,
                      lambda v: replace(plan, workload=replace(w, zero_advantage=v))))  # fmt: skip
    return known
