"""What a run is made of: the shape of its episodes, and how they are generated and trained on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated, Literal, Optional

from typing_extensions import Doc

from agentrl.plan.inputs import Range, check_ranges, flag_of

Schedule = Literal["synchronous", "overlapped"]
Bits = Literal[16, 8, 4]
Logits = Literal["full", "chunked", "recomputed", "actions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The episodes of one optimizer step. A `Plan` checks it."""

    episodes: Annotated[int, Doc("episodes trained on in one optimizer step"), Range(1, 1e7, "episodes")] = (
        512
    )
    tokens: Annotated[float, Doc("tokens of an episode, mean"), Range(1, 1e8, "tokens")] = 24_000
    sampled: Annotated[
        float, Doc("tokens of an episode that the policy samples, mean"), Range(1, 1e8, "tokens")
    ] = 6_000
    prompt: Annotated[float, Doc("tokens of an episode before its first turn"), Range(0, 1e8, "tokens")] = (
        2_000
    )
    turns: Annotated[
        int,
        Doc("model calls of an episode, each followed by a tool call but the last"),
        Range(1, 1e6, "turns"),
    ] = 20
    tool_seconds: Annotated[
        float, Doc("seconds that one tool call takes, mean"), Range(0, 1e6, "seconds")
    ] = 1.0
    length_cv: Annotated[
        float,
        Doc("spread of the episode length after the prompt: deviation over mean"),
        Range(0, 10, "deviation over mean"),
    ] = 0.5
    zero_advantage: Annotated[
        float, Doc("share of the episodes whose group has no signal"), Range(0, 0.999, "share")
    ] = 0.0
    dynamic_sampling: Annotated[bool, Doc("sample more until every trained episode has signal")] = True
    steps: Annotated[int, Doc("optimizer steps of the run"), Range(1, 1e8, "steps")] = 300

    def check(self) -> None:
        """Raise ValueError naming the first figure that cannot be."""
        check_ranges(self)
        if self.sampled > self.tokens:
            raise ValueError(
                f"--sampled ({self.sampled:g}) cannot be more than --tokens ({self.tokens:g}) an episode"
            )
        if self.prompt + self.sampled > self.tokens * (1 + 1e-12):  # measured means round
            raise ValueError(
                f"--prompt ({self.prompt:g}) and --sampled ({self.sampled:g}) cannot be more than --tokens "
                f"({self.tokens:g}) together; lower --prompt"
            )

    @property
    def generated_episodes(self) -> float:
        """Episodes that the engine plays a step: dynamic sampling throws those without signal away."""
        return self.episodes / (1 - self.zero_advantage) if self.dynamic_sampling else float(self.episodes)

    @property
    def wait_seconds(self) -> float:
        """Seconds that an episode waits for its tools."""
        return (self.turns - 1) * self.tool_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """How the engine runs. A `Plan` checks it."""

    batch: Annotated[
        int, Doc("sequences that an engine decodes together at most"), Range(1, 1e6, "sequences")
    ] = 64
    context: Annotated[
        Optional[float],  # noqa: UP045 - `float | None` costs `agentrl plan` a tenth of a second of tyro
        Doc("tokens of context at which decoding is priced; unset: weighted by how long it lives"),
        Range(1, 1e9, "tokens"),
    ] = None
    busy: Annotated[
        float, Doc("share of the time that the engine decodes (first order only)"), Range(1e-3, 1, "share")
    ] = 0.5
    tensor_parallel: Annotated[
        int, Doc("GPUs that one copy of the model is spread over in generation"), Range(1, 1e6, "GPUs")
    ] = 1
    weight_bits: Annotated[Bits, Doc("bits a weight in the engine: 16, 8 or 4")] = 16
    kv_bits: Annotated[Bits, Doc("bits a cached number: 16, 8 or 4")] = 16
    kv_shrink: Annotated[
        float,
        Doc("how many times smaller the cache is than the model's config makes it"),
        Range(1e-2, 1e4, "times"),
    ] = 1.0
    prefix_cache: Annotated[bool, Doc("a turn prefills only what it adds, not its whole context")] = True
    carry_over: Annotated[
        bool, Doc("an unfinished episode goes on in the next step, so that no engine waits for the longest")
    ] = False
    allreduce_seconds: Annotated[
        float, Doc("seconds of one all-reduce; two a layer with tensor parallelism"), Range(0, 10, "seconds")
    ] = 1e-5

    def check(self) -> None:
        """Raise ValueError naming the first setting that cannot be."""
        check_ranges(self)
        for name in ("weight_bits", "kv_bits"):
            if getattr(self, name) not in (4, 8, 16):
                raise ValueError(f"{flag_of(name)} must be 16, 8 or 4, got {getattr(self, name)}")

    @property
    def kv_bytes_each(self) -> float:
        """Bytes a cached number."""
        return self.kv_bits / 8 / self.kv_shrink


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How the trainer runs: fully sharded over its GPUs, bfloat16 products, a float32 master copy and
    Adam."""

    mfu: Annotated[
        float, Doc("share of the peak arithmetic that training reaches"), Range(1e-3, 1, "share")
    ] = 0.4
    old_log_probs: Annotated[bool, Doc("a forward pass for the old policy's log-probs before the update")] = (
        True
    )
    reference: Annotated[bool, Doc("a forward pass of a reference model, kept in memory too")] = False
    microbatch_tokens: Annotated[
        int, Doc("tokens of one packed microbatch on a GPU"), Range(1, 1e9, "tokens")
    ] = 32_768
    checkpointing: Annotated[
        bool, Doc("keep only each layer's input and recompute the layer in backward")
    ] = True
    logits: Annotated[Logits, Doc("where and how logits are held")] = "recomputed"
    chunk_tokens: Annotated[
        int, Doc("tokens whose logits are held at a time, where they are chunked"), Range(1, 1e9, "tokens")
    ] = 1024
    train_memory_share: Annotated[
        float, Doc("share of a GPU's memory that training may fill"), Range(1e-3, 1, "share")
    ] = 0.9
    sync_seconds: Annotated[
        float,
        Doc("seconds to send new weights to the engines and switch over, a step"),
        Range(0, 1e6, "seconds"),
    ] = 5.0

    def check(self) -> None:
        """Raise ValueError naming the first setting that cannot be."""
        check_ranges(self)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Episode lengths relative to their mean, in equal shares: the spread that makes a batch wait for its
    longest.

    Raises ValueError where one is not positive or they do not average to 1.
    """

    relative: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.relative or min(self.relative) <= 0:
            raise ValueError("relative lengths must be positive, and there must be one at least")
        if abs(math.fsum(self.relative) / len(self.relative) - 1) > 1e-9:
            raise ValueError("relative lengths must average to 1")

    @property
    def squared_mean(self) -> float:
        """Mean of the squared relative length: 1 + cv^2."""
        return math.fsum(x * x for x in self.relative) / len(self.relative)


