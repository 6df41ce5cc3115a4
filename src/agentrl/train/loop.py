"""The training loop: sample groups, learn from those with signal, keep a record of every step."""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from agentrl.data.advantages import compute_advantages
from agentrl.data.collate import collate
from agentrl.data.trajectory import Trajectory
from agentrl.gym.env import make_env
from agentrl.models.policy import Policy
from agentrl.rollout.episode import NamedTask, TextTokenizer, broke, ran_out, sample_step
from agentrl.train.checkpoint import Checkpoint, placed_like, read_shards
from agentrl.train.config import RLConfig, config_hash
from agentrl.train.distributed import ONE_RANK, Ranks, gathered
from agentrl.train.recording import position_counts
from agentrl.train.step import update_policy

# What an update reports; a step without one has None instead of each.
_UPDATE_KEYS = ("loss", "entropy", "ratio_mean", "ratio_max", "clip_frac", "grad_norm", "distortion")

# Steps in a row of which no episode could be played, after which the environment is taken for broken.
MAX_BROKEN_STEPS = 3

# (kept, sampled): trajectories of the groups with signal, and all of them; of a rank's share of the groups
Sample = Callable[[Policy, Sequence[Any], torch.Generator], tuple[list[Trajectory], list[Trajectory]]]


class Curriculum(Protocol):
    """Which tasks the next step may draw from, and what it learns from how they went."""

    def pool(self, step: int) -> Sequence[Any]:
        """Tasks that step `step` (from 1) samples from."""
        ...

    def group_sizes(self, chosen: Sequence[Any], group_size: int, step: int) -> Sequence[int]:
        """Episodes of each of the tasks that step `step` drew; group_size each, or as many in all."""
        ...

    def observe(self, sampled: Sequence[Trajectory], step: int) -> None:
        """See all trajectories that step `step` sampled."""
        ...

    def metrics(self) -> dict[str, float]:
        """Figures for the step's record."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON from which `load_state_dict` continues exactly."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        ...


class AllTasks:
    """The curriculum without one: every step draws from all tasks."""

    def __init__(self, tasks: Sequence[Any]) -> None:
        self.tasks = tasks

    def pool(self, step: int) -> Sequence[Any]:
        """All tasks."""
        return self.tasks

    def group_sizes(self, chosen: Sequence[Any], group_size: int, step: int) -> Sequence[int]:
        """The same for all."""
        return [group_size] * len(chosen)

    def observe(self, sampled: Sequence[Trajectory], step: int) -> None:
        """Nothing is learnt."""

    def metrics(self) -> dict[str, float]:
        """No figures."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """No state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError for the state of a curriculum that has one."""
        if state:
            raise ValueError(f"the run was made with a curriculum that keeps {', '.join(state)}")


class Trainer:
    """A policy in training: `step()` does one step; `checkpoint()` and `restore()` stop and go on exactly.

    The model is trained in place. All randomness comes from `generator`, seeded with cfg.seed, which `sample`
    and the update share in turn. `clock` gives seconds.

    With several `ranks`, each makes its own trainer from the same arguments, and `sample` plays the rank's
    share; the ranks then tell each other what they played, so that all see the same step. A model that is
    sharded cannot be copied: give its `reference`, if there is a KL term.
    """

    def __init__(
        self,
        model: Policy,
        cfg: RLConfig,
        curriculum: Curriculum,
        sample: Sample,
        *,
        pad_id: int,
        clock: Callable[[], float] = time.perf_counter,
        ranks: Ranks = ONE_RANK,
        reference: Policy | None = None,
    ) -> None:
        self.model, self.cfg, self.curriculum = model, cfg, curriculum
        self.num_steps = 0  # done so far
        self.learned_from: list[Trajectory] = []  # in the last step
        self.generator = torch.Generator().manual_seed(cfg.seed)
        self.optimizer = torch.optim.Adam(model.module.parameters(), lr=cfg.lr, betas=cfg.betas)
        self.ranks = ranks
        self._reference = copy.deepcopy(model) if cfg.kl_coef > 0 and reference is None else reference
        self._sample, self._pad_id, self._clock = sample, pad_id, clock
        self._num_broken_steps = 0  # in a row

    def step(self) -> dict[str, Any]:
        """Sample, learn, and return the step's record.

        `step` (from 1), `pass_rate` (mean reward; None where every episode broke), `episodes`,
        `errored_episodes` (those that the environment broke), `truncated_episodes` (those that ran out of
        tokens), `tokens` (of all sampled trajectories),
        `zero_adv_frac` (share of trajectories without gradient: their group has no signal, or they broke),
        `updated`, the counts of `position_counts`, the statistics of `update_policy` with its tokens as
        `action_tokens`, `seconds_sampling`, `seconds_training`, and the curriculum's figures. Without a group
        that has signal there is no update:
        `updated` is False, its statistics are None.

        An episode that broke is left out, and the run goes on. Raises ValueError, with the last error, where
        every episode of MAX_BROKEN_STEPS steps in a row did.
        """
        step = self.num_steps + 1
        start = self._clock()
        kept, sampled = self._sample_on_all_ranks(self.curriculum.pool(step))
        self.curriculum.observe(sampled, step)
        self._check_played(sampled, step)
        sampled_at = self._clock()
        update = self._learn(kept) if kept else {**dict.fromkeys(_UPDATE_KEYS), "action_tokens": 0}
        self.num_steps, self.learned_from = step, kept
        rewards = {t.episode: t.reward for t in sampled if not broke(t)}
        num_episodes = len({t.episode for t in sampled})
        return {
            "step": step,
            "pass_rate": sum(rewards.values()) / len(rewards) if rewards else None,
            "zero_adv_frac": 1 - len(kept) / len(sampled),
            "episodes": num_episodes,
            "errored_episodes": num_episodes - len(rewards),
            "truncated_episodes": len({t.episode for t in sampled if ran_out(t)}),
            "tokens": sum(t.num_tokens for t in sampled),
            "updated": bool(kept),
            **position_counts(sampled, kept),
            **update,
            **self.curriculum.metrics(),
            "seconds_sampling": sampled_at - start,
            "seconds_training": self._clock() - sampled_at,
        }

    def _check_played(self, sampled: Sequence[Trajectory], step: int) -> None:
        all_broke = all(map(broke, sampled))
        self._num_broken_steps = self._num_broken_steps + 1 if all_broke else 0
        if self._num_broken_steps >= MAX_BROKEN_STEPS:
            raise ValueError(
                f"the environment failed in every episode of the last {MAX_BROKEN_STEPS} steps, to step "
                f"{step}; repair it and continue from the last checkpoint. The last error: "
                f"{sampled[-1].info['error']}"
            )

    def _sample_on_all_ranks(self, pool: Sequence[Any]) -> tuple[list[Trajectory], list[Trajectory]]:
        with gathered(self.model):
            mine = self._sample(self.model, pool, self.generator)
        shares = self.ranks.gather(mine)
        return [t for kept, _ in shares for t in kept], [t for _, sampled in shares for t in sampled]

    def _learn(self, kept: Sequence[Trajectory]) -> dict[str, float | None]:
        batch = collate(kept, self._pad_id)
        advantages = compute_advantages(batch, self.cfg)
        stats = update_policy(
            self.model,
            self.optimizer,
            kept,
            advantages,
            self.cfg,
            self._reference,
            self.generator,
            self.ranks,
        )
        return {("action_tokens" if name == "tokens" else name): value for name, value in stats.items()}

    def checkpoint(self) -> Checkpoint:
        """All that the steps to come depend on."""
        config = getattr(self.model, "config", None)
        return Checkpoint(
            step=self.num_steps,
            config_hash=config_hash(self.cfg),
            model=self.model.module.state_dict(),
            optimizer=self.optimizer.state_dict()["state"],
            random={"generator": self.generator.get_state(), "torch": torch.get_rng_state()},
            curriculum=self.curriculum.state_dict(),
            model_config=asdict(config) if is_dataclass(config) and not isinstance(config, type) else {},
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of a run with the same settings.

        The trainer must have been made with the model that the run started from: it is the reference of a KL
        term. Raises ValueError where settings or the model's tensors differ, or moments, random states or the
        curriculum's are not such, before anything changes.
        """
        if checkpoint.config_hash != config_hash(self.cfg):
            raise ValueError(
                f"the checkpoint of step {checkpoint.step} was made with other settings of learning than "
                "those given; they cannot change within a run, so start a new one"
            )
        like = self.model.module.state_dict()
        model, optimizer = checkpoint.model, checkpoint.optimizer
        if checkpoint.shards is not None:
            model, optimizer = read_shards(checkpoint.shards, like, list(self.model.module.parameters()))
        own = {name: (t.shape, t.dtype) for name, t in like.items()}
        other = {name: (t.shape, t.dtype) for name, t in model.items()}
        if own != other:
            names = sorted(name for name in own.keys() | other.keys() if own.get(name) != other.get(name))
            raise ValueError(f"the checkpoint holds another model: {', '.join(names[:5])} differ")
        parameters = list(self.model.module.parameters())
        _check_moments(optimizer, parameters)
        _check_random(checkpoint.random)
        self.curriculum.load_state_dict(checkpoint.curriculum)
        self.model.module.load_state_dict({name: placed_like(t, like[name]) for name, t in model.items()})
        moments = {
            index: {name: placed_like(t, parameters[index]) for name, t in each.items()}
            for index, each in optimizer.items()
        }
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.generator.set_state(checkpoint.random["generator"])
        torch.set_rng_state(checkpoint.random["torch"])
        self.num_steps = checkpoint.step


