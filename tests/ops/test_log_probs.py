"""The head against full logits: values, gradients, odd sizes, low precision, NaN, errors."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.conftest import BOTH_WAYS, choose
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

from agentrl.ops import tiled_head
from agentrl.ops.head_gradients import Upstream
from agentrl.ops.log_probs import (
    action_log_probs,
    checkpointed_log_probs,
    chunked_log_probs,
    selected_log_probs,
)


def full(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [N] from full logits, by plain autograd."""
    logits = hidden @ weight.T
    logits = logits if bias is None else logits + bias
    logits = logits * (1.0 if scale is None else scale)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    log_probs = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
    entropy = torch.special.entr(log_probs.exp()).sum(-1)
    return log_probs.gather(1, targets[:, None]).squeeze(1), entropy


def problem(n: int, v: int, d: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(v, d, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(v, (n,), generator=generator)
    upstream = torch.randn(n, generator=generator, dtype=torch.float64)
    return hidden, weight, targets, upstream


def agree(ours: Any, plain: Any) -> None:
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 40),
    v=st.integers(1, 60),
    d=st.integers(1, 9),
    tile_bytes=st.sampled_from([1, 64, 1000, 4096, None]),
    share_active=st.sampled_from([0.0, 0.3, 1.0]),
    softcap=st.sampled_from([None, 2.0]),
    scale=st.sampled_from([None, 0.7]),
    temperature=st.sampled_from([0.6, "each"]),
    with_bias=st.booleans(),
    with_entropy=st.booleans(),
    frozen=st.booleans(),
)
def test_equals_full_logits(
    n: int,
    v: int,
    d: int,
    tile_bytes: int | None,
    share_active: float,
    softcap: float | None,
    scale: float | None,
    temperature: Any,
    with_bias: bool,
    with_entropy: bool,
    frozen: bool,
) -> None:
    hidden, weight, targets, upstream = problem(n, v, d)
    upstream = upstream * (torch.rand(n) < share_active)
    bias = torch.randn(v, dtype=torch.float64).requires_grad_(not frozen) if with_bias else None
    if temperature == "each":
        temperature = (torch.rand(n, dtype=torch.float64) + 0.5).requires_grad_(not frozen)
    weight = weight.detach().requires_grad_(not frozen)
    arguments: dict[str, Any] = {
        "bias": bias, "temperature": temperature, "softcap": softcap, "scale": scale
    }  # fmt: skip
    ours = action_log_probs(
        hidden, weight, targets, return_entropy=with_entropy, tile_bytes=tile_bytes, **arguments
    )
    plain = full(hidden, weight, targets, **arguments)
    if with_entropy:
        agree(ours, plain)
        ours_loss = (ours[0] * upstream).sum() + (ours[1] * upstream.flip(0)).sum()
        plain_loss = (plain[0] * upstream).sum() + (plain[1] * upstream.flip(0)).sum()
    else:
        agree(ours, plain[0])
        ours_loss, plain_loss = (ours * upstream).sum(), (plain[0] * upstream).sum()
    leaves = [t for t in (hidden, weight, bias, temperature) if isinstance(t, Tensor) and t.requires_grad]
    agree(torch.autograd.grad(ours_loss, leaves), torch.autograd.grad(plain_loss, leaves))


@pytest.mark.parametrize("entropy", [False, True])
def test_gradcheck(entropy: bool) -> None:
    hidden, weight, targets, _ = problem(5, 7, 3)
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True)
    temperature = (torch.rand(5, dtype=torch.float64) + 0.5).requires_grad_()

    def score(*leaves: Tensor) -> Any:
        return action_log_probs(
            leaves[0], leaves[1], targets, bias=leaves[2], temperature=leaves[3], softcap=3.0, scale=1.5,
            return_entropy=entropy, tile_bytes=64,
        )  # fmt: skip

    # a second backward recomputes what the first one read
    assert gradcheck(score, (hidden, weight, bias, temperature), nondet_tol=1e-14)


def test_a_frozen_weight_passes_gradcheck() -> None:
    hidden, weight, targets, _ = problem(5, 7, 3)
    frozen = weight.detach()
    assert gradcheck(lambda h: action_log_probs(h, frozen, targets, softcap=2.0, tile_bytes=64), (hidden,))


def test_the_references_refuse_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"got \(2, 4\) and \(1,\)"):
        selected_log_probs(torch.zeros(2, 4), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"weight \[V, D\]"):
        chunked_log_probs(torch.zeros(2, 4), torch.zeros(4), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"wanted hidden .* got \(4,\)"):
        chunked_log_probs(torch.zeros(4), torch.zeros(3, 4), torch.tensor(0))
    with pytest.raises(ValueError, match=r"chunk_size must be a whole number, .* got 1\.5"):
        chunked_log_probs(torch.zeros(2, 4), torch.zeros(3, 4), torch.tensor([0, 1]), 1.5)  # type: ignore[arg-type]


