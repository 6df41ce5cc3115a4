"""Log-probs and gradients of one objective, computed in different ways, and how far rounding moves them."""

# B trajectories, R rows, L row length, N action tokens of all trajectories, V vocabulary, D width

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from agentrl.data.packing import PackedBatch, pack_sequences
from agentrl.data.trajectory import Trajectory
from agentrl.data.weights import trajectory_weights
from agentrl.models.policy import Policy, head_logits
from agentrl.models.reference import alone_log_probs
from agentrl.models.scoring import packed_log_probs
from agentrl.ops.log_probs import action_log_probs, selected_log_probs

# How many times the plain computation's own rounding a saving may differ from it: where the saving is at most
# twice as far from the exact value as the plain computation is, the two are at most thrice that apart.
BUDGET = 3.0
SLACK = 8.0  # machine epsilons granted on top, for values that the plain computation happens to hit
EXACT = 1e-10  # relative; what reordering sums may do in float64
HEAD_TOKENS = 1024  # action tokens on which the two heads are compared: the full logits are held
_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}


@dataclass(frozen=True, slots=True)
class Objective:
    """loss = (coefficient * logp).sum() over action tokens: a policy gradient with random advantages.

    Its weights are those of token_mean over all trajectories, fixed before anything is packed or split.
    """

    trajs: Sequence[Trajectory]
    advantages: Tensor  # [B] float64
    coefficients: Tensor  # [B] float64: minus weight times advantage, of each action token of a trajectory
    temperature: float

    @staticmethod
    def of(trajs: Sequence[Trajectory], temperature: float, seed: int) -> "Objective":
        """The objective over these trajectories."""
        generator = torch.Generator().manual_seed(seed)
        advantages = torch.randn(len(trajs), generator=generator, dtype=torch.float64)
        weights = trajectory_weights(torch.tensor([t.num_actions for t in trajs]))
        return Objective(trajs, advantages, -weights * advantages, temperature)


@dataclass(frozen=True, slots=True)
class Scores:
    """What one way to compute the objective gave."""

    logp: Tensor  # [N] float64 on the CPU, nats, trajectory by trajectory
    gradients: list[Tensor]  # one a trained parameter; empty where they were not asked for


@dataclass(frozen=True, slots=True)
class Gap:
    """How far two ways to compute the same are apart."""

    largest: float  # nats, of an action token's log-prob
    mean: float  # nats
    gradient: float | None  # norm of the difference over the norm of the gradient; None: not computed

    def allowed(self, eps: float, logp: Tensor) -> "Gap":
        """What a saving may differ by where this is what rounding does; eps is the dtype's epsilon."""
        largest, mean = (max(1.0, float(x)) for x in (logp.abs().max(), logp.abs().mean()))
        gradient = None if self.gradient is None else BUDGET * self.gradient + SLACK * eps
        return Gap(
            BUDGET * self.largest + SLACK * eps * largest, BUDGET * self.mean + SLACK * eps * mean, gradient
        )


def gap(got: Scores, want: Scores) -> Gap:
    """How far `got` is from `want`."""
    difference = (got.logp - want.logp).abs()
    gradient = relative_error(got.gradients, want.gradients) if want.gradients else None
    return Gap(float(difference.max()), float(difference.mean()), gradient)


