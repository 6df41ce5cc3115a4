"""The verification passes what is exact, in every dtype, and fails on planted bugs, each on its own lines."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.data.trajectory import Trajectory
from agentrl.diagnose import comparison
from agentrl.diagnose.checks import Statistic
from agentrl.diagnose.ratios import RatioProfile
from agentrl.diagnose.verify import VerifyOptions, verify
from agentrl.models.tiny import TinyAgent, TinyConfig

LOG_PROBS = ["packed against alone", "tree against alone"]
GRADIENTS = [f"gradient: {name}" for name in LOG_PROBS]
HEAD = ["fast head against full logits", "gradient: fast head against full logits"]
MICROBATCHES = "gradient: microbatches against one batch"
ISOLATION = ["isolation in flat rows", "isolation in trees"]


def tiny(dtype: torch.dtype = torch.float32, kind: type[TinyAgent] = TinyAgent) -> TinyAgent:
    """A small policy whose log-probs depend on the context."""
    model = kind(TinyConfig(vocab_size=23, width=16, num_layers=2, num_heads=2))
    with torch.no_grad():
        model.token_embedding.weight.mul_(20)
        model.position_embedding.weight.mul_(20)
    return model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_exact_passes_within_the_rounding_of_its_dtype(dtype: torch.dtype) -> None:
    found = verify(tiny(dtype))
    assert found.failed == []
    assert [check.name for check in found.checks] == [
        *LOG_PROBS,
        HEAD[0],
        *GRADIENTS,
        HEAD[1],
        MICROBATCHES,
        *ISOLATION,
        "step-0 ratio",
    ]
    largest = found["packed against alone"].statistics[0]
    assert largest.allowed is not None
    low, high = {torch.float64: (1e-10, 1e-8), torch.float32: (1e-7, 1e-3), torch.bfloat16: (1e-3, 3.0)}[
        dtype
    ]
    assert low <= largest.allowed <= high
    for name in ISOLATION:
        assert found[name].statistics[0].allowed == 0.0
    assert found.tree_share > 0.1
    assert found.num_actions == sum(24 - 5 * (i % 2) for i in range(4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_simulated_leak_fails_where_a_leak_shows_and_grows_along_the_row(dtype: torch.dtype) -> None:
    found = verify(tiny(dtype), options=VerifyOptions(simulate="leak"))
    assert found.failed == [*LOG_PROBS, *GRADIENTS, MICROBATCHES, *ISOLATION, "step-0 ratio"]
    assert found.profile.off_by_quarter[0] == 0.0
    assert found.profile.grows
    assert "leak" in found["step-0 ratio"].meaning
    assert "5.8%" in found["step-0 ratio"].meaning


def test_simulated_positions_fail_for_learned_positions() -> None:
    found = verify(tiny(), options=VerifyOptions(simulate="positions"))
    assert set(LOG_PROBS + GRADIENTS) <= set(found.failed)
    assert not set(ISOLATION) & set(found.failed)  # nothing is read that should not be


def test_a_simulated_local_mean_fails_only_where_the_split_shows() -> None:
    found = verify(tiny(), options=VerifyOptions(simulate="local-mean"))
    assert found.failed == [MICROBATCHES]
    assert found[MICROBATCHES].statistics[0].measured > 0.05


class Leaky(TinyAgent):
    """Plants a leak: every position also gets a little of the one before it in the row."""

    def hidden_states(self, ids: Tensor, position_ids: Tensor, visible_until: Tensor) -> Tensor:
        hidden = super().hidden_states(ids, position_ids, visible_until)
        before = hidden.roll(1, dims=1)
        before[:, 0] = 0
        return hidden + 1e-3 * before


def test_a_leak_in_the_model_is_seen_with_its_reason() -> None:
    found = verify(tiny(kind=Leaky), options=VerifyOptions(gradients=False))
    assert set(ISOLATION) <= set(found.failed)
    assert "read each other" in found[ISOLATION[0]].meaning
    # No action follows a sequence's first token here, so log-probs of flat rows alone would not show it.
    assert "packed against alone" not in found.failed


def test_a_wrong_head_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right: Callable[..., Any] = comparison.action_log_probs
    monkeypatch.setattr(comparison, "action_log_probs", lambda *a, **k: right(*a, **k) * 1.001)
    found = verify(tiny())
    assert found.failed == HEAD


def test_nothing_of_the_model_changes() -> None:
    model = tiny(torch.bfloat16).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradient = torch.ones_like(model.final_norm.weight)
    model.final_norm.weight.grad = gradient
    verify(model)
    assert model.training
    assert model.final_norm.weight.grad is gradient
    assert model.token_embedding.weight.grad is None
    for name, value in model.state_dict().items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, before[name])


def trajectory(n: int, first: int = 1, logp: float = float("nan")) -> Trajectory:
    mask = torch.ones(n - 1)
    return Trajectory((torch.arange(n) * 7 + first) % 23, mask, torch.full((n - 1,), logp), 1.0)


def test_trajectories_that_share_nothing_get_a_branch_so_that_a_tree_is_tested() -> None:
    found = verify(tiny(), [trajectory(40), trajectory(30, first=2)], VerifyOptions(gradients=False))
    assert found.passed
    assert found.num_trajectories == 3
    assert found.tree_share == pytest.approx(15 / (40 + 30 + 22))
    assert "No sampler log-probs" in found["step-0 ratio"].meaning


def test_a_gap_of_precision_is_flat() -> None:
    trajs = [trajectory(60, first=i, logp=-1.0) for i in range(3)]
    exact = comparison.score_alone(tiny(), comparison.Objective.of(trajs, 1.0, 0), gradients=False).logp
    for noise, failed in ((0.001, []), (0.25, ["step-0 ratio"])):
        signs = torch.randn(len(exact), generator=torch.Generator().manual_seed(1)).sign()
        recorded = (exact + noise * signs).float().split([t.num_actions for t in trajs])
        own = [Trajectory(t.ids, t.action_mask, logp, 0.0) for t, logp in zip(trajs, recorded, strict=True)]
        found = verify(tiny(), own, VerifyOptions(gradients=False))
        assert found.failed == failed
        assert found.profile.mean_gap == pytest.approx(noise, rel=0.01)
        assert not found.profile.grows
    assert "Flat along the row" in found["step-0 ratio"].meaning


def test_ratio_profile_of_a_growing_gap() -> None:
    place = torch.linspace(0, 0.99, 100)
    found = RatioProfile.of(0.5 * place, torch.zeros(100), place)
    assert found.grows
    assert found.off_by_quarter[0] == 0.0
    assert found.off_by_quarter[3] == 1.0
    assert found.max_gap == pytest.approx(0.495)


def test_nan_fails() -> None:
    assert not Statistic("max", math.nan, 1.0, "nats").passed
    model = tiny()
    with torch.no_grad():
        model.final_norm.weight[0] = math.nan
    found = verify(model, [trajectory(20), trajectory(20)], VerifyOptions(gradients=False))
    assert set(LOG_PROBS) <= set(found.failed)
    assert ISOLATION[1] not in [check.name for check in found.checks]  # equal trajectories: nothing to probe


def test_what_cannot_be_verified_says_why() -> None:
    with pytest.raises(ValueError, match="holds id 25, but the model's vocabulary ends at 22"):
        verify(tiny(), [Trajectory(torch.tensor([1, 25]), torch.ones(1), torch.zeros(1), 0.0)])
    with pytest.raises(ValueError, match="none of the 1 trajectories has an action token"):
        verify(tiny(), [Trajectory(torch.tensor([1, 2]), torch.zeros(1), torch.zeros(1), 0.0)])
    with pytest.raises(ValueError, match="no row of 40 tokens holds two sequences"):
        verify(tiny(), [trajectory(40), trajectory(30, first=2)], VerifyOptions(max_tokens=40))
    with pytest.raises(ValueError, match="simulate must be one of"):
        VerifyOptions(simulate="lea")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_hugging_face_model(dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 4 * parameter.shape[-1] ** -0.5)
    assert verify(model).failed == []
    leaky = verify(model, options=VerifyOptions(simulate="leak"))
    assert {*ISOLATION, "packed against alone"} <= set(leaky.failed)
    # Rotary embeddings see distances only: running positions change rounding in flat rows, and trees.
    running = verify(model, options=VerifyOptions(simulate="positions", gradients=False))
    assert "tree against alone" in running.failed
