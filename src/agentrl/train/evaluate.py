"""How well and in which manner a policy plays."""

from collections.abc import Sequence
from typing import Any

import torch

from agentrl.data.trajectory import Trajectory
from agentrl.gym.env import make_env
from agentrl.models.policy import Policy
from agentrl.rollout.episode import NamedTask, TextTokenizer, broke, sample_groups
from agentrl.train.config import MOST_EPISODES, RLConfig


def behavior_stats(trajs: Sequence[Trajectory]) -> dict[str, float]:
    """How a set of trajectories behaves.

        pass_rate           mean reward; an episode of several trajectories counts once
        mean_tokens         tokens a trajectory: prompt, actions and observations
        median_tokens, p90_tokens, max_tokens
        mean_actions        actions a trajectory: maximal runs of sampled tokens
        mean_action_tokens  sampled tokens a trajectory
        padding_waste       share of a batch padded to the longest trajectory that is padding

    Raises ValueError for an empty list.

    >>> t = Trajectory(torch.arange(4), torch.tensor([0.0, 1.0, 1.0]), torch.zeros(3), reward=1.0)
    >>> stats = behavior_stats([t])
    >>> stats["pass_rate"], stats["mean_actions"], stats["mean_action_tokens"]
    (1.0, 1.0, 2.0)
    """
    if not trajs:
        raise ValueError("behavior_stats needs at least one trajectory, got none")
    rewards = {t.episode: t.reward for t in trajs}
    lengths = torch.tensor([t.num_tokens for t in trajs], dtype=torch.float64)
    quantiles = lengths.quantile(torch.tensor([0.5, 0.9], dtype=torch.float64)).tolist()
    return {
        "pass_rate": sum(rewards.values()) / len(rewards),
        "mean_tokens": lengths.mean().item(),
        "median_tokens": quantiles[0],
        "p90_tokens": quantiles[1],
        "max_tokens": lengths.max().item(),
        "mean_actions": sum(t.num_runs for t in trajs) / len(trajs),
        "mean_action_tokens": sum(t.num_actions for t in trajs) / len(trajs),
        "padding_waste": 1 - lengths.mean().item() / lengths.max().item(),
    }


def evaluate(
    model: Policy,
    tasks: Sequence[NamedTask],
    tok: TextTokenizer,
    num_samples: int,
    generator: torch.Generator | None = None,
    cfg: RLConfig | None = None,
) -> dict[str, Any]:
    """Play every task num_samples times, at cfg.temperature, without learning.

    Returns `pass_rate` (mean over tasks), `per_task` (pass rate by the task's name), and the other figures of
    behavior_stats. `generator` defaults to one seeded with cfg.seed, cfg to RLConfig(). Episodes that the
    environment broke are left out of every figure and counted in `errored_episodes`.
    Raises ValueError where there is no task, num_samples is below 1, they make more episodes than memory
    holds, or every episode of a task broke.
    """
    if not tasks or num_samples < 1:
        raise ValueError(
            f"evaluate needs tasks and samples, got {len(tasks)} tasks, num_samples={num_samples}"
        )
    num_episodes = len(tasks) * num_samples
    if num_episodes > MOST_EPISODES:
        raise ValueError(
            f"{num_samples} samples of each of {len(tasks)} tasks are {num_episodes} episodes, but evaluate "
            f"holds all at once, at most {MOST_EPISODES:,}; take fewer samples"
        )
    cfg = RLConfig() if cfg is None else cfg
    if generator is None:
        generator = torch.Generator().manual_seed(cfg.seed)
    sizes = [num_samples] * len(tasks)
    trajs = sample_groups(model, lambda: make_env(cfg), tasks, tok, cfg, generator, group_sizes=sizes)
    played = [t for t in trajs if not broke(t)]
    values = [float("nan") if broke(t) else t.reward for t in trajs]
    rates = torch.tensor(values, dtype=torch.float64).view(len(tasks), num_samples).nanmean(1)
    for i in rates.isnan().nonzero().flatten().tolist():
        raise ValueError(
            f"no episode of task {tasks[i].name!r} could be played: {trajs[i * num_samples].info['error']}"
        )
    return {
        **behavior_stats(played),
        "pass_rate": rates.mean().item(),
        "per_task": dict(zip([task.name for task in tasks], rates.tolist(), strict=True)),
        "errored_episodes": len(trajs) - len(played),
    }