def test_the_references_name_an_id_out_of_range() -> None:
    ids = torch.tensor([[0, 2], [1, 4]])
    with pytest.raises(
        ValueError, match=r"ids\[1, 1\] is 4, outside the vocabulary of 4 rows \(1 of 4 are\)"
    ):
        selected_log_probs(torch.zeros(2, 2, 4), ids)
    for score in (chunked_log_probs, checkpointed_log_probs):
        with pytest.raises(ValueError, match=r"ids\[1, 1\] is 4, outside the vocabulary of 4 rows"):
            score(torch.zeros(2, 2, 3), torch.zeros(4, 3), ids, chunk_size=1)


@pytest.mark.parametrize(("n", "chunk_size"), [(12, 5), (21, 5), (33, 32), (1025, 1024)])
def test_the_references_agree_bit_for_bit(n: int, chunk_size: int) -> None:
    """Also where the last chunk would hold a single token. Of the whole product, as far as the BLAS does."""
    hidden, weight, targets, _ = problem(n, 50, 8, torch.float32)
    rows, ids = hidden.view(1, n, 8), targets.view(1, n)
    grads = []
    for score in (chunked_log_probs, checkpointed_log_probs):
        result = score(rows, weight, ids, chunk_size=chunk_size)
        parts = rows[0].tensor_split(-(-n // chunk_size))
        assert torch.equal(
            result, selected_log_probs(torch.cat([part @ weight.T for part in parts])[None], ids)
        )
        if n == 12:
            assert torch.equal(result, selected_log_probs(rows @ weight.T, ids))
        grads.append(torch.autograd.grad(result.square().sum(), (hidden, weight)))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    with pytest.raises(ValueError, match="at least 1 token"):
        chunked_log_probs(rows, weight, ids, chunk_size=0)


def test_no_tokens_give_empty_results_and_zero_gradients() -> None:
    hidden, weight, targets, _ = problem(0, 5, 3, torch.float32)
    for frozen in (False, True):
        result = action_log_probs(hidden, weight.detach() if frozen else weight, targets)
        assert result.shape == (0,)
        assert result.dtype == torch.float32
        result.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.shape == (0, 3)
    assert torch.equal(weight.grad, torch.zeros(5, 3))


@pytest.mark.parametrize("frozen", [False, True])
def test_nan_stays_in_its_row(frozen: bool) -> None:
    hidden, weight, targets, upstream = problem(9, 20, 4)
    weight = weight.detach().requires_grad_(not frozen)
    upstream = upstream.index_fill(0, torch.tensor(3), 0.0)
    wanted = [hidden] if frozen else [hidden, weight]
    clean = torch.autograd.grad(full(hidden, weight, targets)[0], wanted, upstream)
    dirty = hidden.detach().clone()
    dirty[3, 1] = torch.nan
    dirty.requires_grad_()
    result = action_log_probs(dirty, weight, targets, tile_bytes=200)
    assert result.isnan().tolist() == [i == 3 for i in range(9)]
    wanted = [dirty] if frozen else [dirty, weight]
    agree(torch.autograd.grad(result, wanted, upstream), clean)


@pytest.mark.parametrize("entropy", [False, True])
def test_a_padded_vocabulary_stays_finite(entropy: bool) -> None:
    """A first tile of nothing but -inf must not give -inf - (-inf)."""
    hidden, weight, _, upstream = problem(6, 40, 4)
    targets = torch.randint(20, 40, (6,))
    bias = torch.zeros(40, dtype=torch.float64)
    bias[:20] = -torch.inf
    ours = action_log_probs(hidden, weight, targets, bias=bias, return_entropy=entropy, tile_bytes=8 * 6 * 10)
    hidden2, weight2 = hidden.detach().requires_grad_(), weight.detach()[20:].requires_grad_()
    plain = full(hidden2, weight2, targets - 20)
    loss = (ours[0] * upstream + ours[1]).sum() if entropy else (ours * upstream).sum()
    plain_loss = (plain[0] * upstream + plain[1]).sum() if entropy else (plain[0] * upstream).sum()
    agree(loss, plain_loss)
    ours_grad = torch.autograd.grad(loss, (hidden, weight))
    plain_grad = torch.autograd.grad(plain_loss, (hidden2, weight2))
    agree(ours_grad[0], plain_grad[0])
    agree(ours_grad[1][20:], plain_grad[1])
    assert torch.equal(ours_grad[1][:20], torch.zeros(20, 4, dtype=torch.float64))


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.tensor([[1e4], [-1e4], [0.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    for softcap in (None, 30.0):
        for targets in (torch.tensor([0, 0, 0]), torch.tensor([1, 2, 0])):
            logp, entropy = action_log_probs(
                hidden, weight, targets, softcap=softcap, return_entropy=True, tile_bytes=8
            )
            grads = torch.autograd.grad((logp + entropy).sum(), (hidden, weight))
            assert all(bool(part.isfinite().all()) for part in (logp, entropy, *grads))
            # float32 rounds a logit of 30 by 2e-6, one of 1e4 by 5e-4: relative to the log-prob, 1e-7
            exact = full(hidden.double(), weight.double(), targets, softcap=softcap)[0]
            torch.testing.assert_close(logp.double(), exact, rtol=1e-6, atol=4e-6)


def test_a_zero_upstream_gives_zero_gradients() -> None:
    hidden, weight, targets, _ = problem(4, 9, 3)
    grads = torch.autograd.grad((action_log_probs(hidden, weight, targets) * 0).sum(), (hidden, weight))
    assert all(torch.equal(part, torch.zeros_like(part)) for part in grads)


def test_strides_tied_weights_and_checkpoint_change_nothing() -> None:
    hidden, weight, targets, upstream = problem(10, 17, 6)
    plain = torch.autograd.grad((full(hidden, weight, targets)[0] * upstream).sum(), (hidden, weight))
    strided = [t.detach().T.contiguous().T.requires_grad_() for t in (hidden, weight)]
    agree(torch.autograd.grad(action_log_probs(*strided, targets), strided, upstream), plain)
    again = checkpoint(lambda h, w: action_log_probs(h, w, targets), hidden, weight, use_reentrant=False)
    agree(torch.autograd.grad(again, (hidden, weight), upstream), plain)
    table = weight.detach().requires_grad_()
    tied = [
        torch.autograd.grad((score * upstream).sum(), table)[0]
        for score in (
            action_log_probs(table[targets], table, targets),
            full(table[targets], table, targets)[0],
        )
    ]
    agree(*tied)


def test_autocast_and_no_grad() -> None:
    hidden, weight, targets, upstream = problem(10, 17, 8, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = action_log_probs(hidden, weight, targets)
    rounded = action_log_probs(hidden.bfloat16(), weight.bfloat16(), targets)
    assert result.dtype == torch.float32
    assert torch.equal(result, rounded)
    (result * upstream).sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32
    with torch.no_grad():
        assert not action_log_probs(hidden, weight, targets).requires_grad


def test_autocast_leaves_alone_what_linear_leaves_alone() -> None:
    hidden, weight, targets, _ = problem(10, 17, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.nn.functional.linear(hidden, weight).dtype == torch.float64
        agree(action_log_probs(hidden, weight, targets), full(hidden, weight, targets)[0])
        with pytest.raises(ValueError, match=r"got torch\.int64"):
            action_log_probs(hidden.long(), weight.float(), targets)


def test_a_second_derivative_is_refused() -> None:
    hidden, weight, targets, _ = problem(4, 9, 3)
    for head in (weight, weight.detach()):
        (grad,) = torch.autograd.grad(
            action_log_probs(hidden, head, targets).sum(), hidden, create_graph=True
        )
        with pytest.raises(RuntimeError, match="differentiable once"):
            grad.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="differentiable once"):  # not zeros for an unused input
            torch.autograd.grad(grad.sum(), hidden, allow_unused=True)
        log_probs = action_log_probs(hidden, head, targets)
        with pytest.raises(RuntimeError, match="one upstream gradient at a time"):
            torch.autograd.grad(log_probs, hidden, torch.eye(4).double(), is_grads_batched=True)


def test_torch_func_is_refused() -> None:
    hidden, weight, targets, _ = problem(4, 9, 3)
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.grad(lambda h: action_log_probs(h, weight, targets).sum())(hidden.detach())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.tensor([0, 1, 9, 2])}, r"targets\[2\] is 9, outside the vocabulary of 9 rows"),
        ({"targets": torch.tensor([0, -100, 8, -1])}, r"targets\[1\] is -100.*2 of 4"),
        ({"targets": torch.tensor([0, 1, 2])}, "hidden has 4 tokens but targets has 3"),
        ({"targets": torch.zeros(4)}, "int64 token ids, got torch.float32"),
        ({"hidden": torch.zeros(4, 2)}, "width 2 but weight"),
        ({"hidden": torch.zeros(1, 4, 3)}, "flatten rows first"),
        ({"hidden": torch.zeros(4, 3, dtype=torch.float16)}, "weight is torch.float32"),
        ({"hidden": torch.zeros(4, 3, dtype=torch.int64)}, "got torch.int64"),
        ({"targets": torch.zeros(4, dtype=torch.int64, device="meta")}, "targets is on meta"),
        ({"weight": torch.zeros(0, 3)}, "must not be empty"),
        ({"bias": torch.zeros(8)}, r"bias must have shape \(9,\)"),
        ({"bias": torch.zeros(9, dtype=torch.int64)}, "bias must be floating point"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"temperature": torch.ones(3)}, r"shape \(4,\), one a token"),
        (
            {"temperature": torch.tensor([1.0, 1.0, 0.0, 1.0])},
            r"temperature\[2\] must be positive and finite, got 0.0",
        ),
        ({"temperature": torch.full((4,), torch.inf)}, r"temperature\[0\] must be positive and finite"),
        ({"temperature": torch.full((4,), 1e-46, dtype=torch.float64)}, r"1e-46, used in torch.float32"),
        ({"temperature": torch.tensor(2)}, r"got torch.int64 of shape \(\)"),
        ({"temperature": None}, "temperature must be positive and finite, got None"),
        ({"hidden": None}, "hidden must be a dense tensor, got NoneType"),
        ({"targets": [0, 1, 2, 3]}, "targets must be a dense tensor, got list"),
        ({"hidden": torch.zeros(4, 3).to_sparse()}, "dense tensor, got torch.sparse_coo"),
        ({"softcap": True}, "softcap must be positive and finite, or None for no softcap; got True"),
        ({"scale": "2"}, "scale must be positive and finite, or None for no scale; got '2'"),
        ({"tile_bytes": 1.5}, "positive whole number, got 1.5"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"scale": float("nan")}, "scale must be positive"),
        ({"tile_bytes": 0}, "tile_bytes must be a positive"),
        ({"logits": "bf16"}, "'float32' or 'input', got 'bf16'"),
    ],
)
def test_wrong_input_is_named(change: dict[str, Any], message: str) -> None:
    given = {
        "hidden": torch.zeros(4, 3),
        "weight": torch.zeros(9, 3),
        "targets": torch.zeros(4).long(),
        **change,
    }
    with pytest.raises(ValueError, match=message):
        action_log_probs(**given)


