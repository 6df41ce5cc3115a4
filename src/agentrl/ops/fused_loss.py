"""A policy loss fused with the head: gradients are computed in forward, so that logits are computed once."""

# N action tokens, V vocabulary, D width

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.ops.frozen_head import FrozenHead
from agentrl.ops.gradient_sums import scale_rows, spread, spread_rows_
from agentrl.ops.head_gradients import Gradients, Needs, Upstream, reduce_and_cast
from agentrl.ops.head_inputs import (
    HeadInputs,
    check_tensors,
    is_whole,
    read_head_inputs,
    refuse_batched,
    wants_gradient,
)
from agentrl.ops.stash import Stash
from agentrl.ops.tiled_head import TiledHead
from agentrl.ops.tiles import LogitPrecision
from agentrl.ops.uncompiled import uncompiled

# (log-probs [N], entropies [N] or None, positions [N] int64) -> losses [N], weights already applied
TokenLoss = Callable[[Tensor, Tensor | None, Tensor], Tensor]


class FusedLoss(NamedTuple):
    """What `fused_policy_loss` gives back; only `loss` carries a gradient."""

    loss: Tensor  # scalar: the sum of the token losses
    log_probs: Tensor  # [N], nats; NaN where not `active`
    entropy: Tensor | None  # [N], nats; NaN where not `active`; None unless asked for


@uncompiled
def fused_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_loss: TokenLoss,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    scale: float | None = None,
    with_entropy: bool = False,
    active: Tensor | None = None,
    tile_bytes: int | None = None,
    stash_bytes: int = 0,
    logits: LogitPrecision = "float32",
    group: dist.ProcessGroup | None = None,
) -> FusedLoss:
    """The sum (float32, or float64) of token_loss over N action tokens; its gradient is computed in forward.

    `token_loss(log_probs [N], entropy [N] or None, positions [N])` returns the losses [N] of the tokens,
    weights already applied: loss = sum_n weight_n * l(log p_n, H_n). Its own gradient is taken by autograd
    on these small vectors, once; it must not depend on anything else that needs a gradient, which raises
    ValueError.

    `action_log_probs` computes the logits twice because the upstream gradient is not known in forward. Here
    it is, so the first D tokens' exponentials wait for it in the memory that the weight's gradient is about
    to fill, in 16 bits too, but not with a soft-cap, a loss of entropies or a learned temperature, which they
    would blur; for these tokens, three matrix products replace four, at the same peak memory.
    `stash_bytes` on top hold those of tokens after them, if at least 64 (N * V * 4 bytes hold all, in
    float32); tokens beyond are recomputed, and tokens without gradient cost nothing more. The gradient of a
    frozen head takes two products, and three with entropy.

    `active` (bool [N]) names the tokens to score, for losses known beforehand to give the others nothing (a
    weight or an advantage of zero). The others cost nothing: `token_loss` sees the log-probs and positions of
    the active tokens alone, and the others' log-probs and entropies are NaN.

    Backward multiplies by the upstream scalar, in place, and so runs once. The other arguments, errors and
    roundings are `action_log_probs`'; in 16 bits, a token's probabilities are also rounded once more on
    their way, and so is the gradient by the upstream scalar. A scalar that keeps float16 in range (a
    GradScaler's) does so here too: until it arrives, each row of a gradient has a unit of its own.

    >>> hidden = torch.zeros(3, 2, requires_grad=True)
    >>> advantage = torch.tensor([1.0, -1.0, 0.5])
    >>> result = fused_policy_loss(hidden, torch.eye(2), torch.tensor([0, 1, 1]),
    ...                            lambda logp, entropy, index: -advantage[index] * logp)
    >>> result.loss.backward()
    >>> hidden.grad
    tensor([[-0.5000,  0.5000],
            [-0.5000,  0.5000],
            [ 0.2500, -0.2500]])
    """
    if not is_whole(stash_bytes) or stash_bytes < 0:
        raise ValueError(f"stash_bytes must be a whole number, at least 0, got {stash_bytes!r}")
    inputs = read_head_inputs(
        "fused_policy_loss",
        1 + with_entropy,
        hidden,
        weight,
        targets,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        scale=scale,
        logits=logits,
        tile_bytes=tile_bytes,
        group=group,
        stashed=wants_gradient(weight),
    )
    rows = None if active is None else _active_rows(active, inputs.hidden)
    grad_enabled = torch.is_grad_enabled()
    return FusedLoss(*_FusedLoss.apply(token_loss, with_entropy, stash_bytes, grad_enabled, rows, *inputs))


