"""An inference engine on GPUs: what a decode step and a prefill take, and how many sequences its cache holds.

The first-order roofline takes bytes over bandwidth. The calibrated one adds what an engine measurably costs:

    step = step_seconds + b * sequence_seconds
         + max(bytes / (bandwidth_share * B), FLOPs / (compute_share * P))

for b sequences on a GPU with B bytes/s and P FLOP/s; prefill runs at compute_share * P and holds up the
decode steps that it shares the GPU with. The four constants are fitted to measurements (`calibrate`).
"""

import math
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any

from agentrl.plan.gpus import Gpu
from agentrl.plan.inputs import Range, check_ranges, parse_text, ranges_of
from agentrl.plan.models import ModelShape, check_positive

_MOST_UTILIZATION = 0.95  # that engines are run at


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConstants:
    """What one engine version costs beyond the roofline; assumed to hold for other GPUs and models too."""

    name: str  # engine and version, and what it was measured on
    # fixed time of a decode step: scheduling, launches, sampling
    step_seconds: Annotated[float, Range(1e-12, 100, "seconds")]
    # time that each sequence of a step adds
    sequence_seconds: Annotated[float, Range(1e-12, 100, "seconds")]
    # shares of the peak that decoding and prefill reach; above 1 where the peak is understated
    bandwidth_share: Annotated[float, Range(1e-4, 2, "share")]
    compute_share: Annotated[float, Range(1e-4, 2, "share")]
    # memory of the runtime outside weights and cache, a GPU
    overhead_bytes: Annotated[float, Range(0, 1e15, "bytes")] = 0.0
    # share of the GPU's memory that the engine takes
    memory_utilization: Annotated[float, Range(1e-3, 1, "share")] = 0.9

    def __post_init__(self) -> None:
        check_ranges(self)
        if not (self.name.strip() and self.name.isprintable()):
            raise ValueError(f"an engine's name (--name) must be printable text, got {self.name!r}")


