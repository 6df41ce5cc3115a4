"""The sampler in the trainer: the textbook's rule, every rule's resume, and what the records say."""

from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from tests.train.conftest import without_seconds

import agentrl as arl
from agentrl import RLConfig, TaskSampler, train_curriculum, train_rl
from agentrl.curriculum.sampler import RuleName
from agentrl.data.weights import token_weights
from agentrl.gym.tasks import make_tasks
from agentrl.gym.tokenizer import build_tokenizer
from agentrl.models.tiny import TinyAgent, TinyConfig
from agentrl.rollout import episode
from agentrl.train import loop
from agentrl.train.checkpoint import load_checkpoint, save_checkpoint
from agentrl.train.config import config_to_toml, load_config
from agentrl.train.curriculum import SampledTasks, make_curriculum
from agentrl.train.loop import AllTasks, Trainer, bugfix_trainer

CFG = RLConfig(max_tokens=16, max_turns=2, group_size=4, prompts_per_step=3, lr=0.01)
TASKS = make_tasks("train")[:9]
TOK = build_tokenizer(make_tasks("all"))
TRAJECTORY = episode.EpisodePlayer.trajectory


def solve_in_eighths(monkeypatch: pytest.MonkeyPatch, *eighths: int) -> None:
    """A random policy fixes nothing: let tasks pass by their ids' sum instead, in turn at these rates."""
    rates = {task.name: eighths[i % len(eighths)] for i, task in enumerate(TASKS)}

    def trajectory(self: Any, name: str) -> Any:
        self.reward = float(sum(self.stream.ids) % 8 < rates[self._task.name])
        return TRAJECTORY(self, name)

    monkeypatch.setattr(episode.EpisodePlayer, "trajectory", trajectory)


@pytest.fixture(autouse=True)
def _a_third_solved_a_third_hopeless(monkeypatch: pytest.MonkeyPatch) -> None:
    solve_in_eighths(monkeypatch, 0, 8, 4)


def new_model() -> TinyAgent:
    return TinyAgent(TinyConfig(vocab_size=len(TOK), width=8, num_layers=1, num_heads=1))


def assert_same_weights(one: Any, other: Any) -> None:
    weights, others = one.state_dict(), other.state_dict()
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_an_open_band_is_train_rl_bit_for_bit() -> None:
    plain, wide = new_model(), new_model()
    history = without_seconds(train_rl(plain, TASKS, TOK, CFG, 5))
    wider = without_seconds(train_curriculum(wide, TASKS, TOK, CFG, 5, low=-1, high=2))
    assert [{name: record[name] for name in history[0]} for record in wider] == history
    assert_same_weights(plain, wide)
    assert any(record["updated"] for record in history)
    assert [record["pool"] for record in wider] == [9] * 5
    assert [record["n_episodes"] for record in wider] == [12] * 5


def test_uniform_is_no_curriculum_bit_for_bit() -> None:
    plain, uniform = new_model(), new_model()
    history = without_seconds(train_rl(plain, TASKS, TOK, CFG, 3))
    curriculum = make_curriculum("uniform", TASKS, CFG)
    others = without_seconds(train_rl(uniform, TASKS, TOK, CFG, 3, curriculum=curriculum))
    assert [{name: record[name] for name in history[0]} for record in others] == history
    assert_same_weights(plain, uniform)


def test_a_band_runs_otherwise() -> None:
    """The two comparisons above would notice a curriculum that does nothing."""
    plain, banded = new_model(), new_model()
    history = without_seconds(train_rl(plain, TASKS, TOK, CFG, 5))
    others = without_seconds(train_curriculum(banded, TASKS, TOK, CFG, 5))
    assert [{name: record[name] for name in history[0]} for record in others] != history


def test_a_small_pool_spends_fewer_episodes() -> None:
    """8 first looks, then the ninth; from then on the three tasks that vary, and one revisit."""
    cfg = replace(CFG, prompts_per_step=8, group_size=8, lr=1e-9)
    history = train_curriculum(new_model(), TASKS, TOK, cfg, 6)
    assert history[0]["pool"] == 9
    for record in history:
        assert record["n_episodes"] == record["episodes"] == 8 * min(8, record["pool"])
    assert all(record["pool"] <= 4 for record in history[2:])
    assert sum(record["n_episodes"] for record in history) <= 64 + 5 * 8 + 4 * 4 * 8


