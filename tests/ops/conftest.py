"""Every way to a float32 product of 16-bit factors, wherever the tests run, and what several tests hold."""

from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.ops.bfloat16_product import linked_gemm
from agentrl.ops.tiles import Precision

needs_gemm = pytest.mark.skipif(linked_gemm() is None, reason="PyTorch is built without MKL")
# Without AMX, MKL is slower, not wrong.
BOTH_WAYS = [pytest.param(True, marks=needs_gemm, id="native"), pytest.param(False, id="widened")]


def choose(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    """Let a product of bfloat16 factors be float32, or have them widened or it rounded."""
    monkeypatch.setattr("agentrl.ops.tiles.multiplies_bfloat16", lambda: native)


def imitate_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the head decide as for tensors on CUDA, where a product of 16-bit factors is written as float32."""

    def product(out: Tensor, lhs: Tensor, rhs: Tensor, *, accumulate: bool = False) -> Tensor:
        assert not accumulate, "a product of 16-bit factors in float32 is not added on CUDA"
        return torch.mm(lhs.to(out.dtype), rhs.to(out.dtype), out=out)

    def precision(inputs: torch.dtype, device: torch.device, logits: Any) -> Precision:
        return Precision(inputs, torch.device("cuda"), logits)

    monkeypatch.setattr("agentrl.ops.tiles.mm_float32_", product)
    monkeypatch.setattr("agentrl.ops.head_inputs.Precision", precision)


def relative_error(found: Tensor, exact: Tensor) -> float:
    """The 2-norm of the error, of the exact one's."""
    return float((found.double() - exact).norm() / exact.norm())


def draw_same_signed(v: int, d: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """16,384 tokens that all push one way: a bf16 sum of their gradients would stall."""
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.rand(16_384, d, generator=generator) + 0.5).bfloat16()
    weight = (torch.randn(v, d, generator=generator) * 0.1).bfloat16().requires_grad_()
    upstream = torch.rand(16_384, generator=generator) + 0.5
    return hidden, weight, torch.zeros(16_384, dtype=torch.int64), upstream