def lognormal_lengths(cv: float, count: int) -> Lengths:
    """`count` equal shares of a log-normal distribution of mean 1 and coefficient of variation `cv`.

    >>> lognormal_lengths(0.0, 3).relative
    (1.0, 1.0, 1.0)
    >>> round(max(lognormal_lengths(0.5, 64).relative), 2)
    2.81
    """
    if cv < 0 or count < 1:
        raise ValueError(f"need cv >= 0 and count >= 1, got {cv} and {count}")
    if cv == 0:
        return Lengths((1.0,) * count)
    sigma = math.sqrt(math.log1p(cv * cv))
    normal = NormalDist()
    raw = [math.exp(sigma * normal.inv_cdf((i + 0.5) / count)) for i in range(count)]
    return _scaled(raw)


def measured_lengths(lengths: Sequence[float], count: int) -> Lengths:
    """`count` equal shares of measured episode lengths, relative to their mean; the longest stays the
    longest."""
    if not lengths or min(lengths) <= 0 or count < 1:
        raise ValueError("need at least one measured length, all of them positive")
    ordered = sorted(lengths)
    top = len(ordered) - 1
    return _scaled(
        [ordered[round(top * (i / (count - 1)))] if count > 1 else ordered[top // 2] for i in range(count)]
    )


def _scaled(raw: Sequence[float]) -> Lengths:
    mean = math.fsum(raw) / len(raw)
    return Lengths(tuple(x / mean for x in raw))
