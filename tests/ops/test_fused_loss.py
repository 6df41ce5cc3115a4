"""The fused loss against the general head: gradients, few active tokens, frozen heads, errors."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.ops.fused_loss import fused_policy_loss
from agentrl.ops.log_probs import action_log_probs


def problem(n: int, v: int, d: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n + v + d)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((n, d), (v, d), (v,))
    )
    return [hidden, weight, bias, torch.randint(v, (n,), generator=generator)]


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(0, 40),
    v=st.integers(1, 60),
    d=st.integers(1, 20),
    tile_bytes=st.sampled_from([1, 400, 3000, None]),
    stash_bytes=st.sampled_from([0, 500, 5000, 1 << 20]),
    softcap=st.sampled_from([None, 2.0]),
    each=st.booleans(),
    share_active=st.sampled_from([0.0, 0.2, 0.8, 1.0]),
    with_entropy=st.booleans(),
    frozen=st.booleans(),
)
def test_equals_the_general_head(
    n: int,
    v: int,
    d: int,
    tile_bytes: int | None,
    stash_bytes: int,
    softcap: float | None,
    each: bool,
    share_active: float,
    with_entropy: bool,
    frozen: bool,
) -> None:
    hidden, weight, bias, targets = problem(n, v, d)
    temperature = (torch.rand(n, dtype=torch.float64) + 0.5).requires_grad_(not frozen) if each else 0.8
    weight.requires_grad_(not frozen)
    bias.requires_grad_(not frozen)
    gain, bonus = torch.randn(2, n, dtype=torch.float64) * (torch.rand(n) < share_active)

    def token_loss(log_probs: Tensor, entropy: Tensor | None, index: Tensor) -> Tensor:
        loss = gain[index] * log_probs.exp()
        return loss if entropy is None else loss + bonus[index] * entropy

    arguments: dict[str, Any] = {"bias": bias, "temperature": temperature, "softcap": softcap, "scale": 1.3}
    ours = fused_policy_loss(
        hidden, weight, targets, token_loss, with_entropy=with_entropy, tile_bytes=tile_bytes,
        stash_bytes=stash_bytes, **arguments,
    )  # fmt: skip
    log_probs, entropy = action_log_probs(hidden, weight, targets, return_entropy=True, **arguments)
    general = token_loss(log_probs, entropy if with_entropy else None, torch.arange(n)).sum()
    leaves = [t for t in (hidden, weight, bias, temperature) if isinstance(t, Tensor) and t.requires_grad]
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(ours.loss, general, **close)
    torch.testing.assert_close(ours.log_probs, log_probs.detach(), **close)
    assert (ours.entropy is None) == (not with_entropy)
    torch.testing.assert_close(
        torch.autograd.grad(ours.loss * 3, leaves), torch.autograd.grad(general * 3, leaves), **close
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_its_error_is_within_twice_the_plain_one(dtype: torch.dtype) -> None:
    hidden, weight, bias, targets = problem(60, 400, 64, dtype)
    gain = torch.randn(60)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    truth = (exact[0] @ exact[1].T + exact[2]).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    wanted = torch.autograd.grad(truth, exact, gain.double())
    plain = (hidden @ weight.T + bias).float().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    plain_gradients = torch.autograd.grad(plain, (hidden, weight, bias), gain)
    ours = fused_policy_loss(hidden, weight, targets, lambda p, _, i: gain[i] * p, bias=bias)
    for name, mine, theirs, true in zip(
        ("hidden", "weight", "bias"), torch.autograd.grad(ours.loss, (hidden, weight, bias)), plain_gradients,
        wanted, strict=True,
    ):  # fmt: skip
        error, plain_error = ((g.double() - true).norm() / true.norm() for g in (mine, theirs))
        assert error <= 2 * plain_error + 1e-4, name


@settings(max_examples=30, deadline=None)
@given(
    share=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    share_idle=st.sampled_from([0.0, 0.5]),
    with_entropy=st.booleans(),
    frozen=st.booleans(),
    stash_bytes=st.sampled_from([0, 500]),
)
def test_only_active_tokens_are_scored(
    share: float, share_idle: float, with_entropy: bool, frozen: bool, stash_bytes: int
) -> None:
    """The others may even hold NaN; an active token may still turn out to carry no gradient."""
    hidden, weight, bias, targets = problem(23, 40, 6)
    weight.requires_grad_(not frozen)
    bias.requires_grad_(not frozen)
    active = torch.rand(23) < share
    gain = torch.randn(23, dtype=torch.float64) * active * (torch.rand(23) >= share_idle)
    dirty = hidden.detach().where(active[:, None], torch.nan).requires_grad_()

    def token_loss(log_probs: Tensor, entropy: Tensor | None, index: Tensor) -> Tensor:
        assert len(index) == len(log_probs)
        return gain[index] * (log_probs if entropy is None else log_probs * entropy)

    found = [
        fused_policy_loss(
            h, weight, targets, token_loss, bias=bias, temperature=torch.linspace(0.5, 2, 23).double(),
            with_entropy=with_entropy, active=a, tile_bytes=700, stash_bytes=stash_bytes,
        )
        for h, a in ((dirty, active), (hidden, None))
    ]  # fmt: skip
    heads = [] if frozen else [weight, bias]
    grads = [
        torch.autograd.grad(result.loss, [h, *heads])
        for result, h in zip(found, (dirty, hidden), strict=True)
    ]
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(grads[0], grads[1], **close)
    torch.testing.assert_close(found[0].loss, found[1].loss, **close)
    for part, whole in zip(found[0][1:], found[1][1:], strict=True):
        if part is not None:
            assert whole is not None
            assert torch.equal(part.isnan(), ~active)
            torch.testing.assert_close(part[active], whole[active], **close)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("frozen", [False, True])
def test_nan_in_an_idle_token_touches_nothing(frozen: bool, value: float, softcap: float | None) -> None:
    hidden, weight, _, targets = problem(9, 20, 12)
    weight.requires_grad_(not frozen)
    gain = torch.ones(9, dtype=torch.float64).index_fill(0, torch.tensor(3), 0.0)

    def gradients(hidden: Tensor) -> Any:
        loss = fused_policy_loss(
            hidden, weight, targets, lambda p, _, i: torch.where(gain[i] > 0, p, 0.0), softcap=softcap
        ).loss
        return torch.autograd.grad(loss, [hidden] if frozen else [hidden, weight])

    dirty = hidden.detach().clone()
    dirty[3, 1] = value
    torch.testing.assert_close(gradients(dirty.requires_grad_()), gradients(hidden), rtol=1e-12, atol=1e-14)


def test_backward_runs_once_and_no_grad_runs() -> None:
    hidden, weight, _, targets = problem(5, 9, 4)
    with torch.no_grad():
        quiet = fused_policy_loss(hidden, weight, targets, lambda p, _, i: -p)
    assert not quiet.loss.requires_grad
    result = fused_policy_loss(hidden, weight, targets, lambda p, _, i: -p)
    assert not result.log_probs.requires_grad
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(result.loss, hidden, create_graph=True)
    result.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="first backward"):
        result.loss.backward()


@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_token_loss_may_work_in_place(with_entropy: bool) -> None:
    hidden, weight, _, targets = problem(5, 9, 4)

    def in_place(log_probs: Tensor, entropy: Tensor | None, _: Tensor) -> Tensor:
        log_probs.clamp_(min=-3.0)
        return log_probs if entropy is None else entropy.mul_(log_probs)

    def plain(log_probs: Tensor, entropy: Tensor | None, _: Tensor) -> Tensor:
        kept = log_probs.clamp(min=-3.0)
        return kept if entropy is None else entropy * kept

    found = [
        fused_policy_loss(hidden, weight, targets, loss, with_entropy=with_entropy)
        for loss in (in_place, plain)
    ]
    assert bool((found[1].log_probs < -3).any())
    torch.testing.assert_close(found[0].log_probs, found[1].log_probs, rtol=0, atol=0)
    grads = [torch.autograd.grad(result.loss, (hidden, weight)) for result in found]
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


def test_a_token_loss_may_overwrite_its_positions() -> None:
    hidden, weight, _, targets = problem(6, 9, 4, torch.float32)
    active = torch.arange(6) % 2 == 0
    advantage = torch.arange(12.0)

    def score(in_place: bool) -> tuple[Tensor, ...]:
        def token_loss(log_probs: Tensor, _: Tensor | None, index: Tensor) -> Tensor:
            return advantage[index.add_(6) if in_place else index + 6] * log_probs

        result = fused_policy_loss(hidden, weight, targets, token_loss, active=active)
        return result.log_probs, *torch.autograd.grad(result.loss, (hidden, weight))

    for ours, plain in zip(score(True), score(False), strict=True):
        assert torch.equal(ours.nan_to_num(7.0), plain.nan_to_num(7.0))


def test_several_upstream_gradients_at_once_are_refused() -> None:
    hidden, weight, _, targets = problem(3, 9, 4)
    loss = fused_policy_loss(hidden, weight, targets, lambda p, *_: p).loss
    with pytest.raises(RuntimeError, match="one upstream gradient at a time"):
        torch.autograd.grad(loss, hidden, torch.ones(3).double(), is_grads_batched=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("spread", "temperature"), [(0.05, 1.0), (1.0, 10.0), (1.0, 100.0)])
@pytest.mark.parametrize("of_entropy", [False, True])
def test_16_bit_exponentials_do_not_blur_entropies(
    dtype: torch.dtype, spread: float, temperature: float, of_entropy: bool
) -> None:
    """Logits that hardly vary: log p + H is less than the 2^-9 by which a kept exponential is rounded."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 64, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(500, 64, generator=generator) * spread / 8).to(dtype).requires_grad_()
    temperatures = torch.full((64,), temperature).requires_grad_()
    targets = torch.randint(500, (64,), generator=generator)
    upstream = torch.randn(64, generator=generator)
    leaves = [hidden, weight, temperatures]

    def full(leaves: list[Tensor]) -> tuple[Tensor, ...]:
        every = torch.log_softmax((leaves[0] @ leaves[1].T).to(leaves[2].dtype) / leaves[2][:, None], -1)
        score = -(every.exp() * every).sum(1) if of_entropy else every.gather(1, targets[:, None]).squeeze(1)
        return torch.autograd.grad((score * upstream).sum(), leaves)

    def token_loss(log_probs: Tensor, entropy: Tensor | None, index: Tensor) -> Tensor:
        return (log_probs if entropy is None else entropy) * upstream[index]

    keywords: Any = {"temperature": temperatures, "with_entropy": of_entropy}
    ours = torch.autograd.grad(
        fused_policy_loss(hidden, weight, targets, token_loss, **keywords).loss, leaves
    )
    exact, plain = full([leaf.detach().double().requires_grad_() for leaf in leaves]), full(leaves)
    for mine, theirs, true in zip(ours, plain, exact, strict=True):
        error, plain_error = ((part.double() - true).norm() / true.norm() for part in (mine, theirs))
        assert error <= 2 * plain_error + 1e-5


