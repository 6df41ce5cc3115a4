"""The first-order roofline: the numbers that anyone can check on paper."""

import pytest

from agentrl.plan.configs import find_model
from agentrl.plan.gpus import find_gpu
from agentrl.plan.roofline import decode_tokens_per_second, first_order_hours, train_tokens_per_second

H200 = find_gpu("H200")
QWEN = find_model("Qwen/Qwen3-8B")
N = 8.2e9


@pytest.mark.parametrize(
    ("batch", "context", "tokens_per_second"), [(64, 2048, 8598), (64, 16_384, 1796), (256, 16_384, 1935)]
)
def test_decode(batch: int, context: int, tokens_per_second: int) -> None:
    rate = decode_tokens_per_second(N, QWEN.kv_bytes_per_token(), H200.bytes_per_second, batch, context)
    assert round(rate) == tokens_per_second


def test_train() -> None:
    assert round(train_tokens_per_second(N, H200.flops_per_second, 0.4)) == 8041


def hours(**change: float):
    settings = {"episodes": 512, "tokens": 24_000, "sampled": 6_000, "batch": 64, "context": 16_384, "busy":
    0.5,
                "mfu": 0.4}  # fmt: skip
    return first_order_hours(QWEN, H200, **(settings | change))


def test_gpu_hours_of_a_step() -> None:
    assert QWEN.nominal_parameters == N
    step = hours()
    assert [round(value, 2) for value in (step.train, step.old_log_probs, step.prefill, step.decode)] == [
        0.42, 0.14, 0.11, 0.95,
    ]  # fmt: skip
    assert round(step.total, 2) == 1.62
    assert round(300 * step.total) == 487
    assert round(100 * step.decode_share) == 59
    assert step.reference == step.waiting == 0


def test_the_redo_at_64k_of_context() -> None:
    step = hours(context=65_536)
    step_seconds = (16.4e9 + 64 * 65_536 * 147_456) / 4.8e12
    assert step.decode == pytest.approx(512 * 6000 * step_seconds / 64 / 0.5 / 3600)
    assert round(step.decode, 2) == 3.53


def test_a_cache_four_times_smaller() -> None:
    step = hours(kv_bytes_each=0.5)
    step_seconds = (16.4e9 + 64 * 16_384 * 36_864) / 4.8e12
    assert step.decode == pytest.approx(512 * 6000 * step_seconds / 64 / 0.5 / 3600)
    assert round(step.decode, 2) == 0.31
    assert round(step.total, 2) == 0.98


def test_weights_of_one_byte() -> None:
    rate = decode_tokens_per_second(N, 0, 4.8e12, batch=1, context=0, weight_bytes_each=1.0)
    assert rate == pytest.approx(4.8e12 / N)


def test_mixture_reads_all_and_multiplies_the_active() -> None:
    shape = find_model("Qwen/Qwen3-30B-A3B")
    step = first_order_hours(
        shape, H200, episodes=1, tokens=3600, sampled=3600, batch=1, context=1, busy=1, mfu=1
    )
    assert step.train == pytest.approx(6 * shape.active_parameters / 989e12)
    assert step.decode == pytest.approx((2 * 30.5e9 + 98_304) / 4.8e12)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"episodes": 0}, "episodes must be positive"),
        ({"tokens": -1}, "tokens must be positive"),
        ({"sampled": 24_001}, "cannot be more than tokens"),
        ({"busy": 0}, "busy"),
        ({"mfu": float("nan")}, "mfu"),
        ({"batch": 0}, "batch"),
    ],
)
def test_impossible_figures(change: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        hours(**change)
