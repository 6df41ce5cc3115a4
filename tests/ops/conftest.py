"""Both ways to a float32 product of bfloat16 factors, wherever the tests run."""

import pytest

from agentrl.ops.bfloat16_product import linked_gemm

needs_gemm = pytest.mark.skipif(linked_gemm() is None, reason="PyTorch is built without MKL")
# Without AMX, MKL is slower, not wrong.
BOTH_WAYS = [pytest.param(True, marks=needs_gemm, id="native"), pytest.param(False, id="widened")]


def choose(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    """Let a product of bfloat16 factors be float32, or have them widened or it rounded."""
    monkeypatch.setattr("agentrl.ops.tiles.multiplies_bfloat16", lambda: native)
