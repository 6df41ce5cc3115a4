"""Log-probabilities of given tokens: three plain references, and the head that never holds the logits.

The full logits of N tokens take N * V floats, at a vocabulary of 151,936 more than most models.
`action_log_probs` walks them in tiles of a few megabytes: forward keeps a few numbers a token, backward
recomputes each tile that found no place to wait and turns it into its gradient in place.
"""

# N action tokens, V vocabulary, D width, B trajectories, T tokens of one

from typing import Any, Literal, Unpack, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agentrl.ops.frozen_head import FrozenHead
from agentrl.ops.gradient_sums import scale_rows
from agentrl.ops.head_gradients import Gradients, Needs, Upstream, reduce_and_cast
from agentrl.ops.head_inputs import (
    HeadInputs,
    HeadKeywords,
    check_ids,
    is_whole,
    read_head_inputs,
    refuse_batched,
    wants_gradient,
)
from agentrl.ops.logit_map import Scores
from agentrl.ops.stash import Stash
from agentrl.ops.tiled_head import TiledHead
from agentrl.ops.tiles import LogitPrecision
from agentrl.ops.uncompiled import uncompiled


def selected_log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probs (nats, float32, or float64 for float64 logits) [...] of ids [...] under logits [..., V].

    >>> selected_log_probs(torch.zeros(2, 4), torch.tensor([0, 3]))
    tensor([-1.3863, -1.3863])
    """
    if logits.shape[:-1] != ids.shape:
        raise ValueError(
            f"wanted logits [..., V] and ids [...]; got {tuple(logits.shape)} and {tuple(ids.shape)}"
        )
    wide = logits if logits.dtype == torch.float64 else logits.float()
    log_probs = torch.log_softmax(wide, dim=-1)
    try:
        return log_probs.gather(-1, ids[..., None]).squeeze(-1)
    except RuntimeError:  # gather names no position; on CUDA it ends the process instead
        check_ids("ids", ids, logits.shape[-1])
        raise


def chunked_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, chunk_size: int = 1024) -> Tensor:
    """Log-probs (nats) [B, T] of ids [B, T] under hidden [B, T, D] @ weight [V, D].T, in chunks of tokens.

    In float32 they are those of `selected_log_probs` bit for bit where the BLAS sums a chunk's product as it
    sums the whole one, which with AVX-512 all do but a single token's.
    Without gradients, only one chunk's logits exist at a time; with them, autograd keeps every chunk's.

    >>> chunked_log_probs(torch.zeros(1, 3, 2), torch.ones(4, 2), torch.tensor([[0, 1, 3]]), 2)
    tensor([[-1.3863, -1.3863, -1.3863]])
    """
    return _in_chunks(_chunk_log_probs, hidden, weight, ids, chunk_size)


def checkpointed_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, chunk_size: int = 1024) -> Tensor:
    """`chunked_log_probs` whose chunks are recomputed in backward: flat memory for one more forward.

    >>> checkpointed_log_probs(torch.zeros(1, 3, 2), torch.ones(4, 2), torch.tensor([[0, 1, 3]]), 2)
    tensor([[-1.3863, -1.3863, -1.3863]])
    """

    def recomputed(hidden: Tensor, weight: Tensor, ids: Tensor) -> Any:
        return checkpoint(_chunk_log_probs, hidden, weight, ids, use_reentrant=False)

    return _in_chunks(recomputed, hidden, weight, ids, chunk_size)


def _chunk_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return selected_log_probs(hidden @ weight.T, ids)


def _in_chunks(score: Any, hidden: Tensor, weight: Tensor, ids: Tensor, chunk_size: int) -> Tensor:
    if not is_whole(chunk_size) or chunk_size < 1:
        raise ValueError(f"chunk_size must be a whole number, at least 1 token, got {chunk_size!r}")
    if (
        hidden.ndim < 2
        or hidden.shape[:-1] != ids.shape
        or weight.ndim != 2
        or hidden.shape[-1] != weight.shape[1]
    ):
        raise ValueError(
            f"wanted hidden [..., D], weight [V, D] and ids [...]; got {tuple(hidden.shape)}, "
            f"{tuple(weight.shape)} and {tuple(ids.shape)}"
        )
    check_ids("ids", ids, len(weight))
    flat, flat_ids = hidden.flatten(0, -2), ids.flatten()
    # of nearly equal size: the product of a chunk of one token would be summed in another order
    num_chunks = max(1, -(-len(flat_ids) // chunk_size))
    chunks = zip(flat.tensor_split(num_chunks), flat_ids.tensor_split(num_chunks), strict=True)
    parts = [score(some, weight, some_ids) for some, some_ids in chunks]
    return torch.cat(parts).view(ids.shape)


@overload
def action_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    return_entropy: Literal[False] = False,
    recompute: bool = False,
    **keywords: Unpack[HeadKeywords],
) -> Tensor: ...
@overload
def action_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    return_entropy: bool,
    recompute: bool = False,
    **keywords: Unpack[HeadKeywords],
) -> Any: ...
@uncompiled
def action_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    scale: float | None = None,
    return_entropy: bool = False,
    recompute: bool = False,
    tile_bytes: int | None = None,
    logits: LogitPrecision = "float32",
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Log-probs (nats, float32, or float64 for float64 inputs) [N] of targets [N]; entropies [N] if asked.

    With z = softcap * tanh(scale * (hidden @ weight.T + bias) / softcap) / temperature, log p = z[target] -
    lse(z) and H = -sum_v p_v log p_v, both differentiable once in hidden [N, D], weight [V, D], bias [V]
    and a tensor `temperature` [N]. One tile of logits exists at a time (`tile_bytes`, by default 8 MiB on
    CPU, half of that for a trained float32 weight, 64 MiB on CUDA); forward keeps one log-sum-exp (and
    entropy) a token and backward recomputes: four matrix products for both gradients. In float32, forward
    also keeps the exponentials of the first D tokens, in the memory that the weight's gradient will fill:
    three products up to D tokens, 4 - D / N up to 8 D, and four beyond. Tokens whose upstream gradient is
    zero cost nothing in backward.

    A gradient [V, D] of a trained float32 weight thus lives from forward on, one for each graph that is
    alive. Where several wait for one backward, `recompute=True` keeps them to the N numbers and four
    products. So do saved-tensor hooks (`save_on_cpu`, non-reentrant `checkpoint`): they decide what is kept.
    A second backward (retain_graph) recomputes too.

    A frozen weight costs two products: forward then also sums d log p / d hidden, which does not depend on
    the upstream gradient. With entropy it costs three, of which backward skips idle tokens: a sum for
    d H / d hidden beside the first would be a third product too.

    Where rounding remains: the target's logit is computed in float64, so that its rounding, most of a
    log-prob's error, is gone; log-sum-exp and gradients are summed in float32. For 16-bit inputs,
    `logits="float32"` rounds no logit to 16 bits; `"input"` does, and is faster, most of all on CPUs without
    Intel's AMX, where products of widened factors are float32 ones. Elsewhere the factors of both gradient
    products have 16 bits (a tile's dz is rounded, as autograd rounds it for full logits). The sum is rounded
    once to the gradient's dtype; for bfloat16 with `"input"` on CPUs without AMX, so is each tile's
    contribution before it is summed.

    `group`: each rank holds the rows [V/K, D] of a vocabulary sharded in rank order, with its part of the
    bias, and the same hidden, targets (ids in the whole vocabulary) and upstream gradients. Log-sum-exp and
    target logit are combined by all-reduce, so is hidden's gradient, which is complete on every rank.

    Under autocast, hidden and weight are cast as nn.Linear would cast them. A weight sharded by FSDP2 is
    gathered once, and its gradient averaged over the ranks. torch.compile ends its graph before the head,
    which runs as it is, so not under fullgraph=True. Raises ValueError for inputs that do not fit,
    RuntimeError under torch.func and for a second derivative.

    Source of the recomputation: Wijmans et al. 2024, Cut Your Losses in Large-Vocabulary Language Models.

    >>> hidden, weight = torch.zeros(3, 2), torch.ones(4, 2)
    >>> action_log_probs(hidden, weight, torch.tensor([0, 1, 3]))
    tensor([-1.3863, -1.3863, -1.3863])
    >>> action_log_probs(hidden, weight, torch.tensor([0, 1, 3]), return_entropy=True)[1]
    tensor([1.3863, 1.3863, 1.3863])
    """
    inputs = read_head_inputs(
        "action_log_probs",
        1 + return_entropy,
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
        stashed=not recompute and wants_gradient(weight),
    )
    stash = None if recompute else _reserve(inputs)
    source = [inputs.hidden[:0].clone()]  # in a list, it is no input that wants a gradient
    log_probs, entropy = _HeadLogProbs.apply(return_entropy, torch.is_grad_enabled(), stash, source, *inputs)
    return (log_probs, entropy) if return_entropy else log_probs


