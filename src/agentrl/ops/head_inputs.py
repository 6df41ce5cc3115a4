"""What the tiled head computes on: its arguments, checked once, with every default resolved."""

# N action tokens, V vocabulary (of this rank, where it is sharded), D width

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from agentrl.ops.tiles import LogitPrecision, Precision, default_tile_bytes
from agentrl.ops.uncompiled import uncompiled


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """The arguments of the tiled head that are not tensors."""

    temperature: float
    softcap: float | None
    scale: float
    precision: Precision
    tile_bytes: int
    vocab_start: int  # the id of this rank's first row of the weight
    group: dist.ProcessGroup | None  # ranks that hold the other rows of the vocabulary


class HeadInputs(NamedTuple):
    """The arguments of the tiled head, as an autograd.Function takes them; tensors keep their graph."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    temperatures: Tensor | None  # [N]; None where the temperature is a float
    targets: Tensor  # [N] int64, ids in the whole vocabulary
    settings: HeadSettings


class HeadKeywords(TypedDict, total=False):
    """What every entry point of the tiled head takes beside hidden, weight and targets."""

    bias: Tensor | None
    temperature: float | Tensor
    softcap: float | None
    scale: float | None
    tile_bytes: int | None
    logits: LogitPrecision
    group: dist.ProcessGroup | None


def read_head_inputs(
    caller: str,
    tiles_held: int,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    scale: float | None = None,
    tile_bytes: int | None = None,
    logits: LogitPrecision = "float32",
    group: dist.ProcessGroup | None = None,
    stashed: bool = False,
) -> HeadInputs:
    """Check the arguments of `caller` and resolve what autocast, sharding and defaults leave open.

    `tiles_held`, and whether sums stand beside a stash (`stashed`), set how large a tile is by default.
    Raises ValueError for shapes, dtypes, devices and values that do not fit, RuntimeError under torch.func.
    """
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"{caller} does not work under torch.func transforms (grad, vmap, jvp, ...): its backward is "
            "written by hand. Use loss.backward() or torch.autograd.grad, or "
            "selected_log_probs(hidden @ weight.T, targets)"
        )
    check_tensors(hidden=hidden, weight=weight, targets=targets, bias=bias)
    for name, value in (("hidden", hidden), ("targets", targets), ("temperature", temperature)):
        if isinstance(value, DTensor):
            raise ValueError(f"{name} must be this rank's own tensor, got a DTensor; pass {name}.to_local()")
    for name, value in (("weight", weight), ("bias", bias)):
        if group is not None and isinstance(value, DTensor):
            raise ValueError(
                f"with group=, {name} must be this rank's own rows of the vocabulary as a plain tensor, got "
                f"a DTensor; pass {name}.to_local()"
            )
    weight, bias = _gathered(weight, hidden), None if bias is None else _gathered(bias, hidden)
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        to = torch.get_autocast_dtype(kind)
        hidden, weight = (
            tensor.to(to) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
            for tensor in (hidden, weight)
        )
    _check_shapes(hidden, weight, targets, bias)
    if logits not in ("float32", "input"):
        raise ValueError(f"logits must be 'float32' or 'input', got {logits!r}")
    precision = Precision(hidden.dtype, hidden.device, logits)
    if tile_bytes is None:
        learned = isinstance(temperature, Tensor) and temperature.requires_grad
        tiles_held += (softcap is not None) + learned
        tile_bytes = default_tile_bytes(precision, tiles_held, hidden.shape[1], stashed=stashed)
    if not is_whole(tile_bytes) or tile_bytes < 1:
        raise ValueError(f"tile_bytes must be a positive whole number, got {tile_bytes!r}")
    for name, value in (("softcap", softcap), ("scale", scale)):
        if value is not None and not _is_positive(value):
            raise ValueError(f"{name} must be positive and finite, or None for no {name}; got {value!r}")
    temperatures = None
    if isinstance(temperature, Tensor):
        temperatures, temperature = _token_temperatures(temperature, hidden, precision.wide), 1.0
    elif not _is_positive(temperature):
        raise ValueError(
            f"temperature must be positive and finite, got {temperature!r}; greedy sampling has no log-prob"
        )
    vocab_start, num_vocab = _vocab_range(weight, group)
    check_ids("targets", targets, num_vocab)
    settings = HeadSettings(
        temperature=float(temperature),
        softcap=softcap,
        scale=1.0 if scale is None else scale,
        precision=precision,
        tile_bytes=tile_bytes,
        vocab_start=vocab_start,
        group=group,
    )
    return HeadInputs(hidden, weight, bias, temperatures, targets, settings)


def check_tensors(**tensors: Any) -> None:
    """Raise ValueError for an argument that is no dense tensor; only a bias may be None."""
    for name, value in tensors.items():
        absent = value is None and name == "bias"
        if not absent and not (isinstance(value, Tensor) and value.layout == torch.strided):
            got = value.layout if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{name} must be a dense tensor, got {got}")


def is_whole(value: Any) -> bool:
    """Whether it is a whole number; True is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