def relative_error(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Norm of the difference of two gradients over the norm of `want`, all parameters together."""
    off = sum(float((g.double() - w.double()).square().sum()) for g, w in zip(got, want, strict=True))
    size = sum(float(w.double().square().sum()) for w in want)
    return (off / size) ** 0.5 if size else off**0.5


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """The module in evaluation mode and without gradients; modes and gradients come back afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    gradients = [(p, p.grad) for p in module.parameters()]
    module.eval()
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        for part, mode in modes:
            part.training = mode
        for parameter, gradient in gradients:
            parameter.grad = gradient


def taken_gradients(policy: Policy) -> list[Tensor]:
    """The gradients that backward left, taken off the parameters; zeros where one got none."""
    taken: list[Tensor] = []
    for parameter in policy.module.parameters():
        if parameter.requires_grad:
            taken.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            parameter.grad = None
    return taken


def score_alone(
    policy: Policy,
    objective: Objective,
    gradients: bool,
    advance: Callable[[float], None] = lambda share: None,
) -> Scores:
    """The plain computation: every trajectory by itself, full logits, one backward each.

    `advance` is told the share that is done, 0 to 1.
    """
    device = policy.head().weight.device
    found: list[Tensor] = []
    total, done = sum(traj.num_tokens for traj in objective.trajs), 0
    for index, traj in enumerate(objective.trajs):
        row = pack_sequences([traj], traj.num_tokens).to(device)
        with torch.set_grad_enabled(gradients):
            logp = alone_log_probs(policy, row, objective.temperature)
        if gradients and logp.requires_grad:
            (logp * float(objective.coefficients[index])).sum().backward()
        found.append(logp.detach().double().cpu())
        done += traj.num_tokens
        advance(done / total)
    return Scores(torch.cat(found), taken_gradients(policy) if gradients else [])


def score_packed(policy: Policy, objective: Objective, packed: PackedBatch, gradients: bool) -> Scores:
    """The same from packed rows and the tiled head, in one forward and one backward."""
    with torch.set_grad_enabled(gradients):
        logp = packed_log_probs(policy, packed, objective.temperature)
    if gradients and logp.requires_grad:
        coefficients = objective.coefficients.to(logp)
        (logp * coefficients[packed.actions.trajectory]).sum().backward()
    return Scores(logp.detach().double().cpu(), taken_gradients(policy) if gradients else [])


def score_heads(
    policy: Policy, hidden: Tensor, targets: Tensor, temperature: float, seed: int
) -> tuple[Scores, Scores, Scores | None]:
    """(tiled head, full logits, full logits in the next wider dtype or None) on hidden [N, D], targets [N].

    Gradients are those of the hidden states and of the head's weight. N is at most HEAD_TOKENS.
    """
    head = policy.head()
    generator = torch.Generator().manual_seed(seed)
    upstream = torch.randn(len(targets), generator=generator, dtype=torch.float64).to(hidden.device)

    def score(fast: bool, dtype: torch.dtype) -> Scores:
        inputs = [x.detach().to(dtype).requires_grad_() for x in (hidden, head.weight)]
        bias = None if head.bias is None else head.bias.detach().to(dtype)
        if fast:
            logp = action_log_probs(
                inputs[0],
                inputs[1],
                targets,
                bias=bias,
                temperature=temperature,
                softcap=head.softcap,
                scale=head.scale,
            )
        else:
            own = type(head)(inputs[1], bias, head.softcap, head.scale)
            logp = selected_log_probs(head_logits(own, inputs[0]) / temperature, targets)
        gradients = torch.autograd.grad((logp * upstream.to(logp)).sum(), inputs)
        return Scores(logp.detach().double().cpu(), list(gradients))

    dtype = hidden.dtype
    wider = _WIDER.get(dtype)
    with torch.enable_grad():
        return score(True, dtype), score(False, dtype), None if wider is None else score(False, wider)


def rounding(
    policy: Policy,
    objective: Objective,
    plain: Scores,
    advance: Callable[[float], None] = lambda share: None,
) -> Gap | None:
    """How far rounding moves the plain computation of this model on these trajectories.

    Measured against the same computation in the next wider dtype (float32 for 16 bits, float64 for float32),
    to which the weights are cast in place and from which they come back to the bit. A float64 model that
    rounds inside (transformers computes norms and rotations in float32) is measured against a float32 copy.
    None for a model that is float64 throughout.
    """
    dtype = policy.head().weight.dtype
    gradients = bool(plain.gradients)
    if dtype in _WIDER:
        with _widened(policy.module, _WIDER[dtype]):
            exact = score_alone(policy, objective, gradients, advance)
        return gap(plain, exact)
    if not _rounds_inside(policy, objective.trajs[0]):
        return None
    narrow = copy.deepcopy(policy)
    narrow.module.float()
    return gap(score_alone(narrow, objective, gradients, advance), plain)


def allowed_gap(found: Gap | None, dtype: torch.dtype, logp: Tensor) -> Gap:
    """What a saving may differ by from the plain log-probs `logp` [N], given what `rounding` found."""
    if found is not None:
        return found.allowed(torch.finfo(dtype).eps, logp)
    largest, mean = (EXACT * max(1.0, float(x)) for x in (logp.abs().max(), logp.abs().mean()))
    return Gap(largest, mean, EXACT)


@contextmanager
def _widened(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """The module with its narrower weights and buffers in `dtype`; they come back to the bit."""
    eps = torch.finfo(dtype).eps
    narrower = [
        (tensor, tensor.dtype)
        for tensor in chain(module.parameters(), module.buffers())
        if tensor.is_floating_point() and torch.finfo(tensor.dtype).eps > eps
    ]
    try:
        for tensor, _ in narrower:
            tensor.data = tensor.data.to(dtype)
        yield
    finally:
        for tensor, before in narrower:
            tensor.grad = None
            tensor.data = tensor.data.to(before)


@torch.no_grad()
def _rounds_inside(policy: Policy, traj: Trajectory) -> bool:
    """Whether a float64 policy computes anything in a narrower dtype."""
    narrow = False

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal narrow
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.is_floating_point() and out.dtype != torch.float64:
                narrow = True
            return out

    ids = traj.ids[None, :8].to(policy.head().weight.device)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    with Watch():
        policy.hidden_states(ids, positions, torch.full_like(ids, ids.shape[1]))
    return narrow
