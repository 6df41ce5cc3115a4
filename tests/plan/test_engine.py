"""The engine: its cache against a measured one, and how a step grows."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.plan.configs import find_model
from agentrl.plan.engine import VLLM_0_30_0, Engine, constants_from_toml
from agentrl.plan.gpus import find_gpu

QWEN = find_model("Qwen/Qwen3-8B")
ON_H100 = Engine(shape=QWEN, gpu=find_gpu("H100"), constants=VLLM_0_30_0)
ON_H200 = replace(ON_H100, gpu=find_gpu("H200"))


def test_the_cache_of_the_measured_engine(shared_data: Path) -> None:
    measured = json.loads((shared_data / "decode_qwen3_8b_h100.json").read_text())
    tokens = ON_H100.pool_bytes / QWEN.kv_bytes_per_token()
    assert tokens == pytest.approx(measured["kv_cache_tokens"], rel=1e-4)  # the overhead is taken from it
    eight_bit = replace(ON_H100, weight_bytes_each=1.0)
    tokens = eight_bit.pool_bytes / QWEN.kv_bytes_per_token()
    assert tokens == pytest.approx(
        measured["kv_cache_tokens_fp8_weights"], rel=0.02
    )  # and this is a prediction


def test_64_sequences_of_16k_do_not_fit_one_h200() -> None:
    assert round(ON_H200.max_sequences(16_384)) == 47
    assert ON_H200.serving_tokens_per_second(16_383, 2, 64) == ON_H200.serving_tokens_per_second(
        16_383, 2, 512
    )


def test_a_model_that_leaves_no_cache_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"Llama-3.1-70B does not fit: 141.1 GB .* raise --tensor-parallel .*--weight-bits 8"
    ):
        replace(ON_H200, shape=find_model("Llama-3.1-70B"))
    for change, remedy in [
        ({"overhead_bytes": 2e11}, "200.0 GB of overhead a GPU .*; lower --overhead-bytes"),
        ({"memory_utilization": 0.1}, "; raise --memory-utilization or --tensor-parallel"),
    ]:
        with pytest.raises(ValueError, match=f"16.4 GB of weights .*{remedy}"):
            replace(ON_H200, constants=replace(VLLM_0_30_0, **change))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name = 'x'\n[", "mine.toml is not TOML"),
        ("speed = 3", r"mine.toml has unknown keys \['speed'\]; the keys are \['name', 'step_seconds'"),
        ("name = 'x'\nstep_seconds = 1.0", r"mine.toml lacks the keys \['sequence_seconds'"),
        ("name = 3", "mine.toml: name must be text, got 3"),
        ("step_seconds = true", "mine.toml: step_seconds must be a number, got True"),
        ("step_seconds = nan", "mine.toml: step_seconds must be a number from 1e-12 to 100, got nan"),
        ("compute_share = 1e300", "mine.toml: compute_share must be at most 2, got 1e"),
    ],
)
def test_an_engine_file_that_cannot_be(text: str, says: str) -> None:
    whole = "" if "name" in text or "speed" in text else tomli_w.dumps(
        {k: v for k, v in asdict(VLLM_0_30_0).items() if k not in text})  # fmt: skip
    if text == "name = 3":
        whole = tomli_w.dumps({k: v for k, v in asdict(VLLM_0_30_0).items() if k != "name"})
    with pytest.raises(ValueError, match=says):
        constants_from_toml(f"{whole}\n{text}", "mine.toml")


def test_decode_step_by_hand() -> None:
    c = VLLM_0_30_0
    read = 2 * QWEN.active_parameters + 3 * 1000 * 147_456
    expected = c.step_seconds + read / (c.bandwidth_share * 3.35e12) + 3 * c.sequence_seconds
    assert ON_H100.decode_seconds(3, 1000) == pytest.approx(expected, rel=1e-12)


def test_a_large_batch_is_bound_by_arithmetic() -> None:
    c = replace(VLLM_0_30_0, sequence_seconds=1e-12, step_seconds=1e-12)
    engine = replace(ON_H100, constants=c)
    flops = 2 * QWEN.active_parameters + QWEN.decode_flops_per_token(1)
    assert engine.decode_seconds(4096, 1) == pytest.approx(
        4096 * flops / (c.compute_share * 989e12), rel=1e-6
    )


def test_tensor_parallel_shares_reads_and_pays_for_reductions() -> None:
    two = replace(ON_H100, tensor_parallel=2, allreduce_seconds=0.0)
    assert two.decode_seconds(8, 4096) < ON_H100.decode_seconds(8, 4096)
    slow = replace(two, allreduce_seconds=1e-5)
    assert slow.decode_seconds(8, 4096) == pytest.approx(two.decode_seconds(8, 4096) + 2 * 36 * 1e-5)
    assert replace(two, tensor_parallel=8).sequence_bytes(100) == two.sequence_bytes(100)  # a head each
    assert replace(two, tensor_parallel=16).sequence_bytes(100) == 2 * two.sequence_bytes(100)  # a head twice
    latent = Engine(
        shape=find_model("DeepSeek-V3"), gpu=find_gpu("B300"), constants=VLLM_0_30_0, tensor_parallel=8
    )
    assert latent.sequence_bytes(1) == 8 * 70_272  # each rank holds the latent


def test_a_step_reads_the_experts_that_its_tokens_touch() -> None:
    engine = replace(ON_H200, shape=find_model("Qwen/Qwen3-30B-A3B"))
    small, large = engine.decode_seconds(1, 1), engine.decode_seconds(128, 1)
    assert large - small > 0.8 * (30.5e9 - 3.0e9) * 2 / (0.86 * 4.8e12)


@settings(max_examples=40, deadline=None)
@given(batch=st.floats(1, 500), context=st.floats(1, 1e5), prefill=st.floats(0, 10))
def test_more_work_takes_longer(batch: float, context: float, prefill: float) -> None:
    step = ON_H200.step_seconds(batch, context, prefill, context)
    assert ON_H200.step_seconds(batch + 1, context, prefill, context) > step
    assert ON_H200.step_seconds(batch, context + 1e3, prefill, context) > step
    assert ON_H200.step_seconds(batch, context, prefill + 1, context) > step
    assert ON_H200.step_seconds(batch + 1, context, prefill, context) / (batch + 1) < step / batch


@pytest.mark.parametrize(
    "change",
    [{"step_seconds": 0.0}, {"bandwidth_share": -1.0}, {"memory_utilization": 1.1}, {"overhead_bytes": -1.0}],
)
def test_impossible_constants(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="--" + next(iter(change)).replace("_", "-")):
        replace(VLLM_0_30_0, **change)


def test_impossible_engines() -> None:
    with pytest.raises(ValueError, match="tensor_parallel"):
        replace(ON_H100, tensor_parallel=0)
    with pytest.raises(ValueError, match="kv_bytes_each"):
        replace(ON_H100, kv_bytes_each=0.0)
    with pytest.raises(ValueError, match="allreduce_seconds"):
        replace(ON_H100, allreduce_seconds=-1.0)
    with pytest.raises(ValueError, match="concurrency"):
        ON_H100.serving_tokens_per_second(1, 1, 0)
