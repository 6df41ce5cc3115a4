"""The token budget of a microbatch, measured on the model and the machine that will run it."""

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agentrl.data.lengths import positive_whole
from agentrl.data.packing import pack_sequences
from agentrl.data.trajectory import Trajectory
from agentrl.models.policy import Policy
from agentrl.models.scoring import as_policy, packed_log_probs
from agentrl.ops.peak_memory import peak_bytes

Step = Callable[[list[Trajectory]], Any]

# Share of a GPU's memory that is suggested: the allocator loses some to fragments, kernels take workspace.
_USABLE = 0.9
_PROBES = 16  # steps that are run at most


def suggest_max_tokens(
    policy: Policy | nn.Module,
    *,
    longest: int,
    limit_bytes: int | None = None,
    reserved_bytes: int = 0,
    at_most: int | None = None,
    step: Step | None = None,
    tolerance: float = 0.02,
) -> int:
    """The largest `max_tokens` of a microbatch whose forward and backward fit `limit_bytes`, as measured.

    Runs the longest sequence that is allowed, `longest` tokens all of which are actions, then microbatches of
    more and more such tokens, chosen by interpolation, until the largest that fits and the smallest that does
    not are within `tolerance` of each other. The result is one that was run; at most `at_most` tokens
    (default 64 times `longest`) are tried. The policy is a Policy or a transformers causal LM.

    What counts is parameters, buffers, gradients and the peak of a step that accumulates into existing
    gradients; on CUDA, all tensors of this process. `reserved_bytes` of the limit stay free for what does not
    exist yet: Adam's moments take 8 bytes a float32 parameter. `limit_bytes` defaults to 90% of a GPU's
    memory and must be given on CPU. `step(trajs)` runs forward and backward on the trajectories of one
    microbatch (default: `packed_log_probs` of one packed row, summed).

    Parameters, the random state and missing gradients are as before when it returns. Where
    torch.distributed is initialised every rank must call it; all get the same result, that of the rank with
    the least room. Raises ValueError where `longest` alone is above the limit, or gradients exist already.

    >>> from agentrl.models.tiny import TinyAgent, TinyConfig
    >>> policy = TinyAgent(TinyConfig(vocab_size=11, width=16, num_layers=1))
    >>> suggest_max_tokens(policy, longest=32, limit_bytes=10**9, at_most=64)
    64
    """
    policy = as_policy(policy)
    longest = positive_whole("longest", longest)
    at_most = 64 * longest if at_most is None else positive_whole("at_most", at_most)
    if longest < 2 or at_most < longest:
        raise ValueError(f"need 2 <= longest <= at_most, got longest={longest} and at_most={at_most}")
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must be between 0 and 1, got {tolerance!r}")
    if reserved_bytes < 0:
        raise ValueError(f"reserved_bytes must be at least 0, got {reserved_bytes!r}")
    if any(p.grad is not None for p in policy.module.parameters()):
        raise ValueError("the policy has gradients, which the measurement would add to; zero them first")
    probe = _Probe(policy, step or partial(_packed_step, policy), longest)
    limit = probe.limit(limit_bytes) - reserved_bytes
    try:
        with torch.random.fork_rng(devices=probe.cuda_devices):
            return _largest_fitting(probe, longest, at_most, limit, tolerance)
    finally:
        policy.module.zero_grad(set_to_none=True)


def _packed_step(policy: Policy, trajs: list[Trajectory]) -> None:
    device = next(policy.module.parameters()).device
    packed = pack_sequences(trajs, sum(t.num_tokens for t in trajs), pad_to=None).to(device)
    packed_log_probs(policy, packed).sum().backward()


def _largest_fitting(probe: "_Probe", longest: int, at_most: int, limit: int, tolerance: float) -> int:
    probe.peak(longest)  # makes the gradients, and what kernels keep
    fits, peak = longest, probe.peak(longest)
    if peak > limit:
        raise ValueError(
            f"one sequence of {longest} tokens takes {peak:,.0f} bytes but {limit:,} are free for it; "
            "lower longest, raise limit_bytes, or save memory (activation checkpointing, more ranks)"
        )
    bytes_each = peak / longest  # until there is a second point
    too_many, over = at_most + 1, inf
    for _ in range(_PROBES):
        close = max(1, int(tolerance * fits))
        if too_many - fits <= close:
            break
        if over < inf:
            bytes_each = (over - peak) / (too_many - fits)
        more = int((limit - peak) / bytes_each) if bytes_each > 0 else at_most
        if over == inf and too_many <= at_most:  # a GPU ran out there
            more = min(more, (too_many - fits) // 2)
        # Memory need not be linear in tokens: no step more than doubles.
        tokens = min(fits + max(more, close), 2 * fits, too_many - 1)
        found = probe.peak(tokens)
        if found > limit:
            too_many, over = tokens, found
        else:
            bytes_each = (found - peak) / (tokens - fits)
            fits, peak = tokens, found
    return fits


class _Probe:
    """Measures microbatches of given numbers of tokens."""

    def __init__(self, policy: Policy, step: Step, longest: int) -> None:
        self._module = policy.module
        self._step = step
        self._longest = longest
        self._vocab_size = policy.head().weight.shape[0]
        self._device = next(policy.module.parameters()).device
        self.cuda_devices = [self._device] if self._device.type == "cuda" else []

    def limit(self, limit_bytes: int | None) -> int:
        """The limit, which a GPU has by itself."""
        if limit_bytes is not None:
            return positive_whole("limit_bytes", limit_bytes)
        if self._device.type != "cuda":
            raise ValueError(f"limit_bytes must be given for a policy on {self._device}")
        return int(_USABLE * torch.cuda.mem_get_info(self._device)[1])

    def peak(self, num_tokens: int) -> float:
        """Bytes at the peak of a step of `num_tokens`, of all ranks the most; inf where a GPU ran out."""
        trajs = self._trajectories(num_tokens)
        held = self._held_bytes()
        try:
            found = float(held + peak_bytes(lambda: self._step(trajs), self._device))
        except torch.OutOfMemoryError:
            found = inf
        if dist.is_initialized():
            most = torch.tensor(found, dtype=torch.float64, device=self._device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            found = most.item()
        return found

    def _trajectories(self, num_tokens: int) -> list[Trajectory]:
        """As many of the longest as fit, and one of the rest."""
        lengths = [self._longest] * (num_tokens // self._longest)
        if rest := num_tokens % self._longest:
            lengths.append(rest)
        return [
            Trajectory(torch.arange(n) % self._vocab_size, torch.ones(n - 1), -torch.ones(n - 1), reward=0.0)
            for n in lengths
        ]

    def _held_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        parameters = list(self._module.parameters())
        held: list[Tensor] = [*parameters, *self._module.buffers()]
        held += [p.grad for p in parameters if p.grad is not None]
        local = [t.to_local() if isinstance(t, DTensor) else t for t in held]
        return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in local)}.values())
