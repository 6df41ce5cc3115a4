"""Demonstrations: generated programs, played in the real environment by a player of mixed skill.

The player sweeps: line by line it tries the bug-like rewrites of a line, runs the tests after each, puts the
line back when it moves on, and submits when they pass. It does not know where the bug is, so what an imitator
learns is a method, which holds for functions that it has never seen. But the player is often hasty (submits
unchecked) and often gives up: that is what reinforcement learning can mend.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from agentrl.gym.env import EDIT, RUN, SUBMIT, VIEW, BugFixEnv
from agentrl.gym.programs import Program, make_buggy, run_trusted
from agentrl.gym.rewrites import all_rewrites
from agentrl.gym.tasks import Task, indentation


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """How skilful the demonstrations are, as probabilities."""

    look_and_submit: float = 0.2  # views, perhaps runs, and submits
    hasty: float = 0.15  # edits once and submits without running
    give_up: float = 0.15  # after each failed attempt, submits as it is
    start_anywhere: float = 0.2  # the sweep starts at a random rewrite instead of the first
    max_turns: int = 16


_DRILL = DemoConfig()
_DRILL_TURNS = 100


@dataclass(slots=True)
class Demonstration:
    """One episode: what the environment said and what the player did, in turn."""

    prompt: str
    actions: list[str] = field(default_factory=list[str])
    observations: list[str] = field(default_factory=list[str])  # the last action has none
    reward: float = 0.0


def demonstrations(
    seed: int, count: int, forbidden: frozenset[str], cfg: DemoConfig
) -> Iterator[Demonstration]:
    """`count` demonstrations, the same for the same arguments; see `programs.make_buggy` for `forbidden`."""
    rng = random.Random(seed)
    env = BugFixEnv(cfg.max_turns, run_trusted)
    for _ in range(count):
        task, program = make_buggy(rng, forbidden)
        yield _Player(rng, env, cfg, task).play(program)


def drills(seed: int, count: int, forbidden: frozenset[str]) -> Iterator[Demonstration]:
    """`count` exercises in copying: a view, then every rewrite of every line in turn, nothing run.

    Nearly all their tokens are actions, so copying a line is learnt from few of them.
    """
    rng = random.Random(seed)
    env = BugFixEnv(_DRILL_TURNS, run_trusted)
    for _ in range(count):
        task, program = make_buggy(rng, forbidden)
        player = _Player(rng, env, _DRILL, task)
        yield player.drill(program)


class _Player:
    """Plays one episode and writes it down."""

    def __init__(self, rng: random.Random, env: BugFixEnv, cfg: DemoConfig, task: Task) -> None:
        self.rng, self.env, self.cfg, self.task = rng, env, cfg, task
        self.demo = Demonstration(env.reset(task))

    def play(self, program: Program) -> Demonstration:
        cfg, style = self.cfg, self.rng.random()
        self._act(VIEW)
        if style < cfg.look_and_submit:
            if self.rng.random() < 0.5:
                self._act(RUN)
        else:
            self._sweep(program, style < cfg.look_and_submit + cfg.hasty)
        self._act(SUBMIT)
        return self.demo

    def drill(self, program: Program) -> Demonstration:
        self._act(VIEW)
        lines = self.task.source.split("\n")
        attempts = all_rewrites(self.task.source, program.variables())
        by_line: dict[int, list[str]] = {}
        for _, line, text in attempts:
            by_line.setdefault(line, []).append(text)
        for line in self.rng.sample(sorted(by_line), len(by_line)):
            for text in by_line[line]:
                self._act(f"{EDIT} {line} {indentation(lines[line - 1])}{text}")
            self._act(f"{EDIT} {line} {lines[line - 1]}")
        return self.demo

    def _act(self, action: str) -> str:
        result = self.env.step(action)
        self.demo.actions.append(action)
        if result.done:
            self.demo.reward = result.reward
        else:
            self.demo.observations.append(result.observation)
        return result.observation

    def _sweep(self, program: Program, hasty: bool) -> None:
        attempts = all_rewrites(self.task.source, program.variables())
        if self.rng.random() < self.cfg.start_anywhere:
            start = self.rng.randrange(len(attempts))
            attempts = attempts[start:] + attempts[:start]
        lines = self.task.source.split("\n")
        changed = 0  # the line that the last attempt left changed; 0 for none
        for _, line, text in attempts:
            if changed not in (0, line):
                self._act(f"{EDIT} {changed} {lines[changed - 1]}")
            self._act(f"{EDIT} {line} {indentation(lines[line - 1])}{text}")
            changed = line
            if hasty:
                return
            passed = ":" not in self._act(RUN)
            turns_left = self.cfg.max_turns - len(self.demo.actions)
            if passed or turns_left < 4 or self.rng.random() < self.cfg.give_up:
                return
