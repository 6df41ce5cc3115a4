"""Float16 gradients that wait for their upstream factor: what is below float16's range is not lost."""

from typing import Any

import pytest
import torch
from tests.ops.conftest import relative_error
from torch import Tensor

from agentrl.ops.fused_loss import fused_policy_loss
from agentrl.ops.gradient_sums import divide_by_units_
from agentrl.ops.log_probs import action_log_probs

SCALE = 65536.0  # a GradScaler's, which arrives after forward
CASES = {"a mean over many tokens": (65_536, 64, 8, 0.0), "confident tokens": (64, 100, 32, 14.0)}


def problem(num_tokens: int, num_vocab: int, width: int, margin: float) -> tuple[Tensor, ...]:
    """Hidden, weight, bias and targets; with a margin, all targets are an id that it sets apart."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, width, generator=generator)
    weight = torch.randn(num_vocab, width, generator=generator) * 0.02
    targets = torch.randint(num_vocab, (num_tokens,), generator=generator)
    bias = torch.zeros(num_vocab)
    bias[0] = margin
    return hidden.half(), weight.half(), bias.half(), targets * 0 if margin else targets


def plain_gradients(
    leaves: list[Tensor], tensors: tuple[Tensor, ...], weights: Tensor, *, frozen: bool
) -> Any:
    """The gradients of sum(weights * -log p) * SCALE over full logits, in the leaves' dtype."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    hidden, weight, bias = (
        leaves if not frozen else (leaves[0], *(t.to(leaves[0].dtype) for t in tensors[1:3]))
    )
    logits = hidden @ weight.T + bias
    log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    loss = -(weights * log_probs.gather(1, tensors[3][:, None]).squeeze(1)).sum()
    return torch.autograd.grad(loss * SCALE, leaves)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("way", ["fused", "fused, active", "general"])
@pytest.mark.parametrize("case", CASES)
def test_their_error_is_within_twice_the_plain_one(case: str, way: str, frozen: bool) -> None:
    tensors = problem(*CASES[case])
    hidden, weight, bias, targets = tensors
    weights = torch.full((len(hidden),), 1 / len(hidden))
    active = None
    if way != "fused":
        weights[::3] = 0.0  # idle tokens
    if way == "fused, active":
        active = torch.arange(len(hidden)) % 6 != 0  # half of the idle ones; others turn out to be
    leaves = [hidden] if frozen else [hidden, weight, bias]
    exact = plain_gradients([leaf.double() for leaf in leaves], tensors, weights.double(), frozen=frozen)
    plain = plain_gradients(leaves, tensors, weights, frozen=frozen)
    for leaf in leaves:
        leaf.requires_grad_()
    if way == "general":
        loss = -(weights * action_log_probs(hidden, weight, targets, bias=bias)).sum()
    else:
        loss = fused_policy_loss(
            hidden, weight, targets, lambda p, _, i: -weights[i] * p, bias=bias, active=active
        ).loss
    ours = torch.autograd.grad(loss * SCALE, leaves)
    for mine, theirs, true in zip(ours, plain, exact, strict=True):
        assert mine.dtype == torch.float16
        assert relative_error(mine, true) <= 2 * relative_error(theirs, true) + 1e-4
    idle = ours[0][weights == 0]
    assert torch.equal(idle, torch.zeros_like(idle))


@pytest.mark.parametrize("frozen", [False, True])
def test_an_upstream_of_one_loses_what_the_general_head_loses(frozen: bool) -> None:
    hidden, weight, bias, targets = problem(64, 100, 32, 6.0)
    leaves = [hidden.requires_grad_()] if frozen else [hidden.requires_grad_(), weight.requires_grad_()]
    fused = fused_policy_loss(hidden, weight, targets, lambda p, _, i: -p / 64, bias=bias).loss
    general = -action_log_probs(hidden, weight, targets, bias=bias).mean()
    for mine, theirs in zip(
        torch.autograd.grad(fused, leaves), torch.autograd.grad(general, leaves), strict=True
    ):
        # numbers are 2^-24 apart near float16's end; of larger ones, a row may be rounded twice
        allowed = 2**-24 + 2**-10 * theirs.float().abs().amax(1, keepdim=True)
        assert bool(theirs.any())
        assert bool(((mine.float() - theirs.float()).abs() <= allowed).all())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("general", [False, True])
def test_a_nan_token_stays_alone(general: bool, frozen: bool) -> None:
    hidden, weight, bias, targets = problem(64, 100, 32, 14.0)

    def gradient(hidden: Tensor) -> Tensor:
        hidden = hidden.clone().requires_grad_()
        head = weight.clone().requires_grad_(not frozen)
        if general:
            loss = -action_log_probs(hidden, head, targets, bias=bias).mean()
        else:
            loss = fused_policy_loss(hidden, head, targets, lambda p, _, i: -p / 64, bias=bias).loss
        return torch.autograd.grad(loss * SCALE, hidden)[0]

    clean = gradient(hidden)
    hidden[5, 3] = torch.nan
    dirty, others = gradient(hidden), torch.arange(64) != 5
    assert bool(dirty[5].isnan().all())
    assert torch.equal(dirty[others], clean[others])


def test_units_are_powers_of_two_of_each_row() -> None:
    """1 where a row is zero or not finite; and what a row is divided by brings it back to the bit."""
    rows = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    rows *= torch.tensor([1e-30, 1e-12, 1.0, 1e12, 0.0, torch.nan, torch.inf])[:, None]
    sums = rows.clone()
    units = divide_by_units_(sums)
    assert torch.equal(torch.frexp(units)[0], torch.full((7,), 0.5))
    assert torch.equal(units[4:], torch.ones(3))
    largest = sums[:4].abs().amax(1)
    assert bool(((largest >= 2**13) & (largest < 2**14)).all())
    torch.testing.assert_close(sums * units[:, None], rows, rtol=0, atol=0, equal_nan=True)