@pytest.mark.parametrize("frozen", [False, True])
def test_create_graph_inside_a_checkpoint(frozen: bool) -> None:
    """The first derivative is there, and the second is refused in the head's own words."""
    hidden, weight, targets, upstream = problem(5, 9, 4)
    weight.requires_grad_(not frozen)
    scores = checkpoint(lambda h: action_log_probs(h, weight, targets), hidden, use_reentrant=False)
    (found,) = torch.autograd.grad(scores, hidden, upstream, create_graph=True)
    agree(found, torch.autograd.grad(full(hidden, weight, targets)[0], hidden, upstream)[0])
    with pytest.raises(RuntimeError, match="differentiable once"):
        found.sum().backward()


def test_what_comes_out_may_be_overwritten() -> None:
    hidden, weight, targets, upstream = problem(5, 9, 4)
    ours = action_log_probs(hidden, weight, targets, return_entropy=True)
    plain = full(hidden, weight, targets)
    found, wanted = (
        torch.autograd.grad(p.exp_() + h.mul_(2.0), (hidden, weight), upstream) for p, h in (ours, plain)
    )
    agree(found, wanted)


def test_a_log_sum_exp_of_the_wrong_tile_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: backward reads the next token's log-sum-exp."""
    hidden, weight, targets, upstream = problem(8, 30, 4)
    plain = torch.autograd.grad((full(hidden, weight, targets)[0] * upstream).sum(), (hidden, weight))
    sloped = tiled_head.TiledHead._sloped

    def shifted(self: Any, upstream: Any) -> Any:
        right, unscale = sloped(self, upstream)
        scores = right.scores._replace(log_total=right.scores.log_total.roll(1))
        return Upstream(right.logp, None, scores), unscale

    monkeypatch.setattr(tiled_head.TiledHead, "_sloped", shifted)
    wrong = torch.autograd.grad(action_log_probs(hidden, weight, targets), (hidden, weight), upstream)
    with pytest.raises(AssertionError):
        agree(wrong, plain)


@pytest.mark.parametrize("native", BOTH_WAYS)
@pytest.mark.parametrize("tile_bytes", [None, 9 * 13 * 4])
def test_nan_of_a_frozen_bf16_head_stays_in_its_row(
    tile_bytes: int | None, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bfloat16 product of an odd number of terms may multiply the row below by 0, NaN too."""
    choose(monkeypatch, native)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 16, generator=generator).bfloat16() for rows in (75, 111))
    hidden[36] = torch.nan
    hidden.requires_grad_()
    log_probs = action_log_probs(hidden, weight, torch.arange(75), tile_bytes=tile_bytes)
    (gradient,) = torch.autograd.grad(log_probs, hidden, torch.ones(75))
    assert gradient.isnan().any(1).nonzero().flatten().tolist() == [36]
