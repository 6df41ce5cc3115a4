"""Ranks: the processes that train together, and one policy sharded over them."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from agentrl.models.policy import Policy

Value = TypeVar("Value")


class RankLost(RuntimeError):
    """Another process of the run died or cannot be reached."""


@contextmanager
def contact(rank: int) -> Iterator[None]:
    """Raise `RankLost` where torch reports that another process is gone.

    Backends say so with plain RuntimeErrors (gloo) or their subclass DistBackendError (nccl).
    """
    try:
        yield
    except RankLost:  # said by a contact within
        raise
    except RuntimeError as error:
        signs = (
            "Connection closed by peer",
            "Connection reset by peer",
            "Broken pipe",
            "Timed out",
            "timeout",
        )
        if isinstance(error, dist.DistBackendError) or any(sign in str(error) for sign in signs):
            reason = str(error).splitlines()[0].split(". ")[0]  # gloo goes on with advice
            raise RankLost(
                f"rank {rank} lost contact with another rank, which has probably died or run out of memory; "
                f"the run can be resumed from its last checkpoint ({reason})"
            ) from error
        raise


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among those that train together."""

    rank: int = 0
    num_ranks: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files and prints."""
        return self.rank == 0

    def gather(self, value: Value) -> list[Value]:
        """Every rank's value, in the order of ranks, on every rank. Raises RankLost where one is gone."""
        if self.num_ranks == 1:
            return [value]
        values: list[Value | None] = [None] * self.num_ranks
        with contact(self.rank):
            dist.all_gather_object(values, value)
        return cast(list[Value], values)

    def first(self, compute: Callable[[], Value]) -> Value:
        """What the first rank computes, on every rank; the others wait. Raises RankLost where one is gone."""
        if self.num_ranks == 1:
            return compute()
        values = [compute() if self.is_first else None]
        with contact(self.rank):
            dist.broadcast_object_list(values, src=0)
        return cast(Value, values[0])

    def share(self, count: int) -> range:
        """This rank's part of `count` things in order: the parts of all ranks, in turn, are all of them.

        >>> [list(Ranks(rank, 3).share(4)) for rank in range(3)]
        [[0, 1], [2], [3]]
        """
        size, extra = divmod(count, self.num_ranks)
        start = self.rank * size + min(self.rank, extra)
        return range(start, start + size + (self.rank < extra))


ONE_RANK = Ranks()


def own_device(name: str) -> torch.device:
    """The device of this process: under torchrun, `cuda` means the one with the process's local rank.

    Raises ValueError for a name that is no device's, and for a device on which this machine cannot compute.
    """
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None and dist.is_torchelastic_launched():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:  # a build without CUDA asserts
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"--device {name}: this machine cannot compute there: {reason}") from error
    return device


@contextmanager
def process_group(device: torch.device, timeout: timedelta = timedelta(minutes=30)) -> Iterator[Ranks]:
    """The ranks that torchrun started, connected while the block runs; one rank without torchrun.

    Communication goes over gloo, and for CUDA tensors over nccl.
    """
    backend = "gloo"
    if device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def layers_of(module: nn.Module) -> nn.ModuleList:
    """The list of a model's layers: of its module lists the one that holds the most parameters."""
    lists = [child for child in module.modules() if isinstance(child, nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(module).__name__} has no nn.ModuleList of layers to shard")
    return max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()))


def shard_policy(
    policy: Policy,
    *,
    compute_dtype: torch.dtype | None = None,
    checkpoint_activations: bool = False,
) -> None:
    """Shard a policy's parameters over all ranks, layer by layer, in place (FSDP2, `fully_shard`).

    Master weights, gradients and the optimizer's moments are float32 (float64 where the model is); with
    compute_dtype, torch.bfloat16 say, each layer computes on a copy in it. checkpoint_activations keeps only
    each layer's input and recomputes the rest in backward. Gradients are averaged over ranks, as
    `train.step.accumulate` expects. Build the optimizer afterwards.

    Every rank must hold the same weights before. Raises ValueError for a policy that is no torch module.
    """
    if not isinstance(policy, nn.Module):
        raise ValueError(f"a policy must be a torch module to be sharded, got {type(policy).__name__}")
    if any(p.dtype.itemsize < 4 for p in policy.parameters()):
        policy.float()
    layers = layers_of(policy)
    if checkpoint_activations:
        for i, layer in enumerate(layers):
            layers[i] = checkpoint_wrapper(layer)
    reduce_dtype = torch.float32 if compute_dtype is not None else None
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    for module in (*layers, policy):
        sharded = fully_shard(module, mp_policy=precision)
        # gloo cannot average; the sum is divided instead
        sharded.set_force_sum_reduction_for_comms(dist.get_backend() != "nccl")
    # Both enter by the root: a layer that is called first would take itself for it.
    for entry in ("hidden_states", "extend"):
        register_fsdp_forward_method(policy, entry)


@contextmanager
def gathered(policy: Policy) -> Iterator[None]:
    """The policy whole on every rank while the block runs, to sample or evaluate without communication.

    Ranks decode different numbers of tokens, so a layer that gathers its weights at every call would wait for
    calls that never come. Takes the memory of the whole model on each rank. Does nothing for one not sharded.
    """
    sharded = [m for m in cast(nn.Module, policy).modules() if isinstance(m, FSDPModule)]
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()
            module.set_reshard_after_forward(module is not policy, recurse=False)
