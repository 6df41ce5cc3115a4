"""Logits so large that their rounding is whole nats: no worse than full logits, and never NaN."""

# N action tokens, V vocabulary, D width

from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.ops.fused_loss import fused_policy_loss
from agentrl.ops.log_probs import action_log_probs


def full(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Any) -> tuple[Tensor, Tensor]:
    every = torch.log_softmax(hidden @ weight.T / temperature, -1)
    return every.gather(1, targets[:, None]).squeeze(1), -torch.special.xlogy(every.exp(), every.exp()).sum(1)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30))


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-7, 1e-9, 1e-20])
@pytest.mark.parametrize("likeliest", [False, True])
@pytest.mark.parametrize("way", ["kept", "recomputed", "frozen", "fused"])
def test_errors_are_those_of_full_logits(temperature: float, likeliest: bool, way: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 128, generator=generator)
    weight = torch.randn(500, 128, generator=generator) * 5 / 128**0.5 + hidden.mean(0) * 40
    targets = torch.randint(500, (64,), generator=generator)
    if likeliest:
        targets = (hidden.double() @ weight.double().T).argmax(1)
    upstream = torch.randn(64, generator=generator)
    hidden.requires_grad_()
    weight.requires_grad_(way != "frozen")
    leaves = [hidden] if way == "frozen" else [hidden, weight]

    def differentiate(log_probs: Tensor, leaves: list[Tensor]) -> list[Tensor]:
        loss = (log_probs * upstream.to(log_probs.dtype)).sum()
        return [log_probs.detach(), *torch.autograd.grad(loss, leaves)]

    doubles = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    exact = differentiate(full(*doubles, targets, temperature)[0], doubles)
    plain = differentiate(full(hidden, weight, targets, temperature)[0], leaves)
    keywords: Any = {"temperature": temperature, "tile_bytes": 1 << 14}
    if way == "fused":
        result = fused_policy_loss(hidden, weight, targets, lambda p, _, i: p * upstream[i], **keywords)
        ours = [result.log_probs, *torch.autograd.grad(result.loss, leaves)]
    else:
        ours = differentiate(
            action_log_probs(hidden, weight, targets, recompute=way == "recomputed", **keywords), leaves
        )
    for found, theirs, true in zip(ours, plain, exact, strict=False):
        assert found.isfinite().all()
        assert error(found, true) <= 2 * error(theirs, true) + 1e-6


@pytest.mark.parametrize("offset", [5e-10, 1e-9, 1e-8])
@pytest.mark.parametrize("target", [0, 1])
def test_two_ids_far_apart(offset: float, target: int) -> None:
    """One id is certain, so its entropy is 0; its logit of 1e9 is rounded by up to 64."""
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.tensor([[1.0068359375], [0.5]], requires_grad=True)
    targets = torch.tensor([target])
    log_prob, entropy = action_log_probs(hidden, weight, targets, temperature=offset, return_entropy=True)
    wanted = full(hidden.double(), weight.double(), targets, offset)[0]
    torch.testing.assert_close(log_prob.double(), wanted, rtol=1e-6, atol=100.0)
    assert entropy.item() == 0.0
    gradients = torch.autograd.grad((log_prob + entropy).sum(), (hidden, weight))
    exact = torch.autograd.grad(wanted.sum(), (hidden, weight))
    for found, true in zip(gradients, exact, strict=True):
        torch.testing.assert_close(found, true, rtol=1e-6, atol=0.0)


def test_entropies_stay_in_their_range() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(200, 64, generator=generator, requires_grad=True)
    weight = torch.randn(300, 64, generator=generator, requires_grad=True)
    targets = torch.randint(300, (200,), generator=generator)
    for temperature in (1e-5, 1e-7, 1e-8, 1e-10, 1e-25):
        scores = action_log_probs(
            hidden, weight, targets, temperature=temperature, return_entropy=True, tile_bytes=1 << 14
        )
        gradients = torch.autograd.grad((scores[0] + scores[1]).sum(), (hidden, weight))
        assert all(bool(part.isfinite().all()) for part in (*scores, *gradients))
        assert float(scores[1].detach().min()) >= 0.0
        assert float(scores[1].detach().max()) <= 5.8  # log 300 is 5.7
        assert float(scores[0].detach().max()) <= 0.0
