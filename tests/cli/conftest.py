"""A run's directory as the trainer leaves it, made up but for the positions and the batch, which are real."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl import RLConfig, RunConfig, Trajectory
from agentrl.train.config import config_to_toml
from agentrl.train.recording import batch_picture, position_counts


def _trajectory(task: int, reward: float, generator: torch.Generator) -> Trajectory:
    def count(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=generator))

    ids, mask = [1, 2, 3, *[10 + task] * 37], [0.0] * 39
    for turn in range(turns := count(1, 5)):
        num_actions = count(3, 22)
        ids += torch.randint(100, (num_actions,), generator=generator).tolist()
        mask += [1.0] * num_actions
        if turn + 1 < turns:
            num_seen = count(6, 16)
            ids += [7] * num_seen
            mask += [0.0] * num_seen
    action_mask = torch.tensor(mask)
    info = {"task": f"task_{task}", "num_computed": len(ids) - 1}
    return Trajectory(torch.tensor(ids), action_mask, -action_mask, reward, info)


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """Write a run of so many steps, of which `done` are over; it learns as a logistic curve of episodes."""

    def write(name: str = "run", steps: int = 24, done: int = 24, num_tasks: int = 8) -> Path:
        path = tmp_path / name
        path.mkdir()
        (path / "config.toml").write_text(config_to_toml(RunConfig(rl=RLConfig(), steps=steps)))
        generator, episodes, lines = torch.Generator().manual_seed(steps), 0, []

        def evaluation(episodes: int) -> dict[str, Any]:
            rate = 0.25 + 0.6 / (1 + math.exp(2 - episodes / 300))
            return {"pass_rate": rate, "per_task": {f"repair_list_{i}": rate for i in range(10)}}

        for step in range(1, done + 1):
            sampled, kept = [], []
            chance = evaluation(episodes)["pass_rate"]
            for task in range(num_tasks if step % 2 else num_tasks - 1):
                rewards = (torch.rand(8, generator=generator) < chance + 0.06 * (task - 3)).float().tolist()
                group = [_trajectory(task, reward, generator) for reward in rewards]
                sampled += group
                kept += group if len(set(rewards)) > 1 else []
            episodes += len(sampled)
            record: dict[str, Any] = {
                "step": step,
                "pass_rate": sum(t.reward for t in sampled) / len(sampled),
                "zero_adv_frac": 1 - len(kept) / len(sampled),
                "episodes": len(sampled),
                "tokens": sum(t.num_tokens for t in sampled),
                "updated": bool(kept),
                **position_counts(sampled, kept),
                "entropy": 1.2 * math.exp(-step / 40),
                "action_tokens": float(sum(t.num_actions for t in kept)),
                "seconds_sampling": 1.5,
                "seconds_training": 0.9,
            }
            if step % 8 == 0 and step < steps:
                record |= {
                    "heldout_pass_rate": evaluation(episodes)["pass_rate"],
                    "seconds_evaluating": 2.0,
                }
            lines.append(json.dumps(record) + "\n")
            if step == 1:
                (path / "batch.json").write_text(json.dumps(batch_picture(kept, step, 256, 600)))
        (path / "metrics.jsonl").write_text("".join(lines))
        summary = {"before": evaluation(0), "seconds_before": 2.0}
        if done == steps:
            summary |= {"after": evaluation(episodes), "seconds_after": 2.0}
        (path / "summary.json").write_text(json.dumps(summary))
        return path

    return write