def test_estimates_are_the_mean_of_the_last_group() -> None:
    """The pool of each step against the textbook's loop, from what the steps before sampled."""
    rates = dict.fromkeys((task.name for task in TASKS), 0.5)
    curriculum = SampledTasks(TASKS, TaskSampler.textbook([t.name for t in TASKS]), 3, "band")
    pools: list[tuple[list[str], list[str]]] = []
    observe, pool = curriculum.observe, curriculum.pool

    def noted_pool(step: int) -> Any:
        chosen = pool(step)
        inside = arl.filter_by_pass_rate(list(rates), rates)
        pools.append((inside, [task.name for task in chosen]))
        return chosen

    def noted_observe(sampled: Any, step: int) -> None:
        for group in episode.groups_of(sampled, [CFG.group_size] * (len(sampled) // CFG.group_size)):
            rates[group[0].info["task"]] = sum(t.reward for t in group) / len(group)
        observe(sampled, step)

    curriculum.pool, curriculum.observe = noted_pool, noted_observe  # type: ignore[method-assign]
    train_rl(new_model(), TASKS, TOK, CFG, 8, curriculum=curriculum)
    for inside, names in pools:
        assert names[: len(inside)] == inside
        assert len(names) == len(inside) + (len(inside) < len(TASKS))
    assert len(pools[-1][0]) < 6


def new_trainer(rule: RuleName) -> Trainer:
    return bugfix_trainer(new_model(), TASKS, TOK, CFG, make_curriculum(rule, TASKS, CFG))


@pytest.mark.parametrize("rule", get_args(RuleName))
def test_a_resumed_run_goes_on_bit_for_bit(rule: RuleName, tmp_path: Path) -> None:
    whole = new_trainer(rule)
    records = without_seconds([whole.step() for _ in range(6)])
    first, second = new_trainer(rule), new_trainer(rule)
    halves = [first.step() for _ in range(3)]
    second.restore(load_checkpoint(save_checkpoint(tmp_path, first.checkpoint(), keep=1)))
    halves += [second.step() for _ in range(3)]
    assert without_seconds(halves) == records
    assert_same_weights(whole.model, second.model)
    assert second.curriculum.state_dict() == whole.curriculum.state_dict()


@pytest.mark.parametrize("rule", ["top", "band"])
def test_a_forgotten_curriculum_would_be_noticed(rule: RuleName) -> None:
    whole, first, second = new_trainer(rule), new_trainer(rule), new_trainer(rule)
    records = without_seconds([whole.step() for _ in range(6)])
    for _ in range(3):
        first.step()
    fresh = make_curriculum(rule, TASKS, CFG).state_dict()
    second.restore(replace(first.checkpoint(), curriculum=fresh))
    assert without_seconds([second.step() for _ in range(3)]) != records[3:]


def test_another_curriculum_cannot_continue_a_run() -> None:
    checkpoint = new_trainer("top").checkpoint()
    with pytest.raises(ValueError, match="made with curriculum top, not band, and cannot change it"):
        new_trainer("band").restore(checkpoint)
    with pytest.raises(ValueError, match="a curriculum that keeps name"):
        bugfix_trainer(new_model(), TASKS, TOK, CFG, AllTasks(TASKS)).restore(checkpoint)
    with pytest.raises(ValueError, match="made with no curriculum, not top"):
        new_trainer("top").restore(bugfix_trainer(new_model(), TASKS, TOK, CFG).checkpoint())


def test_the_default_wastes_less_than_the_uniform_curriculum() -> None:
    """15 steps of 3 tasks out of 3 that vary and 6 that do not. Uniform wastes two thirds; the default, in
    steps 6 to 15 of 1,500 simulated runs, 1.3% on average and 23% at most."""
    cfg = replace(CFG, lr=1e-9, group_size=8)
    curriculum = make_curriculum("top", TASKS, cfg)
    history = train_rl(new_model(), TASKS, TOK, cfg, 15, curriculum=curriculum)
    late = [record["zero_adv_frac"] for record in history[5:]]
    assert sum(late) / len(late) < 0.25


def sized_trainer() -> Trainer:
    curriculum = make_curriculum("top", TASKS, CFG, varied_sizes=True)
    return bugfix_trainer(new_model(), TASKS, TOK, CFG, curriculum)


def test_group_sizes_move_a_steps_episodes_to_where_the_signal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes against the sampler's own, advantages against each group alone; the total stays."""
    solve_in_eighths(monkeypatch, 0, 8, 1, 0, 8, 4, 0, 8, 4)
    trainer, sizes = sized_trainer(), list[list[int]]()
    batches: list[tuple[Any, Any]] = []
    original = loop.update_policy

    def noted(policy: Any, optimizer: Any, trajs: Any, advantages: Any, *rest: Any) -> Any:
        batches.append((trajs, advantages))
        return original(policy, optimizer, trajs, advantages, *rest)

    monkeypatch.setattr(loop, "update_policy", noted)
    sample = trainer._sample

    def noted_sample(*args: Any) -> Any:
        before = trainer.curriculum.state_dict()
        kept, sampled = sample(*args)
        runs = [(name, len(list(group))) for name, group in groupby(t.group for t in sampled)]
        sizes.append([size for _, size in runs])
        sampler = TaskSampler([task.name for task in TASKS])
        sampler.load_state_dict(before["sampler"])
        assert sampler.group_sizes([name for name, _ in runs], 4, trainer.num_steps + 1) == sizes[-1]
        return kept, sampled

    trainer._sample = noted_sample
    records = [trainer.step() for _ in range(8)]
    assert (
        [record["episodes"] for record in records] == [record["n_episodes"] for record in records] == [12] * 8
    )
    assert sizes[0] == [4, 4, 4]
    assert len({size for step in sizes for size in step}) >= 3
    assert min(size for step in sizes for size in step) >= 2
    assert batches
    for trajs, advantages in batches:
        for _, group in groupby(range(len(trajs)), key=lambda i: trajs[i].group):
            rows = list(group)
            rewards = torch.tensor([trajs[i].reward for i in rows])
            wanted = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            torch.testing.assert_close(advantages[rows], wanted, rtol=1e-6, atol=1e-6)


def test_with_prompt_mean_every_task_weighs_alike_whatever_its_group_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solve_in_eighths(monkeypatch, 0, 8, 1, 0, 8, 4, 0, 8, 4)
    trainer = sized_trainer()
    for _ in range(8):
        trainer.step()
        trajs = trainer.learned_from
        if len({sum(t.group == name for t in trajs) for name in {t.group for t in trajs}}) > 1:
            break
    else:
        pytest.fail("no step had two groups of different sizes with signal")
    totals: dict[str, float] = {}
    for traj, weights in zip(trajs, token_weights(trajs, "prompt_mean"), strict=True):
        totals[traj.group] = totals.get(traj.group, 0.0) + float(weights.double().sum())
    assert list(totals.values()) == pytest.approx([1 / len(totals)] * len(totals), rel=1e-6)


def test_a_run_with_group_sizes_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole, first, second = sized_trainer(), sized_trainer(), sized_trainer()
    records = without_seconds([whole.step() for _ in range(6)])
    halves = [first.step() for _ in range(3)]
    second.restore(load_checkpoint(save_checkpoint(tmp_path, first.checkpoint(), keep=1)))
    halves += [second.step() for _ in range(3)]
    assert without_seconds(halves) == records
    assert_same_weights(whole.model, second.model)
    with pytest.raises(ValueError, match="made with curriculum top, group sizes, not top, and cannot"):
        new_trainer("top").restore(first.checkpoint())


def test_a_run_cannot_change_the_settings_of_its_curriculum() -> None:
    given = {"low": 0.11, "high": None, "fill": False}
    narrow = bugfix_trainer(new_model(), TASKS, TOK, CFG, make_curriculum("top", TASKS, CFG, given))
    with pytest.raises(ValueError, match=r"made with curriculum top, low=0\.11, fill=False, not top"):
        new_trainer("top").restore(narrow.checkpoint())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"curriculum_low": 0.5, "curriculum_high": 0.5}, r"low < high, got \(0\.5, 0\.5\)"),
        ({"curriculum": "pools", "curriculum_high": 0.2}, r"low < high, got \(0\.2, 0\.2\)"),
        ({"curriculum_revisit": -0.1}, "revisit is a share below 1 or a whole number of tasks, got -0.1"),
        ({"curriculum_revisit": 2.5}, "revisit is a share below 1 or a whole number"),
        ({"curriculum": "uniform", "curriculum_revisit": 0.1}, "uniform draws from all tasks; leave revisit"),
        ({"curriculum_group_sizes": True, "rl": RLConfig(group_size=1)}, "group_size must be at least 2"),
    ],
)
def test_settings_of_a_curriculum_are_checked_before_the_run(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arl.RunConfig(**given)


def test_settings_of_a_curriculum_are_kept_in_the_file_of_the_run(tmp_path: Path) -> None:
    config = arl.RunConfig(curriculum="band", curriculum_low=0.1, curriculum_revisit=2, curriculum_fill=True)
    path = tmp_path / "config.toml"
    path.write_text(config_to_toml(config), encoding="utf-8")
    assert load_config(path) == config
    assert config.curriculum_settings == {"low": 0.1, "high": None, "revisit": 2, "fill": True}
    path.write_text("curriculum_low = 0.9\ncurriculum = 'pools'\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.toml: the band needs low < high"):
        load_config(path)


def test_keys_must_be_the_tasks_names() -> None:
    with pytest.raises(ValueError, match="must be the names of the tasks"):
        SampledTasks(TASKS, TaskSampler(["abs"]), 3, "top")


def test_a_checkpoint_without_the_samplers_state_is_refused() -> None:
    trainer = new_trainer("top")
    damaged = replace(trainer.checkpoint(), curriculum={"name": "top"})
    with pytest.raises(ValueError, match="make it with the same estimator"):
        trainer.restore(damaged)
