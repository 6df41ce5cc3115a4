"""Plays tasks in an environment: text for the environment, tokens for the policy."""

import itertools
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from agentrl.data.advantages import rewards_differ
from agentrl.data.trajectory import Trajectory
from agentrl.models.policy import Policy, threads_for
from agentrl.rollout.decode import DecodeStats, Stream, decode, uniforms


class Environment(Protocol):
    """Text in, text out; see gym/env for one."""

    def reset(self, task: Any, /) -> str:
        """Start an episode; returns the prompt."""
        ...

    def step(self, action: str, /) -> tuple[str, float, bool]:
        """Carry out an action; returns (observation, reward, done)."""
        ...


class NamedTask(Protocol):
    """All that sampling needs to know of a task."""

    @property
    def name(self) -> str: ...


class TextTokenizer(Protocol):
    """Text to ids and back, with an id that ends an action."""

    pad_id: int
    end_id: int

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def __len__(self) -> int: ...


@runtime_checkable
class TurnTokenizer(Protocol):
    """A tokenizer that puts tokens of its own, such as a chat template's, around what an environment says."""

    def encode_prompt(self, text: str) -> list[int]: ...
    def encode_observation(self, text: str) -> list[int]: ...


class SamplingConfig(Protocol):
    """The part of a configuration that sampling reads."""

    @property
    def group_size(self) -> int: ...
    @property
    def prompts_per_step(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def max_tokens(self) -> int: ...


class EpisodePlayer:
    """One episode of one task: the player that `decode` drives.

    Whatever the environment raises breaks this episode and no other: it ends there, `finish` is 'error', and
    its trajectory's info['error'] says what and where. Its reward, 0, means nothing (see `broke`).
    """

    def __init__(
        self, env: Environment, task: NamedTask, tok: TextTokenizer, max_tokens: int, stream: Stream
    ) -> None:
        self.stream = stream
        self.reward = 0.0
        self.finish = "tokens"  # why it ended: it ran out of tokens unless something else happens first
        self.num_turns = 0
        self.error: str | None = None
        self._env, self._task, self._tok, self._max_tokens = env, task, tok, max_tokens
        has_turns = isinstance(tok, TurnTokenizer)
        self._encode_prompt = tok.encode_prompt if has_turns else tok.encode
        self._encode_observation = tok.encode_observation if has_turns else tok.encode

    def open(self) -> None:
        """Force the prompt. Raises ValueError where it leaves no room for an action."""
        try:
            text = self._env.reset(self._task)
        except Exception as error:  # an environment may raise anything: a lost connection, a bug of its own
            self._end_broken(error)
            return
        prompt = self._encode_prompt(text)
        if not 0 < len(prompt) < self._max_tokens:
            raise ValueError(
                f"the prompt of task {self._task.name!r} has {len(prompt)} tokens but an episode holds "
                f"{self._max_tokens}; it must have at least one and leave room for an action: raise "
                "max_tokens, or shorten the prompt and the instructions before it"
            )
        self.stream.force(prompt)

    def act(self, action: Sequence[int]) -> bool:
        """Carry out an action; False when the episode is over or the observation does not fit any more."""
        self.num_turns += 1
        try:
            observation, reward, done = self._env.step(self._tok.decode(action))
        except Exception as error:  # as in open
            self._end_broken(error)
            return False
        if done:
            self.reward = float(reward)
            self.finish = "done"
            return False
        tokens = self._encode_observation(observation)
        if len(self.stream.ids) + len(tokens) >= self._max_tokens:
            return False
        self.stream.force(tokens)
        return True

    def _end_broken(self, error: Exception) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        self.error = f"{type(error).__name__}: {error} ({frames[-1].filename}:{frames[-1].lineno})"
        self.finish = "error"

    def trajectory(self, episode: str) -> Trajectory:
        """What was played, as a trajectory of the group that its task's name gives.

        An episode that broke before its prompt is a lone padding token.
        """
        info: dict[str, Any] = {
            "task": self._task.name,
            "num_turns": self.num_turns,
            "finish": self.finish,
            "num_computed": self.stream.num_computed,
        }
        if self.error is not None:
            info["error"] = self.error
        return Trajectory(
            ids=torch.tensor(self.stream.ids or [self._tok.pad_id]),
            action_mask=torch.tensor(self.stream.is_action[1:], dtype=torch.float32),
            sample_logp=torch.tensor(self.stream.sample_logp[1:], dtype=torch.float32),
            reward=self.reward,
            info=info,
            episode=episode,
        )


def play(
    model: Policy,
    make_env: Callable[[], Environment],
    tasks: Sequence[NamedTask],
    tok: TextTokenizer,
    *,
    max_tokens: int,
    temperature: float,
    generator: torch.Generator,
    num_slots: int = 64,
    share: range | None = None,
) -> tuple[list[Trajectory], DecodeStats]:
    """One episode of each of `tasks` (repeat a task for more), in order, and what the decoding cost.

    With `share` only the episodes of tasks[share]; each is the same whichever others are played.
    """
    seed = int(torch.randint(2**62, (1,), generator=generator))
    played = range(len(tasks)) if share is None else share
    players = [
        EpisodePlayer(make_env(), tasks[i], tok, max_tokens, Stream(uniforms(seed, i, max_tokens)))
        for i in played
    ]
    with threads_for(model):
        stats = decode(
            model,
            players,
            end_id=tok.end_id,
            max_tokens=max_tokens,
            temperature=temperature,
            num_slots=num_slots,
        )
    return [player.trajectory(f"{seed:x}/{i}") for i, player in zip(played, players, strict=True)], stats


def sample_groups(
    model: Policy,
    make_env: Callable[[], Environment],
    tasks: Sequence[NamedTask],
    tok: TextTokenizer,
    cfg: SamplingConfig,
    generator: torch.Generator,
    *,
    share: range | None = None,
    group_sizes: Sequence[int] | None = None,
) -> list[Trajectory]:
    """cfg.group_size trajectories of every task, groups contiguous, in the order of the tasks.

    `group_sizes` gives every task a number of its own instead. With `share` only those of tasks[share]; each
    is the same whichever others are sampled. Raises ValueError where sizes do not fit the tasks.
    """
    sizes = [cfg.group_size] * len(tasks) if group_sizes is None else list(group_sizes)
    if len(sizes) != len(tasks) or min(sizes, default=1) < 1:
        raise ValueError(
            f"group_sizes must be one positive count for each of {len(tasks)} tasks, got {sizes}"
        )
    repeated = [task for task, size in zip(tasks, sizes, strict=True) for _ in range(size)]
    trajs, _ = play(
        model,
        make_env,
        repeated,
        tok,
        max_tokens=cfg.max_tokens,
        temperature=cfg.temperature,
        generator=generator,
        share=None if share is None else range(sum(sizes[: share.start]), sum(sizes[: share.stop])),
    )
    return trajs


def sample_step(
    model: Policy,
    make_env: Callable[[], Environment],
    pool: Sequence[NamedTask],
    tok: TextTokenizer,
    cfg: SamplingConfig,
    generator: torch.Generator,
    *,
    share: Callable[[int], range] | None = None,
    group_sizes: Callable[[Sequence[Any]], Sequence[int]] | None = None,
) -> tuple[list[Trajectory], list[Trajectory]]:
    """(kept, sampled): groups of cfg.prompts_per_step tasks drawn from the pool without replacement.

    With `share`, only the groups that it picks of the count it is given, as one of several ranks does: those
    of all ranks together are what one rank alone samples. A smaller pool is taken whole. `group_sizes` says
    how many episodes each of the drawn tasks has (default: cfg.group_size). `kept` leaves out
    groups without signal, those whose rewards are all equal, and episodes that broke, which say nothing about
    the policy: the rest of their group is compared without them.
    Raises ValueError where the pool is empty.
    """
    if not pool:
        raise ValueError("the pool of tasks is empty; give at least one task")
    chosen = torch.randperm(len(pool), generator=generator)[: cfg.prompts_per_step].tolist()
    mine = None if share is None else share(len(chosen))
    drawn = [pool[i] for i in chosen]
    sizes = [cfg.group_size] * len(drawn) if group_sizes is None else group_sizes(drawn)
    sampled = sample_groups(model, make_env, drawn, tok, cfg, generator, share=mine, group_sizes=sizes)
    own = sizes if mine is None else sizes[mine.start : mine.stop]
    groups = ([traj for traj in group if not broke(traj)] for group in groups_of(sampled, own))
    return [traj for group in groups if has_signal(group) for traj in group], sampled


def groups_of(trajs: Sequence[Trajectory], sizes: Sequence[int]) -> list[Sequence[Trajectory]]:
    """Contiguous groups of these sizes."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return [trajs[start:end] for start, end in itertools.pairwise(ends)]


def broke(traj: Trajectory) -> bool:
    """Whether the environment failed in this episode, so that its reward is no evidence."""
    return bool(traj.info.get("error"))


def ran_out(traj: Trajectory) -> bool:
    """Whether the episode ended because it held no more tokens, not because the agent or its turns did."""
    return traj.info.get("finish") == "tokens"


def has_signal(group: Sequence[Trajectory]) -> bool:
    """Whether a group's rewards differ, so that its advantages are not all zero."""
    return rewards_differ(traj.reward for traj in group)