@uncompiled
def refuse_batched(caller: str, upstream: Sequence[Tensor | None]) -> None:
    """Raise RuntimeError for upstream gradients that stand for several, as vmap makes them."""
    if any(g is not None and cast(Any, torch._C)._functorch.is_legacy_batchedtensor(g) for g in upstream):
        raise RuntimeError(
            f"{caller} takes one upstream gradient at a time: call torch.autograd.grad for each, without "
            "is_grads_batched= or vectorize="
        )


def wants_gradient(weight: Any) -> bool:
    """Whether autograd will ask for the gradient of `weight`."""
    return torch.is_grad_enabled() and isinstance(weight, Tensor) and weight.requires_grad


def _is_positive(value: Any) -> bool:
    """Whether it is a number, positive and finite; True is none."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and float(value) > 0


def _gathered(tensor: Tensor, hidden: Tensor) -> Tensor:
    """A sharded parameter (FSDP2) as one plain tensor, in hidden's dtype.

    Its gradient is averaged over shards and replicas, which see other tokens, as FSDP2 averages those of
    every other parameter.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    wanted = [Partial("avg")] * tensor.device_mesh.ndim
    if any(not isinstance(p, (Replicate, Shard)) for p in tensor.placements):
        raise ValueError(
            f"the head's weight must be sharded or replicated, got placements {tensor.placements}"
        )
    sharded = cast(DTensor, tensor.to(hidden.dtype))
    return sharded.full_tensor(grad_placements=wanted)


def _check_shapes(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or targets.ndim != 1:
        raise ValueError(
            f"wanted hidden [N, D], weight [V, D] and targets [N]; got {tuple(hidden.shape)}, "
            f"{tuple(weight.shape)} and {tuple(targets.shape)}; flatten rows first"
        )
    if hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden has width {hidden.shape[1]} but weight [V, D] has {weight.shape[1]}")
    if hidden.shape[0] != targets.shape[0]:
        raise ValueError(f"hidden has {hidden.shape[0]} tokens but targets has {targets.shape[0]}")
    if weight.shape[0] == 0 or weight.shape[1] == 0:
        raise ValueError(f"weight [V, D] must not be empty, got {tuple(weight.shape)}")
    if bias is not None and bias.shape != (weight.shape[0],):
        raise ValueError(
            f"bias must have shape ({weight.shape[0]},), one entry a row of weight; got {tuple(bias.shape)}"
        )
    if not hidden.is_floating_point() or hidden.dtype.itemsize < 2:
        raise ValueError(f"hidden must be float64, float32, bfloat16 or float16, got {hidden.dtype}")
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype} but weight is {weight.dtype}; cast one of them, or use torch.autocast"
        )
    if bias is not None and not bias.is_floating_point():
        raise ValueError(f"bias must be floating point, got {bias.dtype}")
    if targets.dtype != torch.int64:
        raise ValueError(f"targets must be int64 token ids, got {targets.dtype}")
    for name, tensor in (("weight", weight), ("targets", targets), ("bias", bias)):
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"hidden is on {hidden.device} but {name} is on {tensor.device}")


def _token_temperatures(temperature: Tensor, hidden: Tensor, wide: torch.dtype) -> Tensor:
    given = tuple(temperature.shape)
    if temperature.ndim == 0:
        temperature = temperature.expand(hidden.shape[0])
    if temperature.shape != hidden.shape[:1] or not temperature.is_floating_point():
        raise ValueError(
            f"temperature must be a number or a floating-point tensor of shape ({hidden.shape[0]},), "
            f"one a token; got {temperature.dtype} of shape {given}"
        )
    if temperature.device != hidden.device:
        raise ValueError(f"hidden is on {hidden.device} but temperature is on {temperature.device}")
    computed = temperature.detach().to(wide)
    wrong = ~((computed > 0) & computed.isfinite())
    if bool(wrong.any()):
        position = int(wrong.nonzero()[0])
        value = float(temperature[position])
        raise ValueError(f"temperature[{position}] must be positive and finite, got {value}, used in {wide}")
    return temperature


def check_ids(name: str, ids: Tensor, num_vocab: int) -> None:
    """Raise ValueError for the first of ids [...] that is no row of the vocabulary."""
    wrong = (ids < 0) | (ids >= num_vocab)
    if bool(wrong.any()):
        position = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"{name}[{', '.join(map(str, position))}] is {int(ids[position])}, outside the vocabulary of "
            f"{num_vocab} rows ({int(wrong.sum())} of {ids.numel()} are); drop ignored positions (-100) "
            "before the head"
        )


def _vocab_range(weight: Tensor, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """The id of this rank's first row, and the size of the whole vocabulary: shards lie in rank order."""
    if group is None:
        return 0, weight.shape[0]
    sizes = [
        torch.zeros(1, dtype=torch.int64, device=weight.device) for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(sizes, torch.tensor([weight.shape[0]], device=weight.device), group=group)
    counts = [int(size) for size in sizes]
    return sum(counts[: dist.get_rank(group)]), sum(counts)
