"""Tasks are played in groups, in order; the step keeps the groups that have signal."""

import itertools
from typing import Any

import pytest
import torch

import agentrl.rollout.episode as module
from agentrl.data.trajectory import Trajectory
from agentrl.gym.env import BugFixEnv
from agentrl.gym.programs import run_trusted
from agentrl.gym.tasks import make_tasks
from agentrl.gym.tokenizer import build_tokenizer
from agentrl.models.scoring import sequence_log_probs
from agentrl.models.tiny import TinyAgent, TinyConfig
from agentrl.rollout.episode import has_signal, play, sample_groups, sample_step
from agentrl.train.config import RLConfig

TASKS = make_tasks("train")
TOK = build_tokenizer(make_tasks("all"))
CFG = RLConfig(group_size=3, prompts_per_step=4, max_tokens=48)


def answers(_source: str, name: str, arguments: object) -> list[object]:
    return run_trusted(f"def {name}(*a): return None", name, list(arguments))  # type: ignore[call-overload,return-value]


def make_env() -> BugFixEnv:
    return BugFixEnv(16, answers)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model() -> TinyAgent:
    """An untrained model with opinions of its own."""
    model = TinyAgent(TinyConfig(vocab_size=len(TOK), width=16, num_layers=1, num_heads=2, max_positions=64))
    weight = model.token_embedding.weight.data
    weight += 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    return model


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_groups_are_contiguous_and_in_the_order_of_the_tasks(model: TinyAgent) -> None:
    trajs = sample_groups(model, make_env, TASKS[:3], TOK, CFG, rng())
    assert [t.group for t in trajs] == [task.name for task in TASKS[:3] for _ in range(3)]
    assert len({t.episode for t in trajs}) == 9
    for traj in trajs:
        prompt = TOK.encode(f"fix {traj.group}\n")
        assert traj.ids[: len(prompt)].tolist() == prompt
        assert traj.num_tokens <= CFG.max_tokens
    assert len({tuple(t.ids.tolist()) for t in trajs}) == 9  # streams of their own


def test_sampled_log_probs_are_what_the_trainer_scores(model: TinyAgent) -> None:
    for traj in sample_groups(model, make_env, TASKS[:3], TOK, CFG, rng()):
        scored = sequence_log_probs(model, traj.ids[None])[0].detach()
        acted = traj.action_mask == 1
        assert float((scored - traj.sample_logp)[acted].abs().max()) < 1e-4


def test_the_generator_decides_everything(model: TinyAgent) -> None:
    one, two, other = (sample_groups(model, make_env, TASKS[:2], TOK, CFG, rng(seed)) for seed in (0, 0, 1))
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a.ids, b.ids)
        assert torch.equal(a.sample_logp, b.sample_logp)
        assert a.episode == b.episode
    assert any(not torch.equal(a.ids, b.ids) for a, b in zip(one, other, strict=True))
    state = rng()
    first = sample_groups(model, make_env, TASKS[:1], TOK, CFG, state)
    second = sample_groups(model, make_env, TASKS[:1], TOK, CFG, state)
    assert any(not torch.equal(a.ids, b.ids) for a, b in zip(first, second, strict=True))


class Scripted:
    """An environment of one turn with a chosen reward."""

    def __init__(self, reward: float, observation: str = "ok\n", num_turns: int = 1) -> None:
        self.reward, self.observation, self.turns_left = reward, observation, num_turns

    def reset(self, task: object, /) -> str:
        return "fix clamp\n"

    def step(self, action: str, /) -> tuple[str, float, bool]:
        self.turns_left -= 1
        return self.observation, self.reward, self.turns_left <= 0


class Quick(TinyAgent):
    """Ends every action at once."""

    def head(self):  # type: ignore[no-untyped-def]
        head = super().head()
        bias = torch.full((len(TOK),), -100.0)
        bias[TOK.end_id] = 100.0
        return type(head)(head.weight, bias)


@pytest.fixture(scope="module")
def quick() -> Quick:
    return Quick(TinyConfig(vocab_size=len(TOK), width=16, num_layers=1, num_heads=2))


