"""Per-token losses and their reduction."""

import math

import pytest
import torch

from agentrl import aggregate_loss, kl_to_reference, policy_loss, reinforce_loss

# two sequences, of 2 tokens at loss 5 and of 10 tokens at loss 1, and one without any action token
MASK = torch.zeros(3, 11)
MASK[0, 1:3] = 1
MASK[1, :10] = 1
PER_TOKEN = torch.tensor([5.0, 1.0, 100.0])[:, None].expand(3, 11)


@pytest.mark.parametrize(
    ("mode", "norm_const", "want"),
    [
        ("token_mean", None, 20 / 12),
        ("dapo", None, 20 / 12),
        ("token_sum", None, 20.0),
        ("sequence_mean", None, 3.0),
        ("seq-mean-token-mean", None, 3.0),
        ("grpo", None, 3.0),
        ("sequence_sum", None, 10.0),
        ("seq-mean-token-sum", None, 10.0),
        ("constant", 10, 2.0),
        ("sequence_sum_norm", 10, 1.0),
        ("dr_grpo", 10, 1.0),
    ],
)
def test_pinned_aggregates(mode: str, norm_const: float | None, want: float) -> None:
    for rows in (slice(2), slice(3)):  # with and without the fully masked row
        got = aggregate_loss(PER_TOKEN[rows], MASK[rows], mode, norm_const)
        assert got.item() == pytest.approx(want, rel=1e-6)
        doubled = aggregate_loss(PER_TOKEN[rows].double(), MASK[rows], mode, norm_const)
        assert doubled.item() == pytest.approx(want, rel=1e-12)


def test_prompt_mean_weighs_prompts_equally() -> None:
    per_token, mask = torch.tensor([[1.0, 1], [3, 0], [4, 4]]), torch.tensor([[1.0, 1], [1, 0], [1, 1]])
    got = aggregate_loss(per_token, mask, "prompt_mean", groups=torch.tensor([0, 0, 1]))
    assert got.item() == pytest.approx(((1 + 1 + 3) / 3 + 4) / 2)


def test_masked_entries_do_not_matter_even_when_nan() -> None:
    poisoned = torch.where(MASK == 1, PER_TOKEN, torch.nan).requires_grad_()
    loss = aggregate_loss(poisoned, MASK)
    loss.backward()
    assert loss.item() == pytest.approx(20 / 12)
    assert poisoned.grad is not None
    torch.testing.assert_close(poisoned.grad, MASK / 12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_counts_and_sums_do_not_lose_digits_in_low_precision(dtype: torch.dtype) -> None:
    per_token = torch.ones(3, 5001, dtype=dtype)
    mask = torch.ones(3, 5001, dtype=dtype)  # bfloat16 has no 5,001
    for mode in ("token_mean", "sequence_mean"):
        got = aggregate_loss(per_token, mask, mode)
        assert got.dtype == torch.float32
        assert got.item() == pytest.approx(1.0, rel=1e-6)
    large = aggregate_loss(per_token * 30, mask, "token_sum")  # float16 ends at 65,504
    assert large.item() == pytest.approx(30 * 15003, rel=1e-6)


def test_all_masked_is_an_empty_sum() -> None:
    assert aggregate_loss(PER_TOKEN, torch.zeros_like(MASK), "sequence_mean").item() == 0


def test_reinforce_gradient_is_minus_weight_times_advantage() -> None:
    logp = torch.randn(
        3, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).requires_grad_()
    advantages = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    reinforce_loss(logp, advantages, MASK, "sequence_mean").backward()
    want = -advantages[:, None] * MASK / MASK.sum(-1, keepdim=True).clamp(min=1) / 2
    torch.testing.assert_close(logp.grad, want)


def test_policy_loss_at_every_side_of_the_clip() -> None:
    ratio = torch.tensor([0.5, 0.9, 1.5, 0.5, 0.9, 1.5], dtype=torch.float64)
    advantages = torch.tensor([2.0, 2, 2, -2, -2, -2], dtype=torch.float64)
    logp = ratio.log().requires_grad_()
    loss = policy_loss(logp, torch.zeros(6, dtype=torch.float64), advantages, clip_low=0.2, clip_high=0.3)
    want = torch.tensor([-1.0, -1.8, -2.6, 1.6, 1.8, 3.0], dtype=torch.float64)
    torch.testing.assert_close(loss, want)
    loss.sum().backward()
    # d/dlogp of -r A is -r A; clipped tokens (up with A > 0, down with A < 0) get none
    torch.testing.assert_close(logp.grad, torch.tensor([-1.0, -1.8, 0, 0, 1.8, 3.0], dtype=torch.float64))


def test_k3_is_unbiased_and_not_negative() -> None:
    policy = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    reference = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    per_token = kl_to_reference(policy.log(), reference.log())
    assert bool((per_token >= 0).all())
    exact = sum(p * math.log(p / q) for p, q in zip(policy.tolist(), reference.tolist(), strict=True))
    assert float((policy * per_token).sum()) == pytest.approx(exact, rel=1e-12)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="share one shape"):
        aggregate_loss(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="must hold only 0 and 1"):
        aggregate_loss(torch.zeros(2, 3), torch.full((2, 3), 0.5))
    with pytest.raises(ValueError, match="floating-point"):
        aggregate_loss(torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3))
    with pytest.raises(ValueError, match="advantages must have shape"):
        reinforce_loss(torch.zeros(2, 3), torch.zeros(3), torch.ones(2, 3))