def constants_from_toml(text: str, file: str = "the engine file") -> EngineConstants:
    """Constants from the TOML text that `agentrl plan calibrate` writes.

    Raises ValueError, naming the file and the key, for unknown or missing keys and for wrong values.
    """
    values: dict[str, Any] = parse_text(text, tomllib.loads, "TOML", file)
    ranges = ranges_of(EngineConstants)
    unknown = sorted(set(values) - {"name", *ranges})
    if unknown:
        raise ValueError(f"{file} has unknown keys {unknown}; the keys are {['name', *ranges]}")
    required = [entry.name for entry in fields(EngineConstants) if entry.default is MISSING]
    missing = [key for key in required if key not in values]
    if missing:
        raise ValueError(
            f"{file} lacks the keys {missing}; `agentrl plan calibrate --output` writes them all"
        )
    if not isinstance(values["name"], str):
        raise ValueError(f"{file}: name must be text, got {values['name']!r}")
    for key, wanted in ranges.items():
        value = values.get(key, wanted.least)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{file}: {key} must be a number, got {value!r}")
        wanted.check(f"{file}: {key}", value)
    return EngineConstants(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One replica of a model on `tensor_parallel` GPUs.

    Raises ValueError where the weights leave no room for a cache.
    """

    shape: ModelShape
    gpu: Gpu
    constants: EngineConstants
    tensor_parallel: int = 1
    weight_bytes_each: float = 2.0
    kv_bytes_each: float = 2.0  # bytes a cached number; a cache four times smaller is a quarter of it
    allreduce_seconds: float = 1e-5  # one all-reduce; a layer has two with tensor parallelism

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1:
            raise ValueError(f"tensor_parallel must be at least 1, got {self.tensor_parallel}")
        check_positive(weight_bytes_each=self.weight_bytes_each, kv_bytes_each=self.kv_bytes_each)
        if not self.allreduce_seconds >= 0:
            raise ValueError(f"allreduce_seconds must not be negative, got {self.allreduce_seconds}")
        if self.pool_bytes <= 0:
            raise ValueError(self._why_nothing_is_left())

    def _why_nothing_is_left(self) -> str:
        c, ways = self.constants, self.tensor_parallel
        taken = self.gpu.memory_bytes * c.memory_utilization
        weights = self.shape.weight_bytes(self.weight_bytes_each)
        if c.overhead_bytes >= taken:
            remedy = "lower --overhead-bytes or raise --memory-utilization"
        elif weights < ways * (_MOST_UTILIZATION * self.gpu.memory_bytes - c.overhead_bytes):
            remedy = "raise --memory-utilization or --tensor-parallel (up to --gpus)"
        else:
            remedy = "raise --tensor-parallel (up to --gpus)" + (
                ", or use --weight-bits 8" if self.weight_bytes_each > 1 else ""
            )
        overhead, name = c.overhead_bytes / 1e9, self.shape.name
        return (
            f"{name} does not fit: {weights / 1e9:.1f} GB of weights and {overhead:.1f} GB of overhead a GPU "
            f"leave no cache in the {ways * taken / 1e9:.1f} GB that an engine takes of {ways} x "
            f"{self.gpu.name}; {remedy}"
        )

    @property
    def pool_bytes(self) -> float:
        """Bytes left for the cache, over the replica's GPUs."""
        usable = self.gpu.memory_bytes * self.constants.memory_utilization - self.constants.overhead_bytes
        return usable * self.tensor_parallel - self.shape.weight_bytes(self.weight_bytes_each)

    @property
    def _kv_copies(self) -> float:
        # a rank cannot hold less than one key-value head, and every rank holds the whole latent
        heads = 1 if self.shape.latent is not None else self.shape.num_kv_heads
        return max(1.0, self.tensor_parallel / heads)

    def sequence_bytes(self, context: float) -> float:
        """Bytes of the pool that a sequence of `context` tokens takes, with its copies on several GPUs."""
        return self.shape.sequence_bytes(context, self.kv_bytes_each) * self._kv_copies

    def max_sequences(self, context: float) -> float:
        """How many sequences of `context` tokens (their mean over their life) the pool holds at a time."""
        held = self.sequence_bytes(context)
        return self.pool_bytes / held if held > 0 else math.inf

    def decode_pace(self, context: float) -> Callable[[float], float]:
        """Sequences -> seconds of one decode step of so many on `context` tokens each, without prefill.

        What their number does not change is worked out once.
        """
        c, ways, shape = self.constants, self.tensor_parallel, self.shape
        cache = self.sequence_bytes(context)
        flops = 2 * shape.active_parameters + shape.decode_flops_per_token(context)
        bytes_per_second = ways * c.bandwidth_share * self.gpu.bytes_per_second
        flops_per_second = ways * c.compute_share * self.gpu.flops_per_second
        reduce = 2 * shape.num_layers * self.allreduce_seconds if ways > 1 else 0.0
        dense = None if shape.experts else shape.read_parameters(1)

        def seconds(batch: float) -> float:
            weights = shape.read_parameters(batch) if dense is None else dense
            read = weights * self.weight_bytes_each + batch * cache
            bound = max(read / bytes_per_second, batch * flops / flops_per_second)
            return c.step_seconds + bound + batch * c.sequence_seconds + reduce

        return seconds

    def decode_seconds(self, batch: float, context: float) -> float:
        """Seconds of one decode step of `batch` sequences on `context` tokens each, without prefill."""
        return self.decode_pace(context)(batch)

    def prefill_seconds_per_token(self, context: float) -> float:
        """Seconds a prefilled token takes when it reads `context` earlier tokens on average."""
        flops = 2 * self.shape.active_parameters + self.shape.decode_flops_per_token(context)
        if self.shape.latent is not None:  # prefill does not absorb the projections
            flops = self.shape.forward_flops_per_token(2 * context)
        return flops / (self.constants.compute_share * self.gpu.flops_per_second * self.tensor_parallel)

    def step_seconds(
        self, batch: float, context: float, prefill_tokens: float, prefill_context: float
    ) -> float:
        """Seconds of a decode step that also prefills `prefill_tokens` tokens for each token that it
        samples."""
        interference = batch * prefill_tokens * self.prefill_seconds_per_token(prefill_context)
        return self.decode_seconds(batch, context) + interference

    def serving_tokens_per_second(self, prompt: int, output: int, concurrency: int) -> float:
        """Sampled tokens a second with `concurrency` requests always open, each a prompt and then an output.

        The batch is clamped to what the cache holds, the context is its mean over a request's life.
        """
        check_positive(prompt=prompt, output=output, concurrency=concurrency)
        context = prompt + output / 2
        batch = min(float(concurrency), max(1.0, self.max_sequences(context)))
        return batch / self.step_seconds(batch, context, prompt / output, prompt / 2)


# Fitted by benchmarks/plan.py to five of the 41 rows in tgarg01/silybench-data (derived/csv/perf_points.csv
# at
# 93e4887, CC BY 4.0): vLLM 0.30.0, Qwen3-8B in bfloat16, one H100 SXM. docs/plan.md has the errors on the
# other 36.
VLLM_0_30_0 = EngineConstants(
    name="vLLM 0.30.0 (fitted on Qwen3-8B bf16, one H100)",
    step_seconds=1.587e-3,
    sequence_seconds=1.922e-5,
    bandwidth_share=0.8599,
    compute_share=0.6634,
    overhead_bytes=4.993e9,
    memory_utilization=0.9,
)