def test_wrong_token_losses_are_named() -> None:
    hidden, weight, _, targets = problem(5, 9, 4)
    with pytest.raises(ValueError, match=r"loss a token, shape \(5,\); got .* of shape \(\)"):
        fused_policy_loss(hidden, weight, targets, lambda p, _, i: p.sum())
    value = torch.ones(5, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match="requires a gradient"):
        fused_policy_loss(hidden, weight, targets, lambda p, _, i: value * p)
    with pytest.raises(ValueError, match=r"active must be a bool tensor of shape \(5,\)"):
        fused_policy_loss(hidden, weight, targets, lambda p, _, i: p, active=torch.ones(5))
    wrong: Any
    for wrong in (0.0, torch.ones(5, dtype=torch.bool)):
        with pytest.raises(ValueError, match="one floating-point loss a token"):
            fused_policy_loss(hidden, weight, targets, lambda p, _, i, wrong=wrong: wrong)
    with pytest.raises(ValueError, match="active must be a dense tensor, got list"):
        fused_policy_loss(hidden, weight, targets, lambda p, _, i: p, active=[True] * 5)  # type: ignore[arg-type]
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match="stash_bytes must be a whole number"):
            fused_policy_loss(hidden, weight, targets, lambda p, _, i: p, stash_bytes=wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("each", [False, True])
def test_a_stashed_zero_under_a_soft_cap_gives_no_nan(dtype: torch.dtype, each: bool) -> None:
    """exp(z - maximum) underflows, and the target's gradient needs the slope of a soft-cap at its logit."""
    hidden, weight, _, targets = problem(40, 300, 64, dtype)
    temperature = torch.full((40,), 0.2, requires_grad=True) if each else 0.2
    leaves = [hidden, weight, *([temperature] if isinstance(temperature, Tensor) else [])]
    arguments: dict[str, Any] = {"softcap": 30.0, "temperature": temperature}
    ours = fused_policy_loss(hidden, weight, targets, lambda p, _, i: p, **arguments)
    found = torch.autograd.grad(ours.loss, leaves)
    general = torch.autograd.grad(action_log_probs(hidden, weight, targets, **arguments).sum(), leaves)
    for mine, theirs in zip(found, general, strict=True):
        assert (mine - theirs).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * theirs.norm()


def test_a_float16_stash_keeps_the_tail_of_a_confident_token() -> None:
    """30,000 ids 18 nats below the likeliest: half of each one's exp(-18) would be lost in float16."""
    hidden = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * 0.3
    weight = torch.randn(30_000, 64, generator=torch.Generator().manual_seed(1)) * 0.02
    hidden[:, 1], weight[0, 1], weight[:, 0] = 18.0, 1.0, 1.0
    hidden[:, 0], weight[0, 0] = 0.0, 0.0
    hidden, weight = hidden.half().requires_grad_(), weight.half()
    targets, exact = torch.zeros(8, dtype=torch.int64), hidden.detach().double().requires_grad_()
    wanted = torch.autograd.grad(
        (exact @ weight.double().T).log_softmax(-1)[:, 0].sum(), exact
    )[0]  # fmt: skip
    ours = fused_policy_loss(hidden, weight.requires_grad_(), targets, lambda p, _, i: 1024 * p).loss
    found = torch.autograd.grad(ours, hidden)[0].double() / 1024
    assert (found - wanted).norm() <= 4e-3 * wanted.norm()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_late_loss_scale_keeps_float16_in_range(frozen: bool, with_entropy: bool) -> None:
    """Weights of 1e-8, as of a mean over many tokens, times the factor of a GradScaler."""
    hidden, weight, _, targets = problem(40, 300, 64, torch.float16)
    weight.requires_grad_(not frozen)
    leaves = [hidden] if frozen else [hidden, weight]

    def gradients(inside: float, outside: float) -> Any:
        def token_loss(log_probs: Tensor, entropy: Tensor | None, _: Tensor) -> Tensor:
            return inside * (log_probs if entropy is None else log_probs + entropy)

        ours = fused_policy_loss(hidden, weight, targets, token_loss, with_entropy=with_entropy)
        return torch.autograd.grad(ours.loss * outside, leaves)

    for late, early in zip(gradients(1e-8, 1e8), gradients(1.0, 1.0), strict=True):
        assert (late - early).norm() <= 2e-3 * early.norm()
