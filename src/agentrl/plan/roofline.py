"""The first-order roofline: what anyone can work out on paper from N, the cache, the bandwidth and the
arithmetic.

A decode step of b sequences on c tokens each reads the weights once and every cache: (2N + b c kv) / B
seconds for b tokens. Training takes 6N FLOPs a token, a forward pass 2N, at an assumed share (MFU) of the
peak.
"""

from dataclasses import dataclass

from agentrl.plan.gpus import Gpu
from agentrl.plan.models import ModelShape, check_positive


def decode_tokens_per_second(
    parameters: float,
    kv_bytes_per_token: float,
    bytes_per_second: float,
    batch: float,
    context: float,
    weight_bytes_each: float = 2.0,
) -> float:
    """Tokens a second of a model decoding `batch` sequences on `context` tokens: b B / (2N + b c
    kv).

    >>> round(decode_tokens_per_second(8.2e9, 147_456, 4.8e12, batch=64, context=16_384))
    1796
    """
    check_positive(
        parameters=parameters,
        bytes_per_second=bytes_per_second,
        batch=batch,
        weight_bytes_each=weight_bytes_each,
    )
    if kv_bytes_per_token < 0 or context < 0:
        raise ValueError(f"context and cache must not be negative, got {context} and {kv_bytes_per_token}")
    read = weight_bytes_each * parameters + batch * context * kv_bytes_per_token
    return batch * bytes_per_second / read


def train_tokens_per_second(parameters: float, flops_per_second: float, mfu: float) -> float:
    """Tokens a second of training, forward and backward: MFU * P / (6N).

    >>> round(train_tokens_per_second(8.2e9, 989e12, mfu=0.4))
    8041
    """
    check_positive(parameters=parameters, flops_per_second=flops_per_second, mfu=mfu)
    return mfu * flops_per_second / (6 * parameters)


@dataclass(frozen=True, slots=True)
class StepHours:
    """GPU-hours of one optimizer step, by what they go to."""

    train: float  # forward and backward on the trained tokens
    old_log_probs: float  # a forward pass of the policy before the update
    reference: float  # a forward pass of the reference model
    prefill: float  # tokens that the engine reads and does not sample
    decode: float  # tokens that the engine samples
    waiting: float  # GPUs that hold a share of the step and do nothing

    @property
    def total(self) -> float:
        """All of it."""
        return self.train + self.old_log_probs + self.reference + self.prefill + self.decode + self.waiting

    @property
    def decode_share(self) -> float:
        """Share of decoding in the total."""
        return self.decode / self.total

    def items(self) -> list[tuple[str, float]]:
        """(name, GPU-hours) in the order in which they are shown."""
        return [(name, getattr(self, name)) for name in self.__slots__]


def first_order_hours(
    shape: ModelShape,
    gpu: Gpu,
    *,
    episodes: float,
    tokens: float,
    sampled: float,
    batch: float,
    context: float,
    busy: float,
    mfu: float,
    weight_bytes_each: float = 2.0,
    kv_bytes_each: float = 2.0,
    old_log_probs: bool = True,
    reference: bool = False,
) -> StepHours:
    """GPU-hours of one step: `episodes` of `tokens` each, of which `sampled` are decoded with the engine
    `busy`.

    Everything else is read once at the training MFU. Idle time is inside `decode`, which is divided by
    `busy`.
    """
    check_positive(episodes=episodes, tokens=tokens, sampled=sampled, busy=busy, mfu=mfu)
    if sampled > tokens:
        raise ValueError(f"sampled ({sampled:g}) cannot be more than tokens ({tokens:g}) an episode")
    size = shape.nominal_parameters
    multiplying = shape.active_parameters if shape.experts else size
    forward = 3 * train_tokens_per_second(multiplying, gpu.flops_per_second, mfu)  # 2N instead of 6N
    kv = shape.kv_bytes_per_token(kv_bytes_each)
    decode = decode_tokens_per_second(size, kv, gpu.bytes_per_second, batch, context, weight_bytes_each)
    all_hours = episodes * tokens / forward / 3600
    return StepHours(
        train=3 * all_hours,
        old_log_probs=all_hours if old_log_probs else 0.0,
        reference=all_hours if reference else 0.0,
        prefill=episodes * (tokens - sampled) / forward / 3600,
        decode=episodes * sampled / decode / busy / 3600,
        waiting=0.0,
    )
