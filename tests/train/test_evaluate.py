"""Evaluation and behaviour, on a random policy in the real environment."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from agentrl import RLConfig, Trajectory, behavior_stats, evaluate
from agentrl.gym.tasks import make_tasks
from agentrl.gym.tokenizer import build_tokenizer
from agentrl.models.tiny import TinyAgent, TinyConfig

CFG = RLConfig(max_tokens=20, max_turns=2)


def trajectory(mask: list[int], reward: float, **more: Any) -> Trajectory:
    action_mask = torch.tensor(mask, dtype=torch.float32)
    return Trajectory(
        torch.zeros(len(mask) + 1, dtype=torch.int64), action_mask, 0 * action_mask, reward, **more
    )


def test_more_episodes_than_memory_holds_are_refused_at_once() -> None:
    tasks = make_tasks("heldout")
    model = TinyAgent(TinyConfig(vocab_size=len(build_tokenizer(tasks)), width=8, num_layers=1, num_heads=1))
    with pytest.raises(ValueError, match="100001 samples of each of 10 tasks are 1000010 episodes"):
        evaluate(model, tasks, build_tokenizer(tasks), 100_001, cfg=CFG)


def test_behavior_of_known_trajectories() -> None:
    trajs = [
        trajectory([1, 1, 0, 1, 0, 0, 0], 1.0),
        trajectory([0, 1, 1], 0.0),
        trajectory([0], 0.0, episode="twice"),
        trajectory([0], 0.0, episode="twice"),
    ]
    assert behavior_stats(trajs) == {
        "pass_rate": 1 / 3,
        "mean_tokens": 4.0,
        "median_tokens": 3.0,
        "p90_tokens": pytest.approx(4 + 0.7 * 4),
        "max_tokens": 8.0,
        "mean_actions": 3 / 4,
        "mean_action_tokens": 5 / 4,
        "padding_waste": 0.5,
    }
    with pytest.raises(ValueError, match="at least one trajectory"):
        behavior_stats([])


def test_evaluate_is_reproducible_and_names_every_task() -> None:
    tok = build_tokenizer(make_tasks("all"))
    model = TinyAgent(TinyConfig(vocab_size=len(tok), width=8, num_layers=1, num_heads=1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tasks = make_tasks("heldout")[:3]
    first, second = (evaluate(model, tasks, tok, 4, torch.Generator().manual_seed(5), CFG) for _ in range(2))
    assert first == second
    assert list(first["per_task"]) == [task.name for task in tasks]
    assert first["pass_rate"] == sum(first["per_task"].values()) / 3
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    seeded = evaluate(model, tasks, tok, 4, cfg=replace(CFG, seed=5))
    assert seeded == first
    with pytest.raises(ValueError, match="got 0 tasks"):
        evaluate(model, [], tok, 4)
    with pytest.raises(ValueError, match="num_samples=0"):
        evaluate(model, tasks, tok, 0)