def _active_rows(active: Tensor, hidden: Tensor) -> Tensor | None:
    """The positions of active tokens, int64 and ascending; None where all are."""
    check_tensors(active=active)
    if active.dtype != torch.bool or active.shape != hidden.shape[:1] or active.device != hidden.device:
        raise ValueError(
            f"active must be a bool tensor of shape ({len(hidden)},) on {hidden.device}, one entry a token; "
            f"got {active.dtype} of shape {tuple(active.shape)} on {active.device}"
        )
    rows = active.nonzero().squeeze(1)
    return None if len(rows) == len(active) else rows


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        token_loss: TokenLoss,
        entropy: bool,
        stash_bytes: int,
        grad_enabled: bool,
        rows: Tensor | None,
        *arguments: Any,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        inputs = HeadInputs(*arguments)
        needs = Needs(*(grad_enabled and need for need in ctx.needs_input_grad[5:9]))
        with torch.autocast(inputs.hidden.device.type, enabled=False):
            if needs.only_hidden() and not entropy:
                loss, logp, gradients = _loss_and_hidden_gradient(inputs, token_loss, rows)
                entropy_value = None
            else:
                loss, logp, entropy_value, gradients = _loss_and_gradients(
                    inputs, token_loss, needs, rows, entropy=entropy, stash_bytes=stash_bytes
                )
        if rows is not None:
            logp = spread(logp, rows, len(inputs.targets), torch.nan)
            entropy_value = (
                None if entropy_value is None else spread(entropy_value, rows, len(logp), torch.nan)
            )
        ctx.gradients = gradients
        ctx.mark_non_differentiable(logp, *([] if entropy_value is None else [entropy_value]))
        ctx.set_materialize_grads(False)
        return loss, logp, entropy_value

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        scale, found = upstream[0], ctx.gradients
        if torch.is_grad_enabled():
            raise RuntimeError(
                "fused_policy_loss computes its gradient in forward and has no second derivative; "
                "for create_graph=True use selected_log_probs(hidden @ weight.T, targets)"
            )
        if scale is None:
            return (None,) * 11
        refuse_batched("fused_policy_loss", upstream)
        if found is None:
            raise RuntimeError(
                "fused_policy_loss gave its gradient away in the first backward; call it again"
            )
        ctx.gradients = None
        parts = (found.hidden, found.weight, found.bias, found.temperatures)
        for part, units in zip(parts, (found.hidden_units, found.weight_units, None, None), strict=True):
            if part is not None and units is not None:
                scale_rows(part, scale.expand(len(part)), out=part, units=units)
            elif part is not None:
                _multiply_(part, scale)  # wide where the input is a float16 vector: autograd casts it
        return (None,) * 5 + parts + (None, None)


