import itertools
from typing import Any

import pytest
import torch

from agentrl.data.sequence_cost import attention_cost
from agentrl.plan.configs import find_model
from agentrl.plan.models import ModelShape

# numbers of the model's published config.json
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}


class Config:
    def to_dict(self) -> dict[str, Any]:
        return dict(QWEN3_8B)


def test_where_attention_costs_as_much_as_the_matrices() -> None:
    per_layer = 4096 * (2 * 32 * 128 + 2 * 8 * 128) + 3 * 4096 * 12288
    matrices = 36 * per_layer + 151936 * 4096
    for shape in (find_model("Qwen3-8B"), QWEN3_8B, Config()):
        cost = attention_cost(shape)
        for n in (1, 1000, 51_324, 200_000):
            assert cost(n) == pytest.approx(6 * matrices * n * (1 + n / 51_324), rel=1e-5)


def test_the_head_is_counted_on_action_tokens_only() -> None:
    head = 151936 * 4096
    cost, half = (attention_cost(QWEN3_8B, action_share=share) for share in (1.0, 0.5))
    none = attention_cost(QWEN3_8B, action_share=0.0)
    assert cost(100) - half(100) == pytest.approx(6 * head * 50, rel=1e-9)
    assert cost(100) - none(100) == pytest.approx(6 * head * 100, rel=1e-9)


def test_a_window_bounds_what_a_token_reads() -> None:
    shape: dict[str, Any] = dict(
        name="test", width=8, vocab_size=10, num_heads=2, num_kv_heads=1, head_dim=4, ffn_width=16
    )
    full = attention_cost(ModelShape(**shape, num_full_layers=2))
    mixed = attention_cost(ModelShape(**shape, num_full_layers=1, num_window_layers=1, window=16))
    assert all(full(n) == mixed(n) for n in (1, 7, 16))
    # Past the window each further token reads 16 in one layer, so second differences halve.
    costs = [full(n) for n in (40, 41, 42)], [mixed(n) for n in (40, 41, 42)]
    second = [c[2] - 2 * c[1] + c[0] for c in costs]
    assert second[1] == pytest.approx(second[0] / 2)


def test_cost_grows_with_length() -> None:
    cost = attention_cost(find_model("Qwen3-8B"))
    assert all(cost(a) < cost(a + 1) for a in itertools.chain(range(1, 50), [10**5]))


def test_errors() -> None:
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="action_share"):
            attention_cost(QWEN3_8B, action_share=share)
    for shape in ("Qwen3-8B", None, torch.nn.Linear(2, 2)):
        with pytest.raises(ValueError, match=rf"find_model.*got {type(shape).__name__}"):
            attention_cost(shape)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="hidden_size"):
        attention_cost({"model_type": "llama", "num_attention_heads": 2})
