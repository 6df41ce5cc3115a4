"""Error budgets: an error against float64 is at most twice that of full logits in the same dtype."""

# N action tokens, V vocabulary, D width

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.ops.log_probs import action_log_probs, selected_log_probs
from agentrl.ops.tiles import Precision, logit_product


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
    ("dtype", "logits"),
    [
        (torch.float32, "float32"),
        (torch.bfloat16, "float32"),
        (torch.bfloat16, "input"),
        (torch.float16, "float32"),
    ],
)
def test_errors_are_within_twice_those_of_full_logits(
    dtype: torch.dtype, logits: str, frozen: bool, peak: float
) -> None:
    hidden, weight, targets, upstream = draw(48, 3000, 128, dtype, peak)
    exact, hidden_exact, weight_exact = truth(hidden, weight, targets, upstream)
    plain = selected_log_probs(hidden @ weight.T, targets)
    plain_hidden, plain_weight = torch.autograd.grad(plain, (hidden, weight), upstream)
    head = weight.detach() if frozen else weight
    ours = action_log_probs(hidden, head, targets, logits=logits, tile_bytes=1 << 17)  # type: ignore[arg-type]

    def relative(found: Tensor, exact: Tensor) -> float:
        return float((found.double() - exact).norm() / exact.norm())

    assert ours.dtype == torch.float32
    worst, plain_worst = ((found.double() - exact).abs().max() for found in (ours, plain))
    assert worst <= 2 * plain_worst + 1e-6
    if logits == "float32":
        # four float32 roundings of the largest logit; one bf16 rounding is 16,000 times as much
        largest = (hidden.double() @ weight.double().T).abs().max()
        assert worst <= 4 * torch.finfo(torch.float32).eps * largest
    gradients = torch.autograd.grad(ours, [hidden] if frozen else [hidden, weight], upstream)
    assert relative(gradients[0], hidden_exact) <= 2 * relative(plain_hidden, hidden_exact) + 1e-5
    if not frozen:
        assert relative(gradients[1], weight_exact) <= 2 * relative(plain_weight, weight_exact) + 1e-5


@pytest.mark.parametrize("tile_bytes", [1 << 12, 1 << 16, 1 << 20, None])
def test_a_bf16_weight_gradient_over_many_same_signed_tokens(tile_bytes: int | None) -> None:
    """16,384 tokens that all push one way: a bf16 sum would stall, a float32 one stays within 4e-3."""
    generator = torch.Generator().manual_seed(0)
    n, v, d = 16_384, 12, 8
    hidden = (torch.rand(n, d, generator=generator) + 0.5).bfloat16()
    weight = (torch.randn(v, d, generator=generator) * 0.1).bfloat16().requires_grad_()
    targets = torch.zeros(n, dtype=torch.int64)
    upstream = torch.rand(n, generator=generator) + 0.5
    _, _, exact = truth(hidden, weight, targets, upstream)
    log_probs = action_log_probs(hidden, weight, targets, tile_bytes=tile_bytes)
    (found,) = torch.autograd.grad(log_probs, weight, upstream)
    assert float(((found.double() - exact).abs() / exact.abs()).max()) <= 4e-3


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


def test_widened_products_are_those_of_float32() -> None:
    """Exact factors, float32 sums: the error against float64 is that of a float32 product."""
    lhs, rhs = (torch.randn(size, 512, generator=torch.Generator().manual_seed(size)) for size in (70, 300))
    lhs, rhs, out = lhs.bfloat16().float(), rhs.bfloat16().float(), torch.empty(70, 300)
    logit_product(lhs, rhs.T, Precision(torch.bfloat16, out.device, "float32"), out)
    exact = lhs.double() @ rhs.double().T
    error, plain = ((found.double() - exact).abs().max() for found in (out, lhs @ rhs.T))
    assert error <= 2 * plain


def test_the_matmul_setting_is_lent_only_while_no_other_thread_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    setting: Any = torch.backends.mkldnn.matmul
    if not torch.cpu.get_capabilities().get("avx512_bf16", False):
        pytest.skip("this CPU does not multiply bfloat16")
    seen: list[str] = []
    mm = torch.mm

    def watched(*args: Any, **keywords: Any) -> Tensor:
        seen.append(setting.fp32_precision)
        return mm(*args, **keywords)

    monkeypatch.setattr(torch, "mm", watched)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    hidden, weight = torch.ones(2, 4).bfloat16(), torch.ones(3, 4).bfloat16()
    before = setting.fp32_precision
    action_log_probs(hidden, weight, torch.tensor([0, 2]))
    assert (seen, setting.fp32_precision) == (["bf16"], before)
    action_log_probs(hidden.float(), weight.float(), torch.tensor([0, 2]))
    action_log_probs(hidden.half(), weight.half(), torch.tensor([0, 2]))
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    action_log_probs(hidden, weight, torch.tensor([0, 2]))
    assert seen[1:] == [before] * 3


def test_the_matmul_setting_still_follows_the_general_one(monkeypatch: pytest.MonkeyPatch) -> None:
    setting: Any = torch.backends.mkldnn.matmul
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    hidden = torch.ones(2, 4).bfloat16()
    before = torch.backends.fp32_precision
    try:
        torch.backends.fp32_precision = "ieee"
        action_log_probs(hidden, hidden, torch.tensor([0, 1]))
        assert setting.fp32_precision == "ieee"
    finally:
        torch.backends.fp32_precision = before
    assert setting.fp32_precision == before
