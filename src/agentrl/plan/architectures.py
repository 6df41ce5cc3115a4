"""Architectures (`model_type` of a `config.json`) that the planner knows, and what a config may leave out."""

# Their layers are of the kinds in `ModelShape`: the counts equal those of the transformers modules. In others
# the feed-forward part has two matrices, layers share keys, and the like.
KNOWN = frozenset([
    "cohere", "cohere2", "cwm", "deepseek_v2", "deepseek_v3", "ernie4_5", "exaone", "exaone4", "exaone_moe",
    "flex_olmo", "gemma", "gemma2", "gemma3", "gemma3_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite",
    "gpt_oss", "granite", "granitemoe", "granitemoeshared", "helium", "hy_v3", "internlm3", "kimi_k2",
    "llama", "minicpm3", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "olmo", "olmo2",
    "olmo3", "olmo_hybrid", "olmoe", "phi3", "phimoe", "qwen2", "qwen2_5_vl", "qwen2_5_vl_text",
    "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text", "qwen3_vl_text", "sarvam_mla",
    "sarvam_moe", "seed_oss", "smollm3", "solar_open", "stablelm", "vaultgemma", "youtu",
])  # fmt: skip
WINDOWED_THROUGHOUT = ("mistral", "mixtral", "phi3", "phimoe")
# a sliding_window is for use_sliding_window, which is false where it is left out
WINDOW_ON_DEMAND = (
    "qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3", "qwen3_moe",
)  # fmt: skip
# What a config has where it leaves the key out, as transformers has it.
TIED = frozenset([
    "cohere", "cohere2", "ernie4_5", "gemma", "gemma2", "gemma3", "gemma3_text", "minicpm3",
    "qwen3_vl_moe_text", "smollm3", "vaultgemma", "youtu",
])  # fmt: skip
GATED = frozenset(["qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"])
# Counts likewise; the other architectures take the number of heads, and the width over it.
LEFT_OUT: dict[str, dict[str, int]] = {
    "num_key_value_heads": {
        "cwm": 8, "ernie4_5": 2, "exaone": 8, "gemma2": 4, "gemma3_text": 4, "glm": 2, "glm4": 2,
        "glm4_moe": 8, "gpt_oss": 8, "hy_v3": 8, "internlm3": 2, "minimax_m2": 8, "ministral": 8,
        "ministral3": 8, "mistral": 8, "mixtral": 8, "phimoe": 8, "qwen2_vl_text": 8, "qwen2_5_vl_text": 8,
        "qwen3_5_moe_text": 2, "qwen3_5_text": 4, "qwen3_moe": 4, "qwen3_next": 2, "sarvam_moe": 4,
        "seed_oss": 8, "smollm3": 4, "solar_open": 8, "vaultgemma": 4,
    },
    "head_dim": {
        "cwm": 128, "ernie4_5": 128, "gemma": 256, "gemma2": 256, "gemma3_text": 256, "glm": 128,
        "glm4": 128, "gpt_oss": 64, "helium": 128, "hy_v3": 128, "internlm3": 128, "minimax_m2": 128,
        "ministral3": 128, "qwen3": 128, "qwen3_next": 256, "qwen3_5_text": 256, "qwen3_5_moe_text": 256,
        "qwen3_vl_text": 128, "sarvam_moe": 64, "seed_oss": 128, "solar_open": 128, "vaultgemma": 256,
    },
}  # fmt: skip