# Beyond this many times D tokens, the exponentials of D save less than 3% of the products.
_MOST_STASHED = 8


def _reserve(inputs: HeadInputs) -> Stash | None:
    """Room for exponentials in the weight's gradient, where that saves products and rounds nothing."""
    num_tokens, width = inputs.hidden.shape
    hooked = cast(Any, torch._C)._autograd._top_saved_tensors_default_hooks(True) is not None
    worth_it = 0 < num_tokens <= _MOST_STASHED * width and not inputs.settings.precision.narrow
    return (
        Stash.reserve(inputs, num_tokens)
        if wants_gradient(inputs.weight) and worth_it and not hooked
        else None
    )


class _HeadLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        entropy: bool,
        grad_enabled: bool,
        stash: Stash | None,
        source: list[Tensor],
        *arguments: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """`source` [0, D] comes from hidden: it leads a second derivative there, and holds nothing of it."""
        inputs = HeadInputs(*arguments)
        ctx.set_materialize_grads(False)
        ctx.settings = inputs.settings
        ctx.needs = Needs(*ctx.needs_input_grad[4:8])
        ctx.hidden_slope_known = grad_enabled and ctx.needs.only_hidden() and not entropy
        with torch.autocast(inputs.hidden.device.type, enabled=False):
            if ctx.hidden_slope_known:
                scores, *slope = FrozenHead(inputs).scores_with_hidden_slope()
                ctx.save_for_backward(*slope, *source)
                return scores.log_prob, None
            scores = TiledHead(inputs, stash=stash).scores(entropy=entropy)
        ctx.save_for_backward(*inputs[:5], *scores)
        ctx.stash = stash
        # copies, which the caller may overwrite
        return scores.log_prob.clone(), None if scores.entropy is None else scores.entropy.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        given = [gradient for gradient in upstream if gradient is not None]
        if not given:
            return (None,) * 10
        refuse_batched("action_log_probs", given)
        saved = ctx.saved_tensors  # unpacked once, as a checkpoint demands
        with torch.no_grad(), torch.autocast(given[0].device.type, enabled=False):
            found = (
                _hidden_gradient(saved[0], saved[1], given[0])
                if ctx.hidden_slope_known
                else _gradients(ctx, saved, *upstream)
            )
        parts = (found.hidden, found.weight, found.bias, found.temperatures)
        if torch.is_grad_enabled():
            sources = [t for t in (*upstream, *saved) if t is not None and t.requires_grad]
            parts = tuple(None if part is None else _Once.apply(part, *sources) for part in parts)
        return (None,) * 4 + (*parts, None, None)


