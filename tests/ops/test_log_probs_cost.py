"""What the head costs: matrix products, and bytes that do not grow with tokens or vocabulary."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import log_probs
from agentrl.ops.fused_loss import fused_policy_loss
from agentrl.ops.log_probs import action_log_probs

Step = Callable[[Any], Any]


def tiled(case: Any) -> Any:
    return case.backward(action_log_probs(case.hidden, case.weight, case.targets))


def recomputed(case: Any) -> Any:
    return case.backward(action_log_probs(case.hidden, case.weight, case.targets, recompute=True))


def fused(case: Any) -> Any:
    return log_probs.step_fused(case)


def products(step: Step, case: Any) -> float:
    n, d = case.hidden.shape
    with log_probs.ProductCount() as counted:
        step(case)
    return counted.operations / (2 * n * case.weight.shape[0] * d)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_four_products_three_fused_two_frozen(dtype: torch.dtype) -> None:
    case = log_probs.Case.draw(64, 500, 32, dtype, "cpu")
    assert products(recomputed, case) == 4.0
    assert products(tiled, case) == (3.5 if dtype == torch.float32 else 4.0), "half of 64 fit where D = 32"
    assert products(fused, case) == 3.5
    assert products(lambda case: log_probs.step_fused(case, stash_bytes=4 << 20), case) == 3.0
    case.weight.requires_grad_(False)
    assert products(tiled, case) == 2.0
    assert products(fused, case) == 2.0


def test_three_products_for_as_many_tokens_as_the_width() -> None:
    for n, wanted in ((32, 3.0), (256, 4 - 1 / 8), (257, 4.0)):
        case = log_probs.Case.draw(n, 500, 32, torch.float32, "cpu")
        assert products(tiled, case) == wanted


def test_a_detached_hidden_saves_its_product() -> None:
    case = log_probs.Case.draw(64, 500, 32, torch.float32, "cpu")
    case.hidden.requires_grad_(False)
    assert products(recomputed, case) == 3.0
    assert products(tiled, case) == 2.5


def test_entropy_costs_no_product() -> None:
    case = log_probs.Case.draw(32, 500, 32, torch.float32, "cpu")

    def step(case: Any) -> Any:
        log_probs, entropy = action_log_probs(case.hidden, case.weight, case.targets, return_entropy=True)
        return case.backward(log_probs + entropy)

    assert products(step, case) == 3.0


def test_backward_costs_a_quarter_with_a_quarter_of_the_tokens() -> None:
    case = log_probs.Case.draw(64, 500, 32, torch.float32, "cpu")
    case.upstream[16:] = 0.0
    assert products(recomputed, case) == 1 + 3 / 4
    assert products(tiled, case) == 1 + 2 / 4, "their exponentials were kept"
    assert products(fused, case) == 1 + 2 / 4
    case.upstream.copy_(case.upstream.flip(0))
    assert products(tiled, case) == 1 + 3 / 4, "those of other tokens were"
    case.upstream.zero_()
    assert products(tiled, case) == 1.0


def test_a_loss_known_to_be_zero_costs_no_product() -> None:
    case = log_probs.Case.draw(64, 500, 32, torch.float32, "cpu")
    case.upstream[16:] = 0.0

    def step(case: Any) -> Any:
        return log_probs.step_fused(case, active=case.upstream != 0)

    assert products(step, case) == 3 / 4
    case.weight.requires_grad_(False)
    assert products(step, case) == 2 / 4
    case.upstream.zero_()
    assert products(step, case) == 0.0


def bytes_over_gradients(
    step: Step, n: int, v: int, d: int, dtype: torch.dtype, active: float = 1.0
) -> float:
    case = log_probs.Case.draw(n, v, d, dtype, "cpu", active)
    gradients = (case.hidden.numel() + case.weight.numel()) * case.hidden.element_size()
    return log_probs.peak_bytes(lambda: step(case)) - gradients


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("step", [tiled, fused])
@pytest.mark.parametrize("active", [1.0, 0.3])
def test_memory_is_flat_in_tokens_and_vocabulary(step: Step, active: float) -> None:
    """The peak stays within 16 MiB of the gradients; the logits of the sizes below take 8, 41 and 66 MB."""
    for n, v in ((128, 16_000), (128, 80_000), (16_384, 1000)):
        assert bytes_over_gradients(step, n, v, 16, torch.float32, active) <= 16 << 20


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_the_tracker_sees_full_logits() -> None:
    def full(case: Any) -> Any:
        return case.backward(log_probs.score_full(case))

    logits = 4 * 256 * 8000
    assert bytes_over_gradients(full, 256, 8000, 16, torch.float32) >= 2 * logits


@pytest.mark.gpu
def test_full_size_on_a_gpu() -> None:
    """16k tokens of Qwen3-0.6B: full logits take tens of gigabytes, the tiles 1 GB over the gradients."""
    case = log_probs.Case.draw(16_384, 151_936, 1024, torch.bfloat16, "cuda")
    gradients = (case.hidden.numel() + case.weight.numel()) * 2
    peak = log_probs.peak_bytes(lambda: tiled(case), "cuda")
    assert peak - gradients <= 1 << 30


def test_fused_and_general_agree_on_the_benchmark() -> None:
    case = log_probs.Case.draw(96, 700, 32, torch.float32, "cpu")
    for ours, general in zip(fused(case), tiled(case), strict=True):
        torch.testing.assert_close(ours, general, rtol=1e-4, atol=1e-5)
    assert fused_policy_loss(case.hidden, case.weight, case.targets, lambda p, _, i: p).log_probs.shape == (
        96,
    )