def _check_moments(optimizer: Mapping[int, Mapping[str, Tensor]], parameters: Sequence[Tensor]) -> None:
    """Raises ValueError for moments that Adam would not keep of these parameters."""
    for index, moments in optimizer.items():
        if not 0 <= index < len(parameters):
            raise ValueError(f"the checkpoint has moments of parameter {index}, the model {len(parameters)}")
        shape = tuple(parameters[index].shape)
        found = {name: tuple(tensor.shape) for name, tensor in moments.items()}
        wanted = {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
        if found != wanted:
            raise ValueError(
                f"the checkpoint's moments of parameter {index} are {found}, but must be {wanted}"
            )


def _check_random(states: Mapping[str, Tensor]) -> None:
    """Raises ValueError where a random generator could not go on from its state."""
    for name in ("generator", "torch"):
        try:
            torch.Generator().set_state(states[name])
        except (KeyError, TypeError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"the checkpoint has no random state {name!r}: {reason}") from error


def bugfix_trainer(
    model: Policy,
    tasks: Sequence[NamedTask],
    tok: TextTokenizer,
    cfg: RLConfig,
    curriculum: Curriculum | None = None,
    ranks: Ranks = ONE_RANK,
    reference: Policy | None = None,
) -> Trainer:
    """A trainer in the BugFix environment; without a curriculum, every step draws from all `tasks`."""
    curriculum = curriculum or AllTasks(tasks)

    def group_sizes(chosen: Sequence[Any]) -> Sequence[int]:
        return curriculum.group_sizes(chosen, cfg.group_size, trainer.num_steps + 1)

    def sample(
        policy: Policy, pool: Sequence[Any], generator: torch.Generator
    ) -> tuple[list[Trajectory], list[Trajectory]]:
        return sample_step(
            policy,
            lambda: make_env(cfg),
            pool,
            tok,
            cfg,
            generator,
            share=ranks.share,
            group_sizes=group_sizes,
        )

    trainer = Trainer(
        model,
        cfg,
        curriculum,
        sample,
        pad_id=tok.pad_id,
        ranks=ranks,
        reference=reference,
    )
    return trainer


def train_rl(
    model: Policy,
    tasks: Sequence[NamedTask],
    tok: TextTokenizer,
    cfg: RLConfig,
    steps: int,
    *,
    curriculum: Curriculum | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Train the model in place for `steps` steps; returns one record a step (see `Trainer.step`).

    Each step samples cfg.group_size episodes of cfg.prompts_per_step tasks and updates the policy from the
    groups whose rewards differ (GRPO, arXiv 2402.03300). The same seed gives the same records, seconds aside,
    and the same weights, bit for bit. `curriculum` decides which tasks a step may draw from (default: all of
    `tasks`); `on_step` sees each record as it comes.

    Raises ValueError without tasks, for max_tokens that the model has no positions for, for weights that
    diverged (an update with a loss or gradient that is not finite is not taken), and RuntimeError where
    environments break one after the other.
    """
    trainer = bugfix_trainer(model, tasks, tok, cfg, curriculum)
    history: list[dict[str, Any]] = []
    for _ in range(steps):
        history.append(trainer.step())
        if on_step is not None:
            on_step(history[-1])
    return history
