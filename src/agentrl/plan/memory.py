"""Memory of a training GPU by component, the largest microbatch that fits, and the token budget to set.

Fully sharded training over G GPUs: bfloat16 parameters, float32 gradients, a float32 master copy and two Adam
moments, each a G-th. Activations are bfloat16, with attention that stores no scores. Logits are float32, as
is their gradient.
"""

from dataclasses import dataclass, replace
from typing import get_args

from agentrl.plan.gpus import Gpu
from agentrl.plan.models import ModelShape, logits_bytes
from agentrl.plan.workload import Logits, Training

LOGITS: tuple[Logits, ...] = get_args(Logits)
_BUDGET_STEP = 1024  # tokens; budgets are given in whole steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one GPU at the peak of a microbatch."""

    parameters: float  # bfloat16 shard
    gathered: float  # embedding, head and two layers, whole, while they are used
    gradients: float  # float32 shard
    optimizer: float  # float32 master copy and two moments, shard
    reference: float  # bfloat16 shard of a reference model
    activations: float
    logits: float  # with their gradient

    @property
    def total(self) -> float:
        """All of it."""
        return sum(value for _, value in self.items())

    @property
    def states(self) -> float:
        """What does not grow with the microbatch."""
        return self.total - self.activations - self.logits

    def items(self) -> list[tuple[str, float]]:
        """(name, bytes) in the order in which they are stacked."""
        return [(name, getattr(self, name)) for name in self.__slots__]


def layer_activation_bytes(shape: ModelShape) -> float:
    """Bytes that backward needs of one layer a token, when nothing is recomputed.

    Two bytes for: input and output of both norms (4 D); queries, keys and values before and after rotation
    and the attention's output (3 H d + 3 K d); gate, up, activation and product of the feed-forward part
    (4 F, with F over the active experts). Four bytes for the float32 copies that norms keep of their inputs,
    those of queries and keys included (2 D + H d + K d); a fused norm saves them.
    """
    D, H, K, d = shape.width, shape.num_heads, shape.num_kv_heads, shape.head_dim
    if (m := shape.latent) is not None:
        mixer = H * (2 * (m.nope_dim + m.rope_dim) + 2 * m.value_dim) + m.kv_rank + m.rope_dim + m.q_rank
        normed = 2 * D + m.kv_rank + m.q_rank
    else:
        mixer = 3 * H * d + 3 * K * d
        normed = 2 * D + H * d + K * d
    widths = [shape.ffn_width] if shape.num_dense_layers else []
    if (e := shape.experts) is not None:
        widths.append(e.experts_per_token * e.width + e.shared_width)
    return 2.0 * (4 * D + mixer + 4 * max(widths)) + 4.0 * normed


def activation_bytes(shape: ModelShape, num_tokens: float, checkpointing: bool) -> float:
    """Bytes of activations for `num_tokens`: every layer's, or each layer's input and one layer's in full."""
    layer = layer_activation_bytes(shape)
    if not checkpointing:
        return num_tokens * shape.num_layers * layer
    return num_tokens * (shape.num_layers * 2.0 * shape.width + layer)


def peak_logits_bytes(
    logits: Logits, vocab_size: int, num_tokens: int, chunk_tokens: int, action_share: float
) -> float:
    """Bytes of float32 logits with their gradient, at the peak of a microbatch.

    full: all of both. chunked: a chunk at a time in forward, but plain backward keeps every chunk's logits
    and makes one chunk's gradient. recomputed: one chunk of both. actions: all of both, at the action tokens
    only.

    >>> [round(peak_logits_bytes(how, 151_936, 32_768, 1024, 0.25) / 1e9, 1) for how in LOGITS]
    [39.8, 20.5, 1.2, 10.0]
    """
    chunk = min(chunk_tokens, num_tokens)
    if logits == "full":
        return 2 * logits_bytes(num_tokens, vocab_size)
    if logits == "chunked":
        return logits_bytes(num_tokens, vocab_size) + logits_bytes(chunk, vocab_size)
    if logits == "recomputed":
        return 2 * logits_bytes(chunk, vocab_size)
    return 2 * action_share * logits_bytes(num_tokens, vocab_size)


def training_memory(shape: ModelShape, num_gpus: int, training: Training, action_share: float) -> Memory:
    """Memory of one of `num_gpus` GPUs that train with the given settings; `action_share` of the tokens are
    sampled.

    Raises ValueError for no GPUs and a share outside [0, 1].
    """
    if num_gpus < 1 or not 0 <= action_share <= 1:
        raise ValueError(f"need num_gpus >= 1 and action_share in [0, 1], got {num_gpus} and {action_share}")
    size = shape.total_parameters
    embedding = shape.head_parameters * (1 if shape.tied_head else 2)
    layer = (size - embedding) / shape.num_layers
    gathered = 2.0 * (embedding + 2 * layer) if num_gpus > 1 else 0.0
    return Memory(
        parameters=2 * size / num_gpus,
        gathered=gathered,
        gradients=4 * size / num_gpus,
        optimizer=12 * size / num_gpus,
        reference=2 * size / num_gpus if training.reference else 0.0,
        activations=activation_bytes(shape, training.microbatch_tokens, training.checkpointing),
        logits=peak_logits_bytes(
            training.logits, shape.vocab_size, training.microbatch_tokens, training.chunk_tokens, action_share
        ),
    )


def largest_microbatch(
    shape: ModelShape, gpu: Gpu, num_gpus: int, training: Training, action_share: float
) -> int:
    """The most tokens of a microbatch that fit, in whole steps of 1024: the token budget to set. 0 where none
    fit."""
    budget = gpu.memory_bytes * training.train_memory_share

    def fits(num_tokens: int) -> bool:
        trial = replace(training, microbatch_tokens=num_tokens)
        return training_memory(shape, num_gpus, trial, action_share).total <= budget

    if not fits(_BUDGET_STEP):
        return 0
    low, high = 1, 2  # in steps; the total grows with the tokens
    while fits(high * _BUDGET_STEP):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * _BUDGET_STEP) else (low, middle)
    return low * _BUDGET_STEP


def check_training_fits(
    shape: ModelShape, gpu: Gpu, num_gpus: int, training: Training, action_share: float
) -> None:
    """Raise ValueError, with what to change, where the microbatch does not fit a GPU."""
    need = training_memory(shape, num_gpus, training, action_share)
    have = gpu.memory_bytes * training.train_memory_share
    if need.total <= have:
        return
    largest = largest_microbatch(shape, gpu, num_gpus, training, action_share)
    if largest:
        raise ValueError(
            f"a microbatch of {training.microbatch_tokens:,} tokens does not fit: it needs "
            f"{need.total / 1e9:.1f} GB of the {have / 1e9:.1f} GB that training may fill; "
            f"lower --microbatch-tokens to {largest}"
        )
    raise ValueError(
        f"{shape.name} does not fit: training states take {need.states / 1e9:.1f} GB on each of {num_gpus} x "
        f"{gpu.name}, and training may fill {have / 1e9:.1f} GB; raise --gpus"
    )
