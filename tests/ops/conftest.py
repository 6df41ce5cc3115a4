"""Both ways to a float32 logit of bfloat16 factors, wherever the tests run."""

import pytest

from agentrl.ops.bfloat16_product import linked_gemm

needs_gemm = pytest.mark.skipif(linked_gemm() is None, reason="PyTorch is built without MKL")
# Without AMX, MKL is slower, not wrong.
BOTH_WAYS = [pytest.param(True, marks=needs_gemm, id="native"), pytest.param(False, id="widened")]


def choose(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    """Let logits be products of bfloat16 factors, or of widened ones."""
    monkeypatch.setattr("agentrl.ops.tiles.multiplies_bfloat16", lambda: native)
