"""What `agentrl plan` has worked out, as text for the terminal and as JSON for programs."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from agentrl.plan.advice import Saving, Uncertainty
from agentrl.plan.hours import Estimate, Plan
from agentrl.plan.memory import LOGITS, Memory, largest_microbatch, training_memory
from agentrl.plan.models import logits_bytes
from agentrl.plan.rollout import lifetime_context
from agentrl.plan.roofline import StepHours, decode_tokens_per_second, train_tokens_per_second

GB = 1e9


@dataclass(frozen=True, slots=True)
class Assumption:
    """One assumption: its flag, its value, what it means, and whether it was given, measured or assumed."""

    flag: str
    value: float | int | str
    meaning: str
    origin: str


@dataclass(frozen=True, slots=True)
class MemoryVariant:
    """One way to hold logits and activations, its memory, and the largest microbatch (tokens) that fits."""

    name: str
    memory: Memory
    largest_microbatch: int


@dataclass(frozen=True, slots=True)
class Rate:
    """A speed on one GPU, by both estimates; the unit is in the name."""

    name: str
    first_order: float
    calibrated: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Everything that the command has worked out."""

    plan: Plan
    first_order: StepHours
    estimates: list[Estimate]  # synchronous, then overlapped where it is possible
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
            Rate("decode, tokens/s", decode, alone / ways),
            Rate("decode with idle time, prefill and tools, tokens/s", decode * p.generation.busy,
                 rollout.tokens_per_second / ways),
            Rate("train, tokens/s", train, self.chosen.train_tokens_per_second),
        ]  # fmt: skip

    def notes(self) -> list[str]:
        """What the reader must know about the numbers."""
        p, rollout = self.plan, self.chosen.rollout
        found: list[str] = []
        if rollout.sequences_that_fit < p.generation.batch:
            ways = p.generation.tensor_parallel
            where = f"{ways} x {p.gpu.name}" if ways > 1 else f"one {p.gpu.name}"
            found.append(
                f"A batch of {p.generation.batch} at {self.context:,.0f} tokens does not fit the cache of "
                f"{where}: about {rollout.sequences_that_fit:.0f} do. The first order ignores that; the "
                f"calibrated estimate decodes {rollout.batch:.0f}."
            )
        elif rollout.batch < p.generation.batch:
            found.append(
                f"An engine has only {rollout.batch:.0f} episodes to play, fewer than the batch of "
                f"{p.generation.batch}."
            )
        if self.context > p.workload.tokens:
            found.append(
                f"--context ({self.context:,.0f}) is more than an episode's {p.workload.tokens:,.0f} tokens."
            )
        if len(self.estimates) < 2:
            found.append("An overlapped schedule is left out: it does not fit these GPUs.")
        found.append(f"Engine: {p.constants.name}; assumed to hold for this model and GPU.")
        return found

    def headline(self) -> str:
        """The run in one line."""
        p, w = self.plan, self.plan.workload
        return (
            f"{p.shape.name} on {p.gpus} x {p.gpu.name}: {w.episodes:,} episodes of {w.tokens:,.0f} tokens "
            f"({w.sampled:,.0f} sampled) a step, {w.steps:,} steps"
        )


def hours_table(answer: Answer) -> list[list[str]]:
    """Rows of text, the columns' names first: what a step and the run take, by estimate."""
    first, estimates = answer.first_order, answer.estimates
    num_steps, gpus = answer.plan.workload.steps, answer.plan.gpus
    steps = [first, *(e.step_hours for e in estimates)]
    seconds = [first.total * 3600 / gpus, *(e.step_seconds for e in estimates)]
    rows = [["GPU-hours a step", "first order", *(f"calibrated, {e.schedule}" for e in estimates)]]
    for name, _ in first.items():
        rows.append(
            [name.replace("_log", " log").replace("_", "-"), *(f"{getattr(s, name):.2f}" for s in steps)]
        )
    rows.append(["sum", *(f"{s.total:.2f}" for s in steps)])
    rows.append([f"GPU-hours, {num_steps:,} steps", *(f"{num_steps * s.total:,.0f}" for s in steps)])
    rows.append(["share of decode", *(f"{s.decode_share:.0%}" for s in steps)])
    rows.append(["seconds a step", *(f"{s:,.0f}" for s in seconds)])
    rows.append([f"days, {num_steps:,} steps", *(f"{num_steps * s / 86400:.1f}" for s in seconds)])
    rows.append(["time that engines are busy", f"{answer.plan.generation.busy:.0%}",
                 *(f"{e.rollout.busy:.0%}" for e in estimates)])  # fmt: skip
    rows.append(["GPUs that generate, that train", "", *(
        f"{e.generation_gpus}, {e.train_gpus}" for e in estimates)])  # fmt: skip
    return rows


