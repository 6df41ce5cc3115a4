"""What `agentrl plan` has worked out, and the same as text for the terminal."""

import math
from dataclasses import dataclass, replace

from agentrl.plan.advice import Saving, Trial, Uncertainty
from agentrl.plan.hours import Estimate, Plan
from agentrl.plan.memory import LOGITS, Memory, largest_microbatch, training_memory
from agentrl.plan.models import logits_bytes
from agentrl.plan.rollout import lifetime_context
from agentrl.plan.roofline import StepHours, decode_tokens_per_second, train_tokens_per_second

GB = 1e9


@dataclass(frozen=True, slots=True)
class Assumption:
    """One assumption: its flag, value and unit, what it means, and where it comes from."""

    flag: str
    value: float | int | str
    unit: str  # "" where the value is no number
    meaning: str
    origin: str  # given, measured, assumed, or engine


@dataclass(frozen=True, slots=True)
class MemoryVariant:
    """One way to hold logits and activations, its memory, and the largest microbatch (tokens) that fits."""

    name: str
    memory: Memory
    largest_microbatch: int


@dataclass(frozen=True, slots=True)
class Rate:
    """A speed on one GPU, by both estimates."""

    name: str
    first_order_tokens_per_second: float
    calibrated_tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Everything that the command has worked out."""

    plan: Plan
    first_order: StepHours
    estimates: list[Estimate]  # synchronous, then overlapped where it is possible
    notes: list[str]  # what the reader must know about the numbers
    savings: list[Saving]
    uncertainties: list[Uncertainty]
    assumptions: list[Assumption]

    @property
    def chosen(self) -> Estimate:
        """The estimate of the schedule that was asked for."""
        return next(e for e in self.estimates if e.schedule == self.plan.schedule)

    @property
    def context(self) -> float:
        """Tokens of context at which decoding is priced."""
        return self.plan.generation.context or lifetime_context(self.plan.workload, self.plan.spread)

    @property
    def memory_limit_bytes(self) -> float:
        """Bytes of a GPU that training may fill."""
        return self.plan.gpu.memory_bytes * self.plan.training.train_memory_share

    @property
    def memory(self) -> Memory:
        """Memory of one of the GPUs that train."""
        p = self.plan
        return training_memory(p.shape, self.chosen.train_gpus, p.training, p.action_share)

    @property
    def largest_microbatch(self) -> int:
        """Tokens of the largest microbatch that fits such a GPU."""
        p = self.plan
        return largest_microbatch(p.shape, p.gpu, self.chosen.train_gpus, p.training, p.action_share)

    def memory_variants(self) -> list[MemoryVariant]:
        """Each way to hold logits, with and without activation checkpointing."""
        p, gpus = self.plan, self.chosen.train_gpus
        found: list[MemoryVariant] = []
        for checkpointing in (True, False):
            kept = "activations recomputed" if checkpointing else "activations kept"
            for logits in LOGITS:
                trial = replace(p.training, checkpointing=checkpointing, logits=logits)
                memory = training_memory(p.shape, gpus, trial, p.action_share)
                largest = largest_microbatch(p.shape, p.gpu, gpus, trial, p.action_share)
                found.append(MemoryVariant(f"{kept}, logits {logits}", memory, largest))
        return found

    def rates(self) -> list[Rate]:
        """Speeds on one GPU."""
        p, rollout = self.plan, self.chosen.rollout
        size = p.shape.nominal_parameters
        multiplying = p.shape.active_parameters if p.shape.experts else size
        kv = p.shape.kv_bytes_per_token(p.generation.kv_bytes_each)
        decode = decode_tokens_per_second(
            size,
            kv,
            p.gpu.bytes_per_second,
            p.generation.batch,
            self.context,
            p.generation.weight_bits / 8,
        )
        train = train_tokens_per_second(multiplying, p.gpu.flops_per_second, p.training.mfu)
        ways = p.generation.tensor_parallel
        alone = rollout.batch / p.engine.decode_seconds(rollout.batch, rollout.context)
        return [
            Rate("decode", decode, alone / ways),
            Rate("decode with idle time, prefill and tools", decode * p.generation.busy,
                 rollout.tokens_per_second / ways),
            Rate("train", train, self.chosen.train_tokens_per_second),
        ]  # fmt: skip

    def headline(self) -> str:
        """The run in one line."""
        p, w = self.plan, self.plan.workload
        return (
            f"{p.shape.name} on {p.gpus} x {p.gpu.name}: {w.episodes:,} episodes of {w.tokens:,.0f} tokens "
            f"({w.sampled:,.0f} sampled) a step, {_steps(w.steps)}"
        )


def hours_table(answer: Answer) -> list[list[str]]:
    """Rows of text, the columns' names first: what a step and the run take, by estimate."""
    first, estimates = answer.first_order, answer.estimates
    num_steps, gpus = answer.plan.workload.steps, answer.plan.gpus
    steps = [first, *(e.step_hours for e in estimates)]
    digits = max(2, *(2 - math.floor(math.log10(s.total)) for s in steps))  # three that count, in each column
    seconds = [first.total * 3600 / gpus, *(e.step_seconds for e in estimates)]
    rows = [["GPU-hours a step", "first order", *(f"calibrated, {e.schedule}" for e in estimates)]]
    for name, _ in first.items():
        rows.append(
            [
                name.replace("_log", " log").replace("_", "-"),
                *(f"{getattr(s, name):.{digits}f}" for s in steps),
            ]
        )
    rows.append(["sum", *(f"{s.total:.{digits}f}" for s in steps)])
    rows.append([f"GPU-hours, {_steps(num_steps)}", *(amount(num_steps * s.total) for s in steps)])
    rows.append(["share of decode", *(f"{s.decode_share:.0%}" for s in steps)])
    rows.append(["seconds a step", *(amount(s) for s in seconds)])
    rows.append([f"days, {_steps(num_steps)}", *(amount(num_steps * s / 86400) for s in seconds)])
    rows.append(["time that engines are busy", f"{answer.plan.generation.busy:.0%}",
                 *(f"{e.rollout.busy:.0%}" for e in estimates)])  # fmt: skip
    rows.append(["GPUs that generate, that train", "", *(
        f"{e.generation_gpus}, {e.train_gpus}" for e in estimates)])  # fmt: skip
    return rows