def _hidden_gradient(slope: Tensor, units: Tensor | None, upstream: Tensor) -> Gradients:
    gradient = torch.empty_like(slope)
    scale_rows(slope, upstream, out=gradient, units=units)
    return Gradients(hidden=gradient)


@uncompiled
def _gradients(
    ctx: Any, saved: tuple[Any, ...], logp_gradient: Tensor | None, entropy_gradient: Tensor | None
) -> Gradients:
    tensors, scores = saved[:5], Scores(*saved[5:])
    stash, ctx.stash = ctx.stash, None  # its memory goes out as the weight's gradient
    inputs = HeadInputs(*tensors, settings=ctx.settings)
    if logp_gradient is None:
        logp_gradient = torch.zeros_like(scores.log_prob)
    upstream = Upstream(logp_gradient, entropy_gradient, scores)
    rows = upstream.active_rows()
    if len(rows) == len(logp_gradient):
        return reduce_and_cast(TiledHead(inputs, stash=stash).gradients(upstream, ctx.needs), inputs)
    head = TiledHead(inputs, rows, None if stash is None else stash.select(rows))
    return reduce_and_cast(head.gradients(upstream.select(rows), ctx.needs), inputs)


class _Once(torch.autograd.Function):
    """Marks a gradient that was asked for with create_graph=True: going on to its sources is an error."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "the tiled head is differentiable once; for a second derivative use "
            "selected_log_probs(hidden @ weight.T, targets)"
        )
