"""Memory of training: by hand for 8B on 8 GPUs, and the largest microbatch that fits."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.plan.configs import find_model, shape_from_config
from agentrl.plan.gpus import find_gpu
from agentrl.plan.memory import (
    LOGITS,
    activation_bytes,
    check_training_fits,
    largest_microbatch,
    layer_activation_bytes,
    training_memory,
)
from agentrl.plan.workload import Logits, Training

QWEN = find_model("Qwen/Qwen3-8B")
H200 = find_gpu("H200")


def test_8b_on_8_gpus_with_32k_tokens() -> None:
    m = training_memory(QWEN, 8, Training(), 0.25)
    size = QWEN.total_parameters
    assert (m.parameters, m.gradients, m.optimizer) == (2 * size / 8, 4 * size / 8, 12 * size / 8)
    assert m.reference == 0
    layer = 2 * (4 * 4096 + 3 * 4096 + 3 * 1024 + 4 * 12_288) + 4 * (2 * 4096 + 4096 + 1024)
    assert m.activations == 32_768 * (36 * 2 * 4096 + layer)
    assert m.logits == 2 * 1024 * 151_936 * 4
    assert m.total == sum(value for _, value in m.items())
    assert m.states == m.total - m.activations - m.logits
    assert round(m.total / 1e9, 1) == 39.6


@pytest.mark.parametrize(
    ("logits", "gigabytes"), [("full", 39.8), ("chunked", 20.5), ("recomputed", 1.2), ("actions", 10.0)]
)
def test_logits(logits: Logits, gigabytes: float) -> None:
    m = training_memory(QWEN, 8, Training(logits=logits), 0.25)
    assert round(m.logits / 1e9, 1) == gigabytes


def test_checkpointing() -> None:
    kept = activation_bytes(QWEN, 32_768, checkpointing=False)
    assert kept == 36 * 32_768 * layer_activation_bytes(QWEN)
    assert round(kept / 1e9) == 254
    assert round(activation_bytes(QWEN, 32_768, checkpointing=True) / 1e9) == 17


def test_a_real_layer_keeps_what_the_formula_says() -> None:
    transformers = pytest.importorskip("transformers")
    config = {"model_type": "qwen3", "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2,
              "head_dim": 32, "intermediate_size": 768, "vocab_size": 64}  # fmt: skip
    num_tokens = 256

    def saved_bytes(num_layers: int) -> int:
        hf = transformers.AutoConfig.for_model(**config, num_hidden_layers=num_layers)
        model = transformers.AutoModel.from_config(hf, attn_implementation="sdpa").to(torch.bfloat16)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept: dict[int, torch.UntypedStorage] = {}  # holding the storages keeps their addresses apart

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.zeros(1, num_tokens, dtype=torch.int64))
        return sum(storage.nbytes() for storage in kept.values())

    a_layer = (saved_bytes(5) - saved_bytes(2)) / 3 / num_tokens
    shape = shape_from_config({**config, "num_hidden_layers": 2})
    assert layer_activation_bytes(shape) == pytest.approx(a_layer, rel=0.01)


def test_reference_and_one_gpu() -> None:
    m = training_memory(QWEN, 1, Training(reference=True), 0.25)
    assert m.reference == m.parameters == 2 * QWEN.total_parameters
    assert m.gathered == 0


@settings(max_examples=40, deadline=None)
@given(
    gpus=st.integers(1, 64),
    logits=st.sampled_from(LOGITS),
    checkpointing=st.booleans(),
    share=st.floats(0, 1),
)
def test_the_largest_microbatch_fits_and_the_next_does_not(
    gpus: int, logits: Logits, checkpointing: bool, share: float
) -> None:
    training = Training(logits=logits, checkpointing=checkpointing)
    largest = largest_microbatch(QWEN, H200, gpus, training, share)
    budget = H200.memory_bytes * training.train_memory_share
    assert largest % 1024 == 0
    if largest:
        assert (
            training_memory(QWEN, gpus, replace(training, microbatch_tokens=largest), share).total <= budget
        )
    more = replace(training, microbatch_tokens=largest + 1024)
    assert training_memory(QWEN, gpus, more, share).total > budget


def test_what_does_not_fit_says_what_to_change() -> None:
    with pytest.raises(ValueError, match="lower --microbatch-tokens to 14336"):
        check_training_fits(QWEN, H200, 8, Training(checkpointing=False), 0.25)
    with pytest.raises(ValueError, match=r"Qwen3-8B does not fit: .* raise --gpus"):
        check_training_fits(QWEN, H200, 1, Training(), 0.25)
    check_training_fits(QWEN, H200, 8, Training(), 0.25)
    with pytest.raises(ValueError, match="num_gpus >= 1"):
        training_memory(QWEN, 0, Training(), 0.25)
