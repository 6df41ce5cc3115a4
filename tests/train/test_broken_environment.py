"""An environment that raises breaks its episode; the run goes on, and learns nothing from what broke."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.train.conftest import Letters, NoBs, Word

from agentrl import RLConfig, Trajectory, evaluate
from agentrl.models.tiny import TinyAgent, TinyConfig
from agentrl.rollout.episode import broke, has_signal, sample_groups, sample_step
from agentrl.train import evaluate as evaluation
from agentrl.train.curriculum import make_curriculum
from agentrl.train.loop import MAX_BROKEN_STEPS, Trainer

CFG = RLConfig(group_size=4, prompts_per_step=3, max_tokens=12, lr=0.01, num_minibatches=1)


TASKS = [Word(name) for name in ("a", "b", "ab")]


class Flaky(NoBs):
    """An environment in which some tasks break at the start, others at times."""

    def __init__(self, at_reset: tuple[str, ...] = (), at_step: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.at_reset, self.at_step = at_reset, at_step

    def reset(self, task: Word) -> str:
        self.name = task.name
        if task.name in self.at_reset:
            raise ConnectionError("no machine left")
        return super().reset(task)

    def step(self, action: str) -> tuple[str, float, bool]:
        if self.name in self.at_step and "c" in action:
            raise KeyError("c")
        return super().step(action)


def new_model() -> TinyAgent:
    return TinyAgent(TinyConfig(vocab_size=10, width=8, num_layers=1, num_heads=2, max_positions=16))


def sample(env: Flaky, cfg: RLConfig = CFG, seed: int = 0) -> list[Trajectory]:
    def make_env() -> Flaky:
        return Flaky(env.at_reset, env.at_step)

    generator = torch.Generator().manual_seed(seed)
    return sample_groups(new_model(), make_env, TASKS, Letters(), cfg, generator)


def new_trainer(env: Flaky) -> Trainer:
    def sample(policy: Any, pool: Sequence[Any], generator: torch.Generator) -> Any:
        return sample_step(policy, lambda: Flaky(env.at_reset, env.at_step), pool, Letters(), CFG, generator)

    return Trainer(new_model(), CFG, make_curriculum("top", TASKS, CFG), sample, pad_id=0)


def test_an_episode_that_breaks_is_marked_and_leaves_the_others_as_they_were() -> None:
    cfg = replace(CFG, group_size=70)  # more than there are slots: broken ones give theirs on at once
    whole, trajs = sample(Flaky(), cfg), sample(Flaky(at_reset=("b",), at_step=("ab",)), cfg)
    assert len(trajs) == 210
    for i, (traj, other) in enumerate(zip(trajs, whole, strict=True)):
        task = TASKS[i // 70].name
        assert traj.info["task"] == task
        if task == "b":
            assert broke(traj)
            assert traj.info["finish"] == "error"
            assert traj.info["error"].startswith("ConnectionError: no machine left (")
            assert "test_broken_environment.py:" in traj.info["error"]
            assert (traj.ids.tolist(), traj.num_actions, traj.reward) == ([0], 0, 0.0)
        elif broke(traj):
            assert task == "ab"
            assert traj.info["error"].startswith("KeyError: 'c'")
            assert torch.equal(traj.ids, other.ids)
            assert traj.num_actions > 0
        else:
            assert "error" not in traj.info
            assert torch.equal(traj.ids, other.ids)
            assert traj.reward == other.reward
    assert 0 < sum(map(broke, trajs[140:])) < 70


def test_every_episode_may_break_at_its_start() -> None:
    assert all(map(broke, sample(Flaky(at_reset=("a", "b", "ab")))))


def test_what_broke_gives_no_gradient_and_no_evidence() -> None:
    """A group is compared without the episodes that broke, whose reward of 0 would look like a failure."""
    env = Flaky(at_reset=("a",), at_step=("ab", "b"))
    planted = False
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        kept, sampled = sample_step(
            new_model(), lambda: Flaky(env.at_reset, env.at_step), TASKS, Letters(), CFG, generator
        )
        assert len(sampled) == 12
        assert not any(map(broke, kept))
        for task in {t.info["task"] for t in sampled}:
            group = [t for t in sampled if t.info["task"] == task]
            played = [t for t in group if not broke(t)]
            assert [t for t in kept if t.info["task"] == task] == (played if has_signal(played) else [])
            planted |= has_signal(group) and not has_signal(played)
    assert planted

    trainer = new_trainer(env)
    record = trainer.step()
    assert record["episodes"] == record["n_episodes"] == 12
    assert record["errored_episodes"] == record["num_errored_episodes"] >= 4
    assert record["num_groups"] <= 2


def test_a_broken_task_does_not_end_the_run() -> None:
    trainer = new_trainer(Flaky(at_reset=("a",)))
    records = [trainer.step() for _ in range(MAX_BROKEN_STEPS + 3)]
    assert [record["errored_episodes"] for record in records] == [4] * len(records)
    assert any(record["updated"] for record in records)
    assert all(record["zero_adv_frac"] >= 1 / 3 for record in records)


def test_a_broken_environment_ends_the_run_with_its_error() -> None:
    env = Flaky(at_reset=("a", "b", "ab"))
    trainer = new_trainer(env)
    for _ in range(MAX_BROKEN_STEPS - 1):
        record = trainer.step()
        assert record["pass_rate"] is None
        assert record["zero_adv_frac"] == 1
        assert not record["updated"]
    env.at_reset = ()
    trainer.step()
    env.at_reset = ("a", "b", "ab")
    for _ in range(MAX_BROKEN_STEPS - 1):
        trainer.step()
    with pytest.raises(ValueError, match=r"last 3 steps, to step 6; repair it .* no machine left"):
        trainer.step()


def test_evaluation_leaves_broken_episodes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def flaky(cfg: Any) -> Flaky:
        return Flaky(at_step=("ab",))

    monkeypatch.setattr(evaluation, "make_env", flaky)
    figures = evaluate(new_model(), TASKS, Letters(), 40, cfg=CFG)
    trajs = sample(Flaky(at_step=("ab",)), replace(CFG, group_size=40))
    played = [t.reward for t in trajs[80:] if not broke(t)]
    assert figures["errored_episodes"] == 40 - len(played) > 0
    assert figures["per_task"]["ab"] == pytest.approx(sum(played) / len(played), rel=1e-12)

    def hopeless(cfg: Any) -> Flaky:
        return Flaky(at_reset=("b",))

    monkeypatch.setattr(evaluation, "make_env", hopeless)
    with pytest.raises(ValueError, match="no episode of task 'b' could be played: ConnectionError"):
        evaluate(new_model(), TASKS, Letters(), 4, cfg=CFG)
