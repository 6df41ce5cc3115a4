"""Shapes from config.json: parameter counts equal those of the real modules, other inputs give clear
errors."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.plan import architectures, configs
from agentrl.plan.configs import find_model, shape_from_config

TINY = {
    "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 16, "vocab_size": 10,
}  # fmt: skip
TABLE = json.loads(Path(configs.__file__).with_name("models.json").read_text())
# one of each architecture
REAL = [
    "Qwen/Qwen3-0.6B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3.5-27B", "Qwen/Qwen2.5-3B", "meta-llama/Llama-3.2-1B",
    "mistralai/Mistral-Nemo-Base-2407", "google/gemma-2-9b", "google/gemma-3-1b-pt", "openai/gpt-oss-20b",
    "microsoft/Phi-3-mini-4k-instruct", "allenai/OLMo-2-1124-7B", "deepseek-ai/DeepSeek-V3",
    "zai-org/GLM-4.5-Air",
]  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_parameters_equal_the_modules(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    config: dict[str, Any] = {**TABLE[name]["config"], "num_hidden_layers": 4}
    hf = transformers.AutoConfig.for_model(
        **{k: v for k, v in config.items() if k != "full_attention_interval"}
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(hf)
    # a tied head is one parameter; norms, biases, sinks and per-head scalars are what the planner leaves out
    left_out = ("norm", "bias", "sinks", "A_log", "e_score")
    counted = sum(p.numel() for n, p in model.named_parameters() if not any(word in n for word in left_out))
    shape = shape_from_config(config, name)
    assert shape.total_parameters == counted


@pytest.mark.parametrize("model_type", sorted(architectures.KNOWN - {"deepseek_v2", "kimi_k2", "ministral"}))
def test_each_known_architecture_is_counted_as_its_modules(model_type: str) -> None:
    # of the three left out, transformers has no default that can be built
    transformers = pytest.importorskip("transformers")
    import torch

    hf = transformers.AutoConfig.for_model(model_type)
    config = json.loads(hf.to_json_string(use_diff=False))
    text = config.get("text_config", config)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(hf.get_text_config())
    left_out = ("norm", "bias", "sinks", "A_log", "e_score")
    counted = sum(p.numel() for n, p in model.named_parameters() if not any(word in n for word in left_out))
    shape = shape_from_config(config)
    head = 0 if shape.tied_head else shape.head_parameters  # the model without its head
    assert shape.total_parameters - head == pytest.approx(counted, rel=1e-4)
    changed = {**text, "model_type": text.get("model_type") or model_type}
    for key in ("num_key_value_heads", "head_dim", "tie_word_embeddings", "attn_output_gate"):
        if key in changed and not (key == "head_dim" and shape.latent):
            default = shape_from_config({k: v for k, v in changed.items() if k != key})
            assert default == shape_from_config(changed), key


def test_layer_kinds() -> None:
    def kinds(**more: Any) -> tuple[int, int, int]:
        shape = shape_from_config({**TINY, **more})
        return shape.num_full_layers, shape.num_window_layers, shape.num_linear_layers

    linear = {
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
    }
    assert kinds() == (4, 0, 0)
    assert kinds(full_attention_interval=4, **linear) == (1, 0, 3)
    assert kinds(model_type="mistral", sliding_window=4) == (0, 4, 0)
    assert kinds(model_type="mistral", sliding_window=None) == (4, 0, 0)
    assert kinds(model_type="gpt_oss", sliding_window=4) == (2, 2, 0)
    assert kinds(model_type="qwen2", sliding_window=4, use_sliding_window=False) == (4, 0, 0)
    assert kinds(model_type="qwen2", sliding_window=4, use_sliding_window=True, max_window_layers=3) == (
        3,
        1,
        0,
    )
    assert kinds(layer_types=["full_attention"] * 3 + ["sliding_attention"], sliding_window=4) == (3, 1, 0)


def test_expert_layers() -> None:
    moe = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 3, "n_shared_experts": 2}
    shape = shape_from_config({**TINY, **moe, "first_k_dense_replace": 1})
    assert shape.experts is not None
    assert (shape.experts.num_layers, shape.experts.shared_width, shape.num_dense_layers) == (3, 6, 1)
    listed = shape_from_config({**TINY, **moe, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]})
    assert listed.experts is not None
    assert listed.experts.num_layers == 2
    named = {"num_shared_experts" if key == "n_shared_experts" else key: value for key, value in moe.items()}
    assert shape_from_config({**TINY, **named}) == shape_from_config({**TINY, **moe})
    sparse = shape_from_config({**TINY, **moe, "decoder_sparse_step": 2, "mlp_only_layers": [1]})
    assert sparse.experts is not None
    assert sparse.experts.num_layers == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": None}, "hidden_size must be a positive integer, got None"),
        ({"vocab_size": "10"}, "vocab_size"),
        ({"ssm_state_size": 16}, "ssm_state_size"),
        ({"layer_types": ["mamba"] * 4}, "mamba"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 4 layers"),
        ({"num_experts": 4}, "num_experts_per_tok"),
        (
            {"num_experts": 4, "num_experts_per_tok": 5},
            r"num_experts_per_tok \(5\) cannot be more than num_ex",
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10,000"),
        (
            {"sliding_window": "all", "layer_types": ["sliding_attention"] * 4},
            "sliding_window must be a positive integer, got 'all'",
        ),
        ({"model_type": "starcoder2"}, "layers of model_type 'starcoder2' are not known"),
        ({"model_type": "lama"}, r"nearest name is 'llama'\), write its model_type"),
        ({"model_type": None}, "model_type must name the architecture, such as 'llama', got None"),
        ({"model_type": ["llama"]}, "must name the architecture"),
        ({"num_key_value_heads": 4}, r"num_key_value_heads \(4\) must divide num_attention_heads \(2\)"),
        ({"model_type": "mistral", "num_key_value_heads": 3}, "must divide"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
        ({"attn_output_gate": 1}, "attn_output_gate must be true or false, got 1"),
        ({"layer_types": "full_attention"}, "layer_types must be a list"),
        ({"model_type": "cohere2", "sliding_window": 4}, "layer_types must say which layers"),
        (
            {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": ["0"]},
            "mlp_only_layers must be num",
        ),
        ({"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [4]}, "mlp_only_layers must be num"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "mlp_layer_types": ["dense"]}, "mlp_layer_types must"),
    ],
)
def test_configs_that_are_not_understood(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        shape_from_config({**TINY, **change})


@pytest.mark.parametrize("name", REAL)
def test_a_config_with_one_value_spoiled_gives_a_shape_or_names_the_file(name: str) -> None:
    config = TABLE[name]["config"]
    more = ("text_config", "layer_types", "mlp_only_layers", "num_experts", "kv_lora_rank")
    for key in (*config, *more):
        for value in (None, "x", -1, 0, 1.5, float("nan"), True, [], [None], {}, 10**9, 10**300):
            try:
                shape = shape_from_config({**config, key: value}, "x/config.json")
            except ValueError as error:
                assert "x/config.json" in str(error), (key, value)  # noqa: PT017
            else:
                assert 0 < shape.active_parameters <= shape.total_parameters < math.inf
                assert 0 < shape.sequence_bytes(100.0) < math.inf


def test_a_path_a_folder_and_a_nested_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x_vl", "text_config": TINY}))
    assert find_model(str(tmp_path)).width == 8
    assert find_model(str(tmp_path / "config.json")).num_layers == 4


def test_a_nested_config_takes_what_it_lacks_from_outside_or_from_its_architecture() -> None:
    inside = {key: value for key, value in TINY.items() if key not in ("model_type", "head_dim")}
    outside = {"model_type": "gemma", "tie_word_embeddings": False, "text_config": inside}
    shape = shape_from_config(outside)
    assert (shape.tied_head, shape.head_dim) == (False, 256)
    assert shape_from_config({**outside, "text_config": {**inside, "tie_word_embeddings": True}}).tied_head
    assert shape_from_config({"text_config": TINY}).head_dim == 4


@pytest.mark.parametrize(("text", "says"), [("{", "not JSON"), ("[]", "must hold a JSON object")])
def test_files_that_are_no_config(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=says):
        find_model(str(tmp_path))


def no_hub(name: str) -> str:
    raise OSError("no route")


def test_the_hub_is_asked_for_other_names() -> None:
    fetch: Callable[[str], str] = lambda name: json.dumps(TINY)  # noqa: E731
    assert find_model("someone/tiny", fetch).name == "someone/tiny"
    with pytest.raises(
        ValueError, match=r"no model 'Qwen/Qwen3-8C' on the hub \(no route\); did you mean 'Qwen/Qwen3-8B'"
    ):
        find_model("Qwen/Qwen3-8C", no_hub)
    with pytest.raises(
        ValueError, match="did you mean 'Qwen/Qwen3-8B'"
    ):  # no organisation: the hub is not asked
        find_model("Qwen3-88B", no_hub)


@pytest.mark.parametrize(
    "name", ["qwen3-8b", "Qwen/Qwen3-8B-Base", "meta-llama/Llama-3.1-8B-Instruct", "gemma-2-9b-it"]
)
def test_variants_of_known_models(name: str) -> None:
    assert find_model(name, no_hub).num_layers > 0