def _steps(count: int) -> str:
    return f"{count:,} step{'s' if count > 1 else ''}"


def rate_rows(answer: Answer) -> list[tuple[str, str, str]]:
    """(rate on one GPU, first order, calibrated), tokens/s; the columns' names first."""
    found = [("one GPU, tokens/s", "first order", "calibrated")]
    for rate in answer.rates():
        first, second = rate.first_order_tokens_per_second, rate.calibrated_tokens_per_second
        found.append((rate.name, amount(first), amount(second)))
    return found


def saving_rows(answer: Answer) -> list[tuple[str, str, str]]:
    """(change, flags, what it saves over the run), best first."""
    total = answer.chosen.run_gpu_hours
    return [
        (s.change, s.flags, f"{amount(s.saved_gpu_hours)} GPU-hours, {s.saved_gpu_hours / total:.1%}")
        for s in answer.savings
    ]


def uncertainty_rows(answer: Answer) -> list[tuple[str, str, str]]:
    """(assumption, flag with less and more of it, the run's GPU-hours at both), largest first."""
    return [
        (
            u.assumption,
            f"{u.flag} {shown(u.low.value)}, {u.low.how}, or {shown(u.high.value)}, {u.high.how}",
            _either(u.low, u.high),
        )
        for u in answer.uncertainties
    ]


def _either(low: Trial, high: Trial) -> str:
    if math.isfinite(low.gpu_hours) and math.isfinite(high.gpu_hours):
        return f"{amount(low.gpu_hours)} or {amount(high.gpu_hours)} GPU-hours"
    hours = [t.gpu_hours for t in (low, high)]
    return " or ".join(f"{amount(h)} GPU-hours" if math.isfinite(h) else "not possible" for h in hours)


def shown(value: float | int | str) -> str:
    """A value as it can be typed again.

    >>> shown(24000.0), shown(0.4), shown("yes")
    ('24000', '0.4', 'yes')
    """
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.4g}"


def amount(value: float) -> str:
    """An amount with three digits that count, or to the unit.

    >>> amount(1234.5), amount(2.5349), amount(0.00042)
    ('1,234', '2.53', '0.00042')
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _aligned(rows: list[list[str]]) -> list[str]:
    # the first column to the left, the others to the right
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def as_text(answer: Answer) -> str:
    """The answer for a terminal."""
    p = answer.plan
    one = logits_bytes(1, p.shape.vocab_size)
    tokens = p.training.microbatch_tokens
    parts = [*answer.memory.items(), ("total", answer.memory.total)]
    variants = [
        [v.name, f"{v.memory.total / GB:.1f}", f"{v.largest_microbatch:,}"] for v in answer.memory_variants()
    ]
    lines = [
        answer.headline(),
        "",
        *_aligned(hours_table(answer)),
        "",
        *_aligned([list(row) for row in rate_rows(answer)]),
        "",
        *answer.notes,
        "",
        f"Memory of each of {answer.chosen.train_gpus} training GPUs, GB, at {tokens:,} tokens a microbatch:",
        *_aligned([[f"  {name}", f"{value / GB:.1f}"] for name, value in parts]),
        f"Training may fill {answer.memory_limit_bytes / GB:.1f} GB. Float32 logits take {one / 1e6:.2f} MB "
        f"a token, {one * tokens / GB:.1f} GB for all of them.",
        f"Largest microbatch that fits: {answer.largest_microbatch:,} tokens, the token budget to set.",
        "",
        *_aligned([["held in memory", "GB", "largest microbatch, tokens"], *variants]),
        "",
        "What would save most, each alone:",
        *(f"  {what} ({flags}): {saved}" for what, flags, saved in saving_rows(answer)),
        "",
        f"What moves the answer ({amount(answer.chosen.run_gpu_hours)} GPU-hours) most:",
        *(f"  {what} ({flags}): {hours}" for what, flags, hours in uncertainty_rows(answer)),
        "",
        "Assumptions, each with its flag:",
        *(f"  {f'{a.flag} {shown(a.value)}':<32}{a.origin:<10}{a.meaning}" for a in answer.assumptions),
    ]
    return "\n".join(line.rstrip() for line in lines)
