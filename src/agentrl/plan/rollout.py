"""The time to play a step's episodes on one engine: a full batch, then the tail, with tools to wait for."""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

from agentrl.plan.engine import Engine
from agentrl.plan.workload import Generation, Lengths, Workload

_MOST_IN_FLIGHT = 64  # more sequences are played in equal groups
_MOST_ITEMS = 256  # of them are played one by one, the last ones; those before go at a full batch's pace


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What one engine does in a step; its replicas all do the same."""

    seconds: float  # until its last episode ends
    decode_seconds: float  # of them: decoding, at the full batch's speed
    prefill_seconds: float  # of them: prefill, likewise
    batch: float  # sequences in flight while there are enough
    decoding: float  # of those, how many decode at a time; the others wait for their tools
    context: float  # tokens, mean over the sequences' life
    sequences_that_fit: float  # at that context
    tokens_per_second: float  # sampled, with a full batch, prefill and tools included

    @property
    def waiting_seconds(self) -> float:
        """Seconds lost to tools and to the tail."""
        return max(0.0, self.seconds - self.decode_seconds - self.prefill_seconds)

    @property
    def busy(self) -> float:
        """Share of the time that is not lost."""
        return 1 - self.waiting_seconds / self.seconds


def lifetime_context(workload: Workload, lengths: Lengths) -> float:
    """Context (tokens) weighted by how long it lives: long episodes decode longer, on longer contexts.

    An episode grows evenly from its prompt by m x tokens, x its relative length; over its decode steps the
    context is prompt + m x / 2, and episode x has steps in proportion to x: prompt + m E[x^2] / 2.
    """
    return workload.prompt + (workload.tokens - workload.prompt) * lengths.squared_mean / 2


def prefill_tokens(workload: Workload, prefix_cache: bool) -> float:
    """Tokens that an episode prefills: what it did not sample, once; without a prefix cache the context, each
    turn."""
    once = workload.tokens - workload.sampled
    if prefix_cache:
        return once
    grown = workload.tokens - workload.prompt
    return max(once, workload.turns * workload.prompt + grown * (workload.turns - 1) / 2)


def play(
    engine: Engine, workload: Workload, generation: Generation, lengths: Lengths, num_engines: int
) -> Rollout:
    """The rollout of one of `num_engines` engines, each with its share of the generated episodes.

    `batch` slots, or as many as the cache holds, take the next episode when one ends. While b sequences
    decode, a step takes engine.step_seconds(b); a sequence spends its tools' time out of the batch, so of A
    in flight b = A t / (t + w) decode, with w seconds of tools a sampled token. When no episode is left the
    batch drains, unless unfinished episodes carry over to the next step.

    Raises ValueError where not even one episode fits the cache.
    """
    if num_engines < 1:
        raise ValueError(f"need at least one engine, got {num_engines}")
    context = generation.context or lifetime_context(workload, lengths)
    fit = engine.max_sequences(context)
    if fit < 1:
        cause = "--context" if generation.context else "from --tokens and --length-cv"
        raise ValueError(
            f"a sequence of {context:,.0f} tokens ({cause}) does not fit the cache of "
            f"{engine.tensor_parallel} x {engine.gpu.name} ({engine.pool_bytes / 1e9:.1f} GB, {fit:.2g} of "
            "one); raise --tensor-parallel (up to --gpus), or lower --kv-bits or --weight-bits"
        )
    prefill = prefill_tokens(workload, generation.prefix_cache) / workload.sampled
    wait = workload.wait_seconds / workload.sampled
    episodes = workload.generated_episodes / num_engines
    slots = min(generation.batch, math.floor(fit), max(1, math.ceil(episodes)))
    # without a tail, engines share what is left over: on average each has its share of the episodes in flight
    flying = min(slots, max(1.0, episodes)) if generation.carry_over else float(slots)
    decode_seconds = engine.decode_pace(context)
    prefill_seconds = prefill * engine.prefill_seconds_per_token(context)  # beside a sampled token

    def step_seconds(decoding: float) -> float:
        return decode_seconds(decoding) + decoding * prefill_seconds

    def per_token(active: float) -> float:
        # seconds between two tokens of one sequence, its tools included
        decoding, step = active, 0.0  # the map is a contraction: a step grows less than in proportion
        for _ in range(50):
            step = step_seconds(decoding)
            trial = active * step / (step + wait)
            if abs(trial - decoding) < 1e-6 * active:
                break
            decoding = trial
        return step + wait

    first = per_token(flying)
    sampled = episodes * workload.sampled
    if generation.carry_over:
        seconds = sampled * first / flying
    else:
        seconds = drain_seconds(workload.sampled, lengths, episodes, slots, per_token)
    return Rollout(
        seconds=seconds,
        decode_seconds=sampled * decode_seconds(flying) / flying,
        prefill_seconds=sampled * prefill_seconds,
        batch=flying,
        decoding=flying * (first - wait) / first,
        context=context,
        sequences_that_fit=fit,
        tokens_per_second=flying / first,
    )


def drain_seconds(
    sampled: float, lengths: Lengths, episodes: float, slots: int, per_token: Callable[[float], float]
) -> float:
    """Seconds until the last of `episodes` ends, `slots` at a time, all in flight going at the same pace."""
    width = min(slots, _MOST_IN_FLIGHT)  # items in flight, which stand for `slots` episodes
    num_items = min(max(1, math.ceil(episodes * width / slots)), _MOST_ITEMS)
    last = min(episodes, num_items * slots / width)
    weight = last / num_items  # episodes that an item stands for
    # spread over the quantiles, in an order in which long and short come mixed
    order = sorted(range(num_items), key=lambda i: (i * 0.6180339887498949) % 1)
    relative = lengths.relative
    todo = [sampled * relative[(2 * i + 1) * len(relative) // (2 * num_items)] for i in order]
    scale = last * sampled / (weight * math.fsum(todo))  # a sample of the quantiles keeps the mean
    ends: list[float] = []  # heap of the progress, in tokens of a sequence, at which those in flight end
    pace: dict[int, float] = {}
    progress, seconds = 0.0, (episodes - last) * sampled * per_token(slots) / slots
    while todo or ends:
        while todo and len(ends) < width:
            heapq.heappush(ends, progress + scale * todo.pop())
        active = len(ends)
        if active not in pace:
            pace[active] = per_token(min(float(slots), active * weight))
        seconds += (ends[0] - progress) * pace[active]
        progress = heapq.heappop(ends)
    return seconds
