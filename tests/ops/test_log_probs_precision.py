"""Error budgets: an error against float64 is at most twice that of full logits in the same dtype."""

# N action tokens, V vocabulary, D width

from typing import Any

import pytest
import torch
from tests.ops.conftest import BOTH_WAYS, choose, draw_same_signed, needs_gemm, relative_error
from torch import Tensor

from agentrl.ops.fused_loss import fused_policy_loss
from agentrl.ops.log_probs import action_log_probs, selected_log_probs
from agentrl.ops.tiles import Precision, wide_product


def truth(hidden: Tensor, weight: Tensor, targets: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
    """Log-probs and gradients in float64 from the same (rounded) inputs."""
    leaves = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    log_probs = selected_log_probs(leaves[0] @ leaves[1].T, targets)
    return log_probs.detach(), *torch.autograd.grad(log_probs, leaves, upstream.double())


def draw(n: int, v: int, d: int, dtype: torch.dtype, peak: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Half of the targets are the likeliest token, as sampled tokens are; `peak` is the logits' spread."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, d, generator=generator).to(dtype)
    weight = (torch.randn(v, d, generator=generator) * peak / d**0.5).to(dtype)
    targets = torch.randint(v, (n,), generator=generator)
    likeliest = (hidden.float() @ weight.float().T).argmax(1)
    targets = torch.where(torch.arange(n) % 2 == 0, likeliest, targets)
    return hidden.requires_grad_(), weight.requires_grad_(), targets, torch.randn(n, generator=generator)


@pytest.mark.parametrize("peak", [1.0, 8.0])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("dtype", "logits", "native"),
    [
        (torch.float32, "float32", False),
        pytest.param(torch.bfloat16, "float32", True, marks=needs_gemm),
        (torch.bfloat16, "float32", False),
        (torch.bfloat16, "input", False),
        (torch.float16, "float32", False),
    ],
)
def test_errors_are_within_twice_those_of_full_logits(
    dtype: torch.dtype, logits: str, native: bool, frozen: bool, peak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, native)
    hidden, weight, targets, upstream = draw(48, 3000, 128, dtype, peak)
    exact, hidden_exact, weight_exact = truth(hidden, weight, targets, upstream)
    plain = selected_log_probs(hidden @ weight.T, targets)
    plain_hidden, plain_weight = torch.autograd.grad(plain, (hidden, weight), upstream)
    head = weight.detach() if frozen else weight
    ours = action_log_probs(hidden, head, targets, logits=logits, tile_bytes=1 << 17)  # type: ignore[arg-type]

    assert ours.dtype == torch.float32
    worst, plain_worst = ((found.double() - exact).abs().max() for found in (ours, plain))
    assert worst <= 2 * plain_worst + 1e-6
    if logits == "float32":
        # four float32 roundings of the largest logit; one bf16 rounding is 16,000 times as much
        largest = (hidden.double() @ weight.double().T).abs().max()
        assert worst <= 4 * torch.finfo(torch.float32).eps * largest
    gradients = torch.autograd.grad(ours, [hidden] if frozen else [hidden, weight], upstream)
    assert relative_error(gradients[0], hidden_exact) <= 2 * relative_error(plain_hidden, hidden_exact) + 1e-5
    if not frozen:
        assert (
            relative_error(gradients[1], weight_exact)
            <= 2 * relative_error(plain_weight, weight_exact) + 1e-5
        )


@pytest.mark.parametrize("native", BOTH_WAYS)
@pytest.mark.parametrize("tile_bytes", [1 << 12, 1 << 16, 1 << 20, None])
def test_a_bf16_weight_gradient_over_many_same_signed_tokens(
    tile_bytes: int | None, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, native)
    hidden, weight, targets, upstream = draw_same_signed(12, 8)
    _, _, exact = truth(hidden, weight, targets, upstream)
    log_probs = action_log_probs(hidden, weight, targets, tile_bytes=tile_bytes)
    (found,) = torch.autograd.grad(log_probs, weight, upstream)
    assert float(((found.double() - exact).abs() / exact.abs()).max()) <= 4e-3


def error_before_the_cast(v: int, d: int, tile_bytes: int | None, *, with_hidden: bool, fused: bool) -> float:
    """The largest relative error of the same weight gradient, less that of rounding the exact one."""
    hidden, weight, targets, upstream = draw_same_signed(v, d)
    hidden.requires_grad_(with_hidden)
    _, _, exact = truth(hidden, weight, targets, upstream)
    if fused:
        loss = fused_policy_loss(
            hidden, weight, targets, lambda p, _, i: upstream[i] * p, tile_bytes=tile_bytes
        ).loss
    else:
        loss = action_log_probs(hidden, weight, targets, tile_bytes=tile_bytes) @ upstream
    (found,) = torch.autograd.grad(loss, weight)
    error, rounding = ((part.double() - exact).abs() for part in (found, exact.bfloat16()))
    return float(((error - rounding) / exact.abs()).max())


@pytest.mark.parametrize("native", BOTH_WAYS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("with_hidden", [False, True])
@pytest.mark.parametrize("tile_bytes", [1 << 12, 1 << 16, 1 << 20, None])
@pytest.mark.parametrize(("v", "d"), [(12, 8), (24, 16), (40, 64)])
def test_a_weight_gradient_is_rounded_once(
    v: int,
    d: int,
    tile_bytes: int | None,
    with_hidden: bool,
    fused: bool,
    native: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choose(monkeypatch, native)
    assert error_before_the_cast(v, d, tile_bytes, with_hidden=with_hidden, fused=fused) <= 1e-4


def test_a_tile_rounded_before_it_is_added_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, native=False)
    monkeypatch.setattr(Precision, "gradient_operands", property(lambda self: self.inputs))
    assert error_before_the_cast(40, 64, None, with_hidden=True, fused=False) > 1e-3


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_float32_log_prob_is_within_two_roundings_of_the_exact_one(temperature: float) -> None:
    """Logits of deviation 3, any target: what is left is little more than the rounding of the result."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 512, generator=generator)
    weight = torch.randn(20_000, 512, generator=generator) * (3 * temperature / 512**0.5)
    targets = torch.randint(20_000, (64,), generator=generator)
    exact = selected_log_probs((hidden.double() @ weight.double().T) / temperature, targets)
    ours = action_log_probs(hidden, weight, targets, temperature=temperature)
    plain = selected_log_probs((hidden @ weight.T) / temperature, targets)
    worst, plain_worst, rounding = (
        (found.double() - exact).abs().max() for found in (ours, plain, exact.float())
    )
    assert worst <= 2 * rounding
    assert worst <= plain_worst / 4


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("softcap", [None, 40.0])
def test_a_confident_token_keeps_its_digits(softcap: float | None, recompute: bool) -> None:
    """p is near 1 - 1e-5: float32 full logits lose all but two digits of log p and of d log p / d z."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 256, generator=generator)
    weight = torch.randn(3000, 256, generator=generator) * 0.05
    targets = torch.arange(6)
    weight[:6] = hidden * 0.09  # a logit of 20 to 26 for the target, of about 1 for the others
    exact_leaves = [t.double().requires_grad_() for t in (hidden, weight, torch.zeros(3000))]

    def full(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        logits = hidden @ weight.T + bias
        return selected_log_probs(logits if softcap is None else softcap * (logits / softcap).tanh(), targets)

    exact = full(*exact_leaves)
    (wanted,) = torch.autograd.grad(exact.sum(), exact_leaves[2])
    exact = exact.detach()
    bias, head = torch.zeros(3000, requires_grad=True), weight.requires_grad_()
    ours = action_log_probs(hidden, head, targets, bias=bias, softcap=softcap, recompute=recompute)
    (found,) = torch.autograd.grad(ours.sum(), bias)
    assert bool(((exact > -1e-3) & (exact < -1e-9)).all())
    torch.testing.assert_close(ours.detach().double(), exact, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(found[:6].double(), wanted[:6], rtol=2e-5, atol=0.0)


@pytest.mark.parametrize("num_active", [1, 17])
@pytest.mark.parametrize("trained", ["both", "hidden", "temperature"])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_at_logits_of_thousands(
    recompute: bool, with_entropy: bool, trained: str, num_active: int
) -> None:
    """A float32 log-sum-exp is rounded by 1e-4 there, one likely id's distance to it is not."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(17, 2, generator=generator) * 3000
    weight = torch.randn(7, 2, generator=generator)
    targets = torch.randint(7, (17,), generator=generator)
    temperature = torch.rand(17, generator=generator) + 0.5
    upstream = torch.randn(2, 17, generator=generator) * (torch.arange(17) < num_active)

    def differentiate(dtype: torch.dtype, ours: bool) -> tuple[Tensor, ...]:
        h, w, t = (part.to(dtype, copy=True) for part in (hidden, weight, temperature))
        leaves = {"both": [h, w], "hidden": [h], "temperature": [h, w, t]}[trained]
        for leaf in leaves:
            leaf.requires_grad_()
        if ours:
            keywords: Any = {"recompute": recompute, "tile_bytes": 70}
            scores = action_log_probs(h, w, targets, temperature=t, return_entropy=with_entropy, **keywords)
            scores = scores if with_entropy else (scores,)
        else:
            every = torch.log_softmax(h @ w.T / t[:, None], -1)
            entropy = -(every.exp() * every).sum(1)
            scores = (every.gather(1, targets[:, None]).squeeze(1), entropy)[: 1 + with_entropy]
        return torch.autograd.grad(scores, leaves, tuple(upstream.to(dtype)[: 1 + with_entropy]))

    exact = differentiate(torch.float64, False)
    found, plain = differentiate(torch.float32, True), differentiate(torch.float32, False)
    for wanted, one, other in zip(exact, found, plain, strict=True):
        error, plain_error = ((part - wanted).abs().max() for part in (one, other))
        assert error <= 2 * plain_error + 4e-7 * wanted.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("way", ["kept", "recomputed", "frozen", "fused"])
def test_the_slope_of_a_saturated_soft_cap(way: str, dtype: torch.dtype) -> None:
    """1 - tanh^2 of a logit near the cap: 1e-3 at the likeliest ids, 20 roundings of it at most are lost."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(8, 8, generator=generator)
    weight = (torch.randn(33, 8, generator=generator) * 0.1 + hidden.mean(0)).to(dtype)
    hidden = (hidden * 0.1 + hidden.mean(0) * 5 / hidden.mean(0).square().sum()).to(dtype)
    targets = torch.randint(33, (8,), generator=generator)
    leaf, head = hidden.double().requires_grad_(), weight.double().requires_grad_()
    z = leaf @ head.T
    assert float(z.detach().min()) > 4  # slopes of 1e-3 and less
    exact = torch.log_softmax(1.3 * torch.tanh(z), -1).gather(1, targets[:, None])
    wanted = torch.autograd.grad(exact.sum(), (leaf, head))
    hidden.requires_grad_()
    weight.requires_grad_(way != "frozen")
    arguments: Any = {"softcap": 1.3, "scale": 1.3, "tile_bytes": 500}
    if way == "fused":
        loss = fused_policy_loss(hidden, weight, targets, lambda p, *_: p, **arguments).loss
    else:
        loss = action_log_probs(hidden, weight, targets, recompute=way == "recomputed", **arguments).sum()
    leaves = [hidden] if way == "frozen" else [hidden, weight]
    for found, right in zip(torch.autograd.grad(loss, leaves), wanted, strict=False):
        limit = 5e-3 if dtype == torch.float16 else 1e-3
        assert float((found.double() - right).abs().max()) <= limit * float(right.abs().max())


def test_a_log_prob_is_at_most_zero_and_an_entropy_at_least() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for num_vocab in (1, 2, 7):
            hidden = (torch.randn(200, 3, generator=generator) * 100).to(dtype)
            weight = torch.randn(num_vocab, 3, generator=generator).to(dtype)
            likeliest = (hidden @ weight.T).argmax(1)
            log_probs, entropy = action_log_probs(
                hidden, weight, likeliest, temperature=0.7, return_entropy=True
            )
            assert float(log_probs.max()) <= 0
            assert float(entropy.min()) >= 0


@pytest.mark.parametrize("native", BOTH_WAYS)
def test_a_bf16_logit_is_that_of_float32(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact factors, float32 sums: the error against float64 is that of a float32 product."""
    choose(monkeypatch, native)
    lhs, rhs = (torch.randn(size, 512, generator=torch.Generator().manual_seed(size)) for size in (70, 300))
    lhs, rhs, out = lhs.bfloat16(), rhs.bfloat16(), torch.empty(70, 300)
    precision = Precision(torch.bfloat16, out.device, "float32")
    operands = precision.logit_operands
    assert operands == (torch.bfloat16 if native else torch.float32)
    wide_product(lhs.to(operands), rhs.to(operands).T, out)
    exact = lhs.double() @ rhs.double().T
    error, plain = ((found.double() - exact).abs().max() for found in (out, lhs.float() @ rhs.float().T))
    assert error <= 2 * plain
