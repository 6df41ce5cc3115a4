"""train_rl on a random policy in the real environment; test_run tests the engine below it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from agentrl import RLConfig, train_rl
from agentrl.gym.tasks import make_tasks
from agentrl.gym.tokenizer import build_tokenizer
from agentrl.models.tiny import TinyAgent, TinyConfig
from agentrl.train.loop import AllTasks

CFG = RLConfig(max_tokens=24, max_turns=2, group_size=4, prompts_per_step=2, lr=0.01)


@pytest.fixture
def rewards_by_parity(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random policy fixes nothing, so that a step would have no signal: reward an even sum of ids."""
    from agentrl.rollout import episode

    original = episode.EpisodePlayer.trajectory

    def trajectory(self: Any, name: str) -> Any:
        self.reward = float(sum(self.stream.ids) % 2 == 0)
        return original(self, name)

    monkeypatch.setattr(episode.EpisodePlayer, "trajectory", trajectory)


@pytest.mark.usefixtures("rewards_by_parity")
def test_same_seed_gives_the_same_history_and_weights() -> None:
    tok = build_tokenizer(make_tasks("all"))
    runs = []
    for _ in range(2):
        model = TinyAgent(TinyConfig(vocab_size=len(tok), width=8, num_layers=1, num_heads=1))
        seen: list[Any] = []
        history = train_rl(model, make_tasks("train"), tok, CFG, 3, on_step=seen.append)
        assert seen == history
        assert any(record["updated"] for record in history)
        runs.append((history, model.state_dict()))
    for one, other in zip(runs[0][0], runs[1][0], strict=True):
        assert {k: v for k, v in one.items() if "seconds" not in k} == {
            k: v for k, v in other.items() if "seconds" not in k
        }
    assert all(torch.equal(value, runs[1][1][name]) for name, value in runs[0][1].items())
    assert not torch.equal(
        runs[0][1]["token_embedding.weight"],
        TinyAgent(TinyConfig(vocab_size=len(tok), width=8, num_layers=1, num_heads=1)).token_embedding.weight,
    )


@pytest.mark.usefixtures("rewards_by_parity")
def test_packed_rows_learn_what_padded_ones_do() -> None:
    """To float32 rounding at the first step, in every figure and weight; later steps sample from it."""
    tok = build_tokenizer(make_tasks("all"))
    runs: dict[str, Any] = {}
    for packing in ("padded", "packed", "tree"):
        model = TinyAgent(TinyConfig(vocab_size=len(tok), width=8, num_layers=1, num_heads=1))
        cfg = replace(CFG, packing=packing, microbatch_tokens=64, kl_coef=0.1, num_minibatches=1)
        (record,) = train_rl(model, make_tasks("train"), tok, cfg, 1)
        assert record["updated"]
        runs[packing] = ({k: v for k, v in record.items() if "seconds" not in k}, model.state_dict())
        del runs[packing][0]["distortion"]  # of the split, not of the learning
    record, weights = runs["padded"]
    start = TinyAgent(TinyConfig(vocab_size=len(tok), width=8, num_layers=1, num_heads=1)).state_dict()
    for packing in ("packed", "tree"):
        assert runs[packing][0] == pytest.approx(record, rel=2e-6, abs=1e-7)
        for name, value in runs[packing][1].items():
            assert float((value - weights[name]).norm() / (weights[name] - start[name]).norm()) < 1e-3, name


def test_no_steps_give_no_history() -> None:
    tok = build_tokenizer(make_tasks("all"))
    model = TinyAgent(TinyConfig(vocab_size=len(tok), width=8, num_layers=1, num_heads=1))
    assert train_rl(model, make_tasks("train"), tok, CFG, 0) == []


def test_all_tasks_has_no_state() -> None:
    curriculum = AllTasks(["a", "b"])
    assert curriculum.pool(1) == ["a", "b"]
    assert curriculum.metrics() == curriculum.state_dict() == {}
    curriculum.load_state_dict({})
    with pytest.raises(ValueError, match="a curriculum that keeps seen"):
        curriculum.load_state_dict({"seen": 1})
