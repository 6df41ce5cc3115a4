"""Shapes of models: pinned sizes, caches and FLOPs, and their formulas against counting one by one."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.plan.configs import built_in_models, find_model
from agentrl.plan.models import Experts, ModelShape, logits_bytes

MODELS = built_in_models()


@pytest.mark.parametrize(
    ("name", "kv_bytes", "fixed_megabytes"),
    [
        ("Qwen/Qwen3-8B", 147_456, 0),
        ("meta-llama/Llama-3.1-8B", 131_072, 0),
        ("Qwen/Qwen3-30B-A3B", 98_304, 0),
        ("Qwen/Qwen3-235B-A22B", 192_512, 0),
        ("deepseek-ai/DeepSeek-V3", 70_272, 0),
        ("Qwen/Qwen3.5-27B", 65_536, 153.9),
        ("openai/gpt-oss-20b", 24_576, 3.1),
    ],
)
def test_cache_bytes(name: str, kv_bytes: int, fixed_megabytes: float) -> None:
    assert MODELS[name].kv_bytes_per_token() == kv_bytes
    assert round(MODELS[name].fixed_sequence_bytes() / 1e6, 1) == fixed_megabytes


def test_training_flops_of_qwen3_06b() -> None:
    shape = MODELS["Qwen/Qwen3-0.6B"]
    assert shape.train_flops_per_token(2048) == 4_280_549_376
    # what a counter gives that takes the head dimension for width over heads in attention
    narrow = replace(shape, head_dim=shape.width // shape.num_heads)
    attention = 3 * narrow.causal_flops_per_token(2048)
    assert 6 * shape.active_parameters + attention == 3_928_227_840


# totals and active counts, in billions, that the models' makers give
CARDS = {
    "Qwen/Qwen3-4B": (4.0, None), "Qwen/Qwen3-8B": (8.2, None), "Qwen/Qwen3-32B": (32.8, None),
    "Qwen/Qwen3-30B-A3B": (30.5, 3.3), "Qwen/Qwen3-235B-A22B": (235, 22),
    "meta-llama/Llama-3.1-70B": (70.6, None),
    "meta-llama/Llama-3.2-1B": (1.23, None), "mistralai/Mistral-7B-v0.3": (7.25, None),
    "microsoft/Phi-3-mini-4k-instruct": (3.8, None), "openai/gpt-oss-20b": (20.9, 3.6),
    "openai/gpt-oss-120b": (116.8, 5.1), "deepseek-ai/DeepSeek-V3": (671, 37),
    "moonshotai/Kimi-K2-Instruct": (1000, 32),
    "zai-org/GLM-4.5": (355, 32), "zai-org/GLM-4.5-Air": (106, 12), "google/gemma-3-27b-pt": (27, None),
}  # fmt: skip


@pytest.mark.parametrize("name", CARDS)
def test_sizes_agree_with_the_cards(name: str) -> None:
    total, active = CARDS[name]
    assert MODELS[name].total_parameters / 1e9 == pytest.approx(total, rel=0.03)
    if active is not None:  # makers count the embedding or not, as they like
        assert MODELS[name].active_parameters / 1e9 == pytest.approx(active, rel=0.1)


@pytest.mark.parametrize(("name", "ratio"), [("Qwen3-0.6B", 148), ("Qwen3-8B", 37), ("Qwen3-32B", 30)])
def test_vocabulary_over_width(name: str, ratio: int) -> None:
    shape = find_model(name)
    assert round(shape.vocab_size / shape.width) == ratio


def test_logits() -> None:
    assert round(logits_bytes(1, 151_936) / 1e6, 2) == 0.61
    assert round(logits_bytes(32_768, 151_936) / 1e9, 1) == 19.9
    with pytest.raises(ValueError, match="num_tokens >= 0"):
        logits_bytes(-1, 10)


@settings(max_examples=40, deadline=None)
@given(num_tokens=st.integers(1, 400), window=st.integers(1, 500), full=st.integers(0, 3))
def test_attention_flops_count_the_pairs(num_tokens: int, window: int, full: int) -> None:
    shape = ModelShape(
        name="m", width=4, vocab_size=7, num_heads=2, num_kv_heads=1, head_dim=3, ffn_width=5,
        num_full_layers=full, num_window_layers=2, window=window,
    )  # fmt: skip
    # position t reads t tokens and half of its own: the triangle's area is T^2 / 2
    pairs = sum(full * (t + 0.5) + 2 * (min(t + 0.5, window)) for t in range(num_tokens))
    exact = 2 * 2 * 2 * 3 * pairs / num_tokens
    assert shape.causal_flops_per_token(num_tokens) == pytest.approx(exact, rel=1e-12)


def test_decode_reads_the_window_and_no_more() -> None:
    shape = MODELS["openai/gpt-oss-20b"]
    assert shape.sequence_bytes(100) == 24 * 100 * 2048
    assert shape.sequence_bytes(10_000) == 12 * 10_000 * 2048 + 12 * 128 * 2048
    assert shape.decode_flops_per_token(10_000) == 4 * 64 * 64 * 12 * (10_000 + 128)


def test_experts_touched_by_a_batch() -> None:
    experts = Experts(num_layers=1, num_experts=8, experts_per_token=2, width=1)
    assert experts.touched(0) == 0
    assert experts.touched(1) == pytest.approx(2)
    assert experts.touched(2) == pytest.approx(8 * (1 - (6 / 8) ** 2))
    assert experts.touched(1e6) == pytest.approx(8)


def test_eight_bit_weights_keep_embedding_and_head() -> None:
    shape = MODELS["Qwen/Qwen3-8B"]
    embedding = 2 * 151_936 * 4096
    assert shape.weight_bytes(2.0) == 2 * shape.total_parameters
    assert shape.weight_bytes(1.0) == shape.total_parameters + embedding


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"width": 0}, "width"),
        ({"num_full_layers": 0}, "num_layers"),
        ({"num_window_layers": 1}, "no window"),
        ({"num_linear_layers": 1}, "linear-attention"),
        ({"ffn_width": 0}, "feed-forward"),
    ],
)
def test_impossible_shapes_are_named(change: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(MODELS["Qwen/Qwen3-8B"], **change)