def saving_rows(answer: Answer) -> list[tuple[str, str, str]]:
    """(change, flags, what it saves over the run), best first."""
    total = answer.chosen.run_gpu_hours
    return [
        (s.change, s.flags, f"{s.saved_gpu_hours:,.0f} GPU-hours, {s.saved_gpu_hours / total:.0%}")
        for s in answer.savings
    ]


def uncertainty_rows(answer: Answer) -> list[tuple[str, str, str]]:
    """(assumption, flag with half and double, the run's GPU-hours at both), largest first."""
    return [
        (
            u.assumption,
            f"{u.flag} {shown(u.low)} or {shown(u.high)}",
            f"{u.gpu_hours_at_low:,.0f} or {u.gpu_hours_at_high:,.0f} GPU-hours",
        )
        for u in answer.uncertainties
    ]


def shown(value: float | int | str) -> str:
    """A value as it can be typed again.

    >>> shown(24000.0), shown(0.4), shown("yes")
    ('24000', '0.4', 'yes')
    """
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.4g}"


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
    rates = [[r.name, f"{r.first_order:,.0f}", f"{r.calibrated:,.0f}"] for r in answer.rates()]
    parts = [*answer.memory.items(), ("total", answer.memory.total)]
    variants = [
        [v.name, f"{v.memory.total / GB:.1f}", f"{v.largest_microbatch:,}"] for v in answer.memory_variants()
    ]
    lines = [
        answer.headline(),
        "",
        *_aligned(hours_table(answer)),
        "",
        *_aligned([["one GPU", "first order", "calibrated"], *rates]),
        "",
        *answer.notes(),
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
        f"What moves the answer ({answer.chosen.run_gpu_hours:,.0f} GPU-hours) most, at half and at double:",
        *(f"  {what} ({flags}): {hours}" for what, flags, hours in uncertainty_rows(answer)),
        "",
        "Assumptions, each with its flag:",
        *(f"  {f'{a.flag} {shown(a.value)}':<32}{a.origin:<10}{a.meaning}" for a in answer.assumptions),
    ]
    return "\n".join(line.rstrip() for line in lines)


def as_json(answer: Answer) -> dict[str, Any]:
    """The answer for programs; units end every name."""
    p = answer.plan
    return {
        "model": p.shape.name,
        "gpu": p.gpu.name,
        "gpu_source": p.gpu.source,
        "gpus": p.gpus,
        "engine": p.constants.name,
        "context_tokens": answer.context,
        "first_order": _hours_json(answer.first_order, p.workload.steps),
        "calibrated": [
            {
                "schedule": e.schedule,
                **_hours_json(e.step_hours, e.steps),
                "step_seconds": e.step_seconds,
                "generation_gpus": e.generation_gpus,
                "train_gpus": e.train_gpus,
                "train_tokens_per_second_per_gpu": e.train_tokens_per_second,
                "rollout": {**asdict(e.rollout), "busy_share": e.rollout.busy},
            }
            for e in answer.estimates
        ],
        "rates": [asdict(rate) for rate in answer.rates()],
        "kv_bytes_per_token": p.shape.kv_bytes_per_token(p.generation.kv_bytes_each),
        "fixed_bytes_per_sequence": p.shape.fixed_sequence_bytes(p.generation.kv_bytes_each),
        "logits_bytes_per_token": logits_bytes(1, p.shape.vocab_size),
        "memory_bytes": {**dict(answer.memory.items()), "total": answer.memory.total},
        "memory_limit_bytes": answer.memory_limit_bytes,
        "largest_microbatch_tokens": answer.largest_microbatch,
        "memory_variants": [
            {
                "name": v.name,
                "memory_bytes": {**dict(v.memory.items()), "total": v.memory.total},
                "largest_microbatch_tokens": v.largest_microbatch,
            }
            for v in answer.memory_variants()
        ],
        "savings": [asdict(saving) for saving in answer.savings],
        "uncertainties": [asdict(uncertainty) for uncertainty in answer.uncertainties],
        "notes": answer.notes(),
        "assumptions": [asdict(assumption) for assumption in answer.assumptions],
    }


def _hours_json(hours: StepHours, steps: int) -> dict[str, Any]:
    return {
        "step_gpu_hours": {**dict(hours.items()), "total": hours.total},
        "run_gpu_hours": steps * hours.total,
        "decode_share": hours.decode_share,
    }
