"""Model shapes from a Hugging Face `config.json`: the built-in table (`models.json`), a path, or the hub."""

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from agentrl.plan import architectures
from agentrl.plan.inputs import Range, parse_text, read_text
from agentrl.plan.models import Experts, LatentAttention, LinearAttention, ModelShape

Config = Mapping[str, Any]

_TABLE = Path(__file__).with_name("models.json")
_ENDINGS = ("-instruct", "-base", "-it", "-pt")  # trained differently, shaped the same
# a config with one of these has layers whose cost this file does not know
_UNKNOWN_PARTS = ("ssm_cfg", "ssm_state_size", "mamba_d_state", "state_size", "conv_L_cache",
                  "linear_attn_config", "index_topk", "compress_ratios", "encoder_layers")  # fmt: skip
_COUNT = Range(1, 1e9, "")
_LAYERS = Range(1, 1e4, "layers")


def shape_from_config(config: Config, name: str = "config.json") -> ModelShape:
    """The shape that a Hugging Face model configuration describes.

    Raises ValueError, naming the key, where one is missing or describes layers that the planner does not
    know, and for an architecture (`model_type`) that is not in
    `architectures.KNOWN`.

    >>> tiny = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    ...         "intermediate_size": 16, "vocab_size": 10}
    >>> shape_from_config(tiny).kv_bytes_per_token()
    64.0
    """
    if isinstance(config.get("text_config"), dict):  # vision models keep the language model's shape inside
        outside = {key: config.get(key) for key in ("model_type", "tie_word_embeddings")}
        config = {**outside, **cast(dict[str, Any], config["text_config"])}
    _check_type(config, name)
    for key in _UNKNOWN_PARTS:
        if config.get(key):
            raise ValueError(f"{name}: {key!r} means layers that the planner does not know")
    model_type = str(config["model_type"])
    num_heads = _integer(config, "num_attention_heads", name)
    num_kv_heads = _integer(config, "num_key_value_heads", name, num_heads)
    latent = _latent(config, name)
    if latent is None and num_heads % num_kv_heads:
        raise ValueError(
            f"{name}: num_key_value_heads ({num_kv_heads}) must divide num_attention_heads ({num_heads})"
        )
    width = _integer(config, "hidden_size", name)
    kinds = _layer_kinds(config, name)
    experts = _experts(config, len(kinds), name)
    return ModelShape(
        name=name,
        width=width,
        vocab_size=_integer(config, "vocab_size", name),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_integer(config, "head_dim", name, width // num_heads),
        num_full_layers=kinds.count("full_attention"),
        num_window_layers=kinds.count("sliding_attention"),
        window=_count(config, "sliding_window", name),
        num_linear_layers=kinds.count("linear_attention"),
        ffn_width=_count(config, "intermediate_size", name),
        tied_head=_yes(config, "tie_word_embeddings", name, model_type in architectures.TIED),
        attention_gate=_yes(config, "attn_output_gate", name, model_type in architectures.GATED),
        latent=latent,
        linear=_linear(config, name) if "linear_attention" in kinds else None,
        experts=experts,
    )


def _check_type(config: Config, name: str) -> None:
    model_type: object = config.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(
            f"{name}: model_type must name the architecture, such as 'llama', got {model_type!r}"
        )
    if model_type not in architectures.KNOWN:
        nearest = difflib.get_close_matches(model_type, architectures.KNOWN, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"{name}: the layers of model_type {model_type!r} are not known; where they are those of a known "
            f"architecture (the nearest name is {nearest!r}), write its model_type into a copy of the file"
        )


def _integer(config: Config, key: str, name: str, default: int | None = None) -> int:
    if key not in config:
        default = architectures.LEFT_OUT.get(key, {}).get(str(config.get("model_type")), default)
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: {key} must be a positive integer, got {value!r}")
    _COUNT.check(f"{name}: {key}", value)
    return value


def _count(config: Config, key: str, name: str) -> int:
    # of something that a model may lack: 0 where the key is missing, null or 0
    return _integer(config, key, name) if config.get(key) else 0


def _yes(config: Config, key: str, name: str, default: bool) -> bool:
    value: object = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{name}: {key} must be true or false, got {value!r}")
    return value


def _list(config: Config, key: str, name: str) -> list[object]:
    # empty where the key is missing or null
    value: object = config.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError(f"{name}: {key} must be a list, got {value!r}")
    return cast(list[object], value)


def _layer_kinds(config: Config, name: str) -> list[str]:
    num_layers = _integer(config, "num_hidden_layers", name)
    _LAYERS.check(f"{name}: num_hidden_layers", num_layers)
    model_type = str(config.get("model_type", ""))
    if kinds := [str(kind) for kind in _list(config, "layer_types", name)]:
        unknown = sorted({*kinds} - {"full_attention", "sliding_attention", "linear_attention"})
        if unknown or len(kinds) != num_layers:
            raise ValueError(
                f"{name}: {len(kinds)} layer_types for {num_layers} layers, unknown kinds {unknown}"
            )
        return kinds
    if config.get("full_attention_interval"):
        every, other = _integer(config, "full_attention_interval", name), "linear_attention"
    elif model_type in ("gemma2", "gpt_oss"):
        every, other = 2, "sliding_attention"
    elif model_type in ("gemma3", "gemma3_text"):
        every, other = _integer(config, "sliding_window_pattern", name, 6), "sliding_attention"
    elif model_type in architectures.WINDOWED_THROUGHOUT and config.get("sliding_window"):
        every, other = num_layers + 1, "sliding_attention"
    elif config.get("sliding_window") and _yes(
        config, "use_sliding_window", name, model_type not in architectures.WINDOW_ON_DEMAND
    ):
        if "max_window_layers" not in config:
            raise ValueError(f"{name}: layer_types must say which layers the sliding_window is for")
        first = _count(config, "max_window_layers", name)
        return ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    else:
        return ["full_attention"] * num_layers
    return ["full_attention" if (i + 1) % every == 0 else other for i in range(num_layers)]


def _experts(config: Config, num_layers: int, name: str) -> Experts | None:
    key = next((k for k in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(k)), None)
    if key is None:
        return None
    num_experts, chosen = _integer(config, key, name), _integer(config, "num_experts_per_tok", name)
    if chosen > num_experts:
        raise ValueError(f"{name}: num_experts_per_tok ({chosen}) cannot be more than {key} ({num_experts})")
    width = _count(config, "moe_intermediate_size", name) or _integer(config, "intermediate_size", name)
    first = _count(config, "first_k_dense_replace", name)
    step = _count(config, "decoder_sparse_step", name) or _count(config, "moe_layer_freq", name) or 1
    dense = _list(config, "mlp_only_layers", name)
    if not all(isinstance(layer, int) and 0 <= layer < num_layers for layer in dense):
        raise ValueError(f"{name}: mlp_only_layers must be numbers of layers from 0, got {dense!r}")
    sparse = [i for i in range(first, num_layers) if i not in dense and (i + 1) % step == 0]
    if kinds := _list(config, "mlp_layer_types", name):
        if len(kinds) != num_layers or any(kind not in ("dense", "sparse") for kind in kinds):
            raise ValueError(f"{name}: mlp_layer_types must be 'dense' or 'sparse' for each of its layers")
        sparse = [i for i, kind in enumerate(kinds) if kind == "sparse"]
    shared = _count(config, "shared_expert_intermediate_size", name)
    shared_experts = _count(config, "n_shared_experts", name) or _count(config, "num_shared_experts", name)
    return Experts(
        num_layers=len(sparse),
        num_experts=num_experts,
        experts_per_token=chosen,
        width=width,
        shared_width=shared or shared_experts * width,
    )


def _latent(config: Config, name: str) -> LatentAttention | None:
    if not config.get("kv_lora_rank"):
        return None
    return LatentAttention(
        kv_rank=_integer(config, "kv_lora_rank", name),
        rope_dim=_integer(config, "qk_rope_head_dim", name),
        nope_dim=_integer(config, "qk_nope_head_dim", name),
        value_dim=_integer(config, "v_head_dim", name),
        q_rank=_count(config, "q_lora_rank", name),
    )


def _linear(config: Config, name: str) -> LinearAttention:
    return LinearAttention(
        num_key_heads=_integer(config, "linear_num_key_heads", name),
        num_value_heads=_integer(config, "linear_num_value_heads", name),
        key_dim=_integer(config, "linear_key_head_dim", name),
        value_dim=_integer(config, "linear_value_head_dim", name),
        conv_kernel=_integer(config, "linear_conv_kernel_dim", name, 4),
        state_bytes=2 if config.get("mamba_ssm_dtype") == "bfloat16" else 4,
    )


def built_in_models() -> dict[str, ModelShape]:
    """The well-known models by their hub name."""
    found: dict[str, ModelShape] = {}
    for name, entry in json.loads(_TABLE.read_text(encoding="utf-8")).items():
        found[name] = _with_card(shape_from_config(entry["config"], name), entry.get("card_parameters"))
    return found


def _with_card(shape: ModelShape, card_parameters: float | None) -> ModelShape:
    return replace(shape, card_parameters=card_parameters)


def fetch_config(name: str) -> str:
    """Text of a hub model's `config.json`; URLError where the hub or the model is out of reach."""
    # slow to load, and rarely needed
    import urllib.request
    from http.client import HTTPException
    from urllib.error import URLError
    from urllib.parse import quote

    url = f"https://huggingface.co/{quote(name)}/resolve/main/config.json"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.read().decode(errors="replace")
    except HTTPException as error:
        raise URLError(repr(error)) from error


def find_model(name: str, fetch: Callable[[str], str] = fetch_config) -> ModelShape:
    """The shape of a built-in model (without organisation, -Instruct or -Base too), of a path, or of the hub.

    Raises ValueError with the nearest built-in name where `name` is none of them, or its config is not
    understood.

    >>> find_model("Qwen3-8B").kv_bytes_per_token()
    147456.0
    """
    table = built_in_models()
    by_key = {
        key: shape for known, shape in table.items() for key in (_key(known), _key(known.split("/")[1]))
    }
    if _key(name) in by_key:
        return by_key[_key(name)]
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ValueError(f"the folder {name} holds no config.json")
    if path.is_file():
        return _parse(read_text(path), str(path))
    if name.startswith((".", "/", "~")) or name.endswith(".json"):
        raise ValueError(f"no such file: {name} (wanted a model's config.json, or the folder that holds it)")
    why = ""
    if name.count("/") == 1:
        try:
            return _parse(fetch(name), name)
        except OSError as error:
            why = f" on the hub ({error})"
    nearest = by_key[difflib.get_close_matches(_key(name), by_key, n=1, cutoff=0.0)[0]].name
    raise ValueError(f"no model {name!r}{why}; did you mean {nearest!r}? (or give the path of a config.json)")


def _parse(text: str, name: str) -> ModelShape:
    config: object = parse_text(text, json.loads, "JSON", name)
    if not isinstance(config, dict):
        raise ValueError(f"{name} must hold a JSON object, got {type(config).__name__}")
    return shape_from_config(cast(dict[str, Any], config), name)


def _key(name: str) -> str:
    key = name.lower()
    for ending in _ENDINGS:
        key = key.removesuffix(ending)
    return key