def test_how_an_episode_ended_is_written_down(quick: Quick) -> None:
    for env, finish, num_turns, reward in (
        (Scripted(1.0, num_turns=3), "done", 3, 1.0),
        (Scripted(1.0, "view " * 60, num_turns=3), "tokens", 1, 0.0),
    ):
        (traj,), stats = play(
            quick, lambda env=env: env, TASKS[:1], TOK, max_tokens=48, temperature=1.0, generator=rng()
        )
        assert traj.info == {
            "task": TASKS[0].name,
            "num_turns": num_turns,
            "finish": finish,
            "num_computed": stats.num_positions,
        }
        assert traj.reward == reward
        assert traj.num_tokens == 3 + (1 if finish == "tokens" else num_turns + 2 * 2)
        assert stats.num_positions == traj.num_tokens - 1


def test_a_prompt_without_room_for_an_action_is_refused(quick: Quick) -> None:
    for max_tokens in (2, 3):
        with pytest.raises(ValueError, match="has 3 tokens but an episode holds"):
            play(quick, make_env, TASKS[:1], TOK, max_tokens=max_tokens, temperature=1.0, generator=rng())
    play(quick, make_env, TASKS[:1], TOK, max_tokens=4, temperature=1.0, generator=rng())


def rewarded(rewards: list[float]):  # type: ignore[no-untyped-def]
    """make_env of environments that give these rewards in turn."""
    queue = iter(rewards)
    return lambda: Scripted(next(queue))


def test_a_step_keeps_the_groups_that_mix_passes_and_failures(quick: Quick) -> None:
    rewards = [1.0] * 3 + [0.0, 1.0, 0.0] + [0.0] * 3 + [1.0, 1.0, 0.0]
    kept, sampled = sample_step(quick, rewarded(rewards), TASKS, TOK, CFG, rng())
    assert [t.reward for t in sampled] == rewards
    assert [id(t) for t in kept] == [id(t) for t in [*sampled[3:6], *sampled[9:12]]]
    names = [t.group for t in sampled[::3]]
    assert len(set(names)) == CFG.prompts_per_step
    assert set(names) <= {task.name for task in TASKS}
    kept, _ = sample_step(quick, rewarded([0.0] * 12), TASKS, TOK, CFG, rng())
    assert kept == []


def test_groups_may_differ_in_size(quick: Quick) -> None:
    """All ranks' shares together are what one rank alone plays; a group is told from the next by its size."""
    sizes, rewards = [2, 5, 1, 4], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0]

    def step(make: object, share: Any = None) -> tuple[list[Trajectory], list[Trajectory]]:
        return sample_step(quick, make, TASKS, TOK, CFG, rng(), share=share, group_sizes=lambda drawn: sizes)  # type: ignore[arg-type]

    kept, sampled = step(rewarded(rewards))
    assert [len(list(group)) for _, group in itertools.groupby(t.group for t in sampled)] == sizes
    assert [id(t) for t in kept] == [id(t) for t in [*sampled[2:7], *sampled[8:]]]
    parts = [step(rewarded([0.0] * 12), lambda count, r=r: range(2 * r, 2 * r + 2))[1] for r in (0, 1)]
    assert [len(part) for part in parts] == [7, 5]
    assert [t.episode for part in parts for t in part] == [t.episode for t in sampled]
    for wrong in ([3] * 3, [3, 3, 3, 0]):
        with pytest.raises(ValueError, match="one positive count for each of 4 tasks"):
            sample_groups(quick, make_env, TASKS[:4], TOK, CFG, rng(), group_sizes=wrong)


def test_a_step_draws_anew_and_takes_a_small_pool_whole(quick: Quick) -> None:
    state = rng()
    drawn = [
        tuple(t.group for t in sample_step(quick, rewarded([0.0] * 12), TASKS, TOK, CFG, state)[1][::3])
        for _ in range(4)
    ]
    assert len(set(drawn)) > 1
    _, sampled = sample_step(quick, rewarded([0.0] * 9), TASKS[:3], TOK, CFG, state)
    assert sorted(t.group for t in sampled[::3]) == sorted(task.name for task in TASKS[:3])


def test_an_empty_pool_is_refused(quick: Quick) -> None:
    with pytest.raises(ValueError, match="the pool of tasks is empty"):
        sample_step(quick, make_env, [], TOK, CFG, rng())


def test_signal_is_any_difference_of_rewards() -> None:
    def group(*rewards: float) -> list[Trajectory]:
        return [Trajectory(torch.tensor([1]), torch.zeros(0), torch.zeros(0), reward=r) for r in rewards]

    assert has_signal(group(0.0, 0.0, 0.5))
    assert not has_signal(group(0.5, 0.5))
    assert not has_signal(group(1.0))
    assert [len(g) for g in module.groups_of(group(*[0.0] * 6), [2, 3, 1])] == [2, 3, 1]
