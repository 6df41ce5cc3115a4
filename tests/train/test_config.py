"""Configuration: validation, TOML, unknown keys."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import RLConfig, RunConfig
from agentrl.train.config import config_hash, config_to_toml, known_keys, load_config

SOME = st.builds(
    RunConfig,
    rl=st.builds(
        RLConfig,
        seed=st.integers(0, 2**63 - 1),
        lr=st.floats(1e-9, 10),
        betas=st.tuples(st.floats(0, 0.9999), st.floats(0, 0.9999)),
        norm_const=st.none() | st.floats(0.5, 1e6),
        advantage=st.sampled_from(["group_std", "group_mean"]),
        max_grad_norm=st.just(math.inf) | st.floats(0.1, 9),
    ),
    steps=st.integers(0, 10**6),
    device=st.sampled_from(["cpu", "cuda:1", 'a "b" \\ ü']),
)


@settings(max_examples=15, deadline=None)
@given(SOME)
def test_toml_round_trip(tmp_path_factory: pytest.TempPathFactory, config: RunConfig) -> None:
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_text(config_to_toml(config), encoding="utf-8")
    assert load_config(path) == config


def test_what_a_file_leaves_out_keeps_its_default(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("steps = 3\n[rl]\nlr = 1\nbetas = [0.5, 0.75]\n")
    assert load_config(path) == RunConfig(steps=3, rl=RLConfig(lr=1.0, betas=(0.5, 0.75)))
    path.write_text("")
    assert load_config(path) == RunConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step = 3", "unknown key 'step'; did you mean steps?"),
        ("lr = 0.1", "unknown key 'lr'; did you mean rl.lr?"),
        ("[rl]\ngroup-sise = 4", "unknown key 'rl.group-sise'; did you mean rl.group_size?"),
        (
            '"rl.lr" = 1e-3',
            'unknown key "rl.lr", which in quotes is one name with a dot in it; write lr = ... in the table '
            "[rl], or rl.lr = ... unquoted before any table",
        ),
        ('[rl]\n"rl.lr" = 1e-3', "write lr = ... in the table [rl], or"),
        ('"rl.steps" = 3', "unknown key 'rl.steps'; did you mean steps?"),
        ("[zzzzz]\nzzzzzzzz = 4", "unknown key 'zzzzz'; settings are rl.seed, rl.lr,"),
        ("steps = 3.5", "Expected `int`"),
        ("steps = true", "Expected `int`"),
        ("[rl]\nlr = 'fast'", "Expected `float`"),
        ("[rl]\nlr = -1.0", "lr must be positive and finite, got -1.0"),
        ("[rl]\nadvantage = 'std'", "Invalid enum value 'std'"),
        ("[rl]\nloss_mode = 'mean'", "unknown loss mode 'mean'"),
        ("rl = 3", "Expected `object`"),
        ("steps = [", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        load_config(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"seed": -1}, {"lr": 0.0}, {"lr": math.nan}, {"betas": (0.9, 1.0)}, {"betas": (0.9,)},
        {"group_size": 0}, {"prompts_per_step": 0}, {"temperature": 0.0}, {"max_tokens": 1}, {"max_turns": 0},
        {"loss_mode": "x"}, {"loss_mode": "constant"}, {"advantage": "x"}, {"clip_low": 1.5},
        {"clip_high": -0.1}, {"kl_coef": -1.0}, {"kl_coef": math.nan}, {"entropy_coef": -0.1},
        {"num_epochs": 0}, {"num_minibatches": 0}, {"max_grad_norm": 0.0}, {"packing": "rows"},
        {"microbatch_tokens": 255}, {"planning_cost": "seconds"}, {"lr": 1e38}, {"lr": 10.1}, {"lr": 1e-320},
        {"kl_coef": 1e39}, {"entropy_coef": 1.1e6}, {"clip_high": 1e308}, {"norm_const": math.nan},
        {"norm_const": 1e-320}, {"norm_const": 1e300}, {"max_grad_norm": 1e-320}, {"num_epochs": 1001},
        {"max_tokens": 2**24 + 1}, {"group_size": 125_001}, {"prompts_per_step": 10**12},
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_name(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=name.replace("_", "[_ ]")):
        RLConfig(**wrong)


def test_the_largest_and_smallest_values_are_taken() -> None:
    RLConfig(lr=10, kl_coef=1e6, entropy_coef=1e6, clip_high=1e30, norm_const=1e12, num_epochs=1000)
    RLConfig(max_tokens=2**24)
    RLConfig(lr=1e-12, norm_const=1e-6, max_grad_norm=1e-8, group_size=125_000)
    RunConfig(threads=1024, eval_samples=10_000)


def test_a_step_holds_a_million_episodes() -> None:
    message = (
        "prompts_per_step x group_size must be at most 1,000,000, as a step holds .*, got 8000000000000$"
    )
    with pytest.raises(ValueError, match=message):
        RLConfig(group_size=10**12)


@pytest.mark.parametrize(("name", "most"), [("threads", 1024), ("eval_samples", 10_000)])
def test_counts_of_a_run_have_a_largest_value(name: str, most: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at most {most:,}.*, got {most + 1}"):
        RunConfig(**{name: most + 1})


@pytest.mark.parametrize("name", ["eval_samples", "checkpoint_every", "keep_checkpoints", "threads"])
def test_counts_of_a_run_are_at_least_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        RunConfig(**{name: 0})
    assert RunConfig(steps=0).steps == 0


def test_the_embedded_agent_has_256_positions() -> None:
    with pytest.raises(ValueError, match="max_tokens must be at most 256 without --model"):
        RunConfig(rl=RLConfig(max_tokens=257))
    assert RunConfig(rl=RLConfig(max_tokens=257), model="a/b").rl.max_tokens == 257


def test_budget_holds_the_longest_trajectory_by_default() -> None:
    assert RLConfig().token_budget == 4096
    assert RLConfig(max_tokens=9000).token_budget == 9000
    assert RLConfig(microbatch_tokens=300).token_budget == 300
    with pytest.raises(ValueError, match="compute_dtype must be one of float32, bfloat16"):
        RunConfig(compute_dtype="float16")  # type: ignore[arg-type]


def test_known_keys_and_hash() -> None:
    assert {"rl.lr", "steps", "device"} <= set(known_keys())
    assert config_hash(RLConfig()) == config_hash(RLConfig())
    assert config_hash(RLConfig()) != config_hash(RLConfig(clip_high=0.3))