def _differentiate(
    token_loss: TokenLoss, logp: Tensor, entropy: Tensor | None, rows: Tensor | None, *, wanted: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The summed loss, and its gradients with respect to log-probs and entropies [N].

    The latter is None where the loss does not depend on them: the head then skips their part of the gradient.
    """
    positions = torch.arange(len(logp), device=logp.device) if rows is None else rows.clone()
    leaves = [part.detach().requires_grad_() for part in (logp, entropy) if part is not None]
    with torch.enable_grad():
        given = [leaf.clone() for leaf in leaves]  # token_loss may work in place
        losses = token_loss(given[0], None if entropy is None else given[1], positions)
        is_tensor = isinstance(losses, Tensor)
        if not is_tensor or losses.shape != logp.shape or not losses.is_floating_point():
            got = f"{losses.dtype} of shape {tuple(losses.shape)}" if is_tensor else type(losses).__name__
            raise ValueError(
                "token_loss must return one floating-point loss a token, "
                f"shape {tuple(logp.shape)}; got {got}"
            )
        loss = losses.sum(dtype=logp.dtype)
    _refuse_other_leaves(loss, leaves)
    found: list[Tensor | None] = [None] * len(leaves)
    if wanted and loss.requires_grad:
        found = list(torch.autograd.grad(loss, leaves, allow_unused=True))
    upstream = torch.zeros_like(logp) if found[0] is None else found[0]
    return loss.detach(), upstream, None if entropy is None else found[1]


def _multiply_(part: Tensor, factor: Tensor) -> None:
    """Multiply in place by a scalar, which is not rounded to part's 16 bits first."""
    if factor.device.type != "cpu":
        part.mul_(factor.view(1))  # as a vector, and without waiting for its value
    elif float(factor) != 1.0:
        part.mul_(float(factor))


def _refuse_other_leaves(loss: Tensor, leaves: list[Tensor]) -> None:
    """Raise where the loss depends on a tensor whose gradient would silently be lost."""
    seen: set[Any] = set()
    ahead: list[Any] = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and all(leaf is not known for known in leaves):
            raise ValueError(
                f"token_loss depends on a tensor of shape {tuple(leaf.shape)} that requires a gradient, "
                "which fused_policy_loss cannot give it; detach it, or use action_log_probs"
            )
        ahead.extend(parent for parent, _ in node.next_functions)


def _loss_and_hidden_gradient(
    inputs: HeadInputs, token_loss: TokenLoss, rows: Tensor | None
) -> tuple[Tensor, Tensor, Gradients]:
    """Loss, log-probs and the gradient of a frozen head, in one pass over the tiles."""
    scores, hidden_gradient, units = FrozenHead(inputs, rows).scores_with_hidden_slope()
    logp = scores.log_prob
    loss, upstream, _ = _differentiate(token_loss, logp, None, rows, wanted=True)
    if units is None:
        scored = hidden_gradient[: len(logp)]
        scale_rows(scored, upstream, out=scored)
    else:
        units.mul_(upstream)  # the rows are multiplied once, in backward
    if rows is not None:
        spread_rows_(hidden_gradient, rows)
        units = None if units is None else spread(units, rows, len(hidden_gradient))
    return loss, logp, Gradients(hidden=hidden_gradient, hidden_units=units)


def _loss_and_gradients(
    inputs: HeadInputs,
    token_loss: TokenLoss,
    needs: Needs,
    rows: Tensor | None,
    *,
    entropy: bool,
    stash_bytes: int,
) -> tuple[Tensor, Tensor, Tensor | None, Gradients]:
    num_tokens = len(inputs.targets) if rows is None else len(rows)
    # More tokens than vocabulary: 16-bit gradients are summed with tokens outermost, which a stash precludes.
    # A soft-cap's slope, small where it saturates, would be lost in exponentials of 16 bits.
    precluded = num_tokens > len(inputs.weight) or inputs.settings.softcap is not None
    wanted = needs.weight and num_tokens > 0 and not (inputs.settings.precision.narrow and precluded)
    stash = Stash.reserve(inputs, num_tokens, stash_bytes) if wanted else None
    head = TiledHead(inputs, rows, stash)
    scores = head.scores(entropy=entropy)
    logp, entropy_value = scores.log_prob, scores.entropy
    wanted = any(needs)
    loss, logp_gradient, entropy_gradient = _differentiate(
        token_loss, logp, entropy_value, rows, wanted=wanted
    )
    if not wanted:
        return loss, logp, entropy_value, Gradients()
    upstream = Upstream(logp_gradient, entropy_gradient, scores)
    kept = upstream.active_rows()
    if len(kept) < len(logp):
        upstream = upstream.select(kept)
        rows = kept if rows is None else rows[kept]
        head = TiledHead(inputs, rows, None if stash is None else stash.select(kept))
    gradients = head.gradients(upstream, needs, waiting=True)
    return loss, logp, entropy_value, reduce_and_cast(gradients, inputs, waiting=True)
