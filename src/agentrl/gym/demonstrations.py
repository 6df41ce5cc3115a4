"""Demonstrations: generated programs, played in the real environment by a player of mixed skill.

The player may be hasty (submits unseen or unchecked), may give up, or sweeps: it tries a repair, runs the
tests, puts the line back when it moves on, and submits when they pass. Its repairs are sometimes the right one
and otherwise some bug-like rewrite, so that an imitator knows how to play but is far from perfect.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from agentrl.gym.env import EDIT, RUN, SUBMIT, VIEW, BugFixEnv
from agentrl.gym.programs import Program, all_rewrites, make_buggy, run_trusted
from agentrl.gym.tasks import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """How skilful the demonstrations are: probabilities, all of them of the player, not of the task."""

    submit_unseen: float = 0.05
    look_and_submit: float = 0.06
    hasty: float = 0.30  # edits once and submits without running
    know: float = 0.4  # each attempt is the right repair with this probability
    give_up: float = 0.12  # after each failed attempt
    stay: float = 0.6  # the next attempt is on the same line, where one is left
    max_turns: int = 16


@dataclass(slots=True)
class Demonstration:
    """One episode: text that the environment said, and actions of the player, in turn."""

    prompt: str
    actions: list[str] = field(default_factory=list)
    observations: list[str] = field(default_factory=list)  # the last action has none
    reward: float = 0.0


def demonstrations(seed: int, count: int, forbidden: frozenset[str], cfg: DemoConfig) -> Iterator[Demonstration]:
    """`count` demonstrations, the same for the same seed."""
    rng = random.Random(seed)
    env = BugFixEnv(cfg.max_turns, run_trusted)
    for _ in range(count):
        task, program, line, repair = make_buggy(rng, forbidden)
        yield _play(rng, env, cfg, task, program, line, repair)


def _play(
    rng: random.Random, env: BugFixEnv, cfg: DemoConfig, task: Task, program: Program, line: int, repair: str
) -> Demonstration:
    demo = Demonstration(env.reset(task))

    def act(action: str) -> str:
        result = env.step(action)
        demo.actions.append(action)
        demo.reward = result.reward
        if not result.done:
            demo.observations.append(result.observation)
        return result.observation

    style = rng.random()
    if style >= cfg.submit_unseen:
        act(VIEW)
        style -= cfg.submit_unseen
        if style >= cfg.look_and_submit:
            hasty = style - cfg.look_and_submit < cfg.hasty
            _sweep(rng, act, cfg, task, program, (line, repair), hasty)
        elif rng.random() < 0.5:
            act(RUN)
    if len(demo.observations) == len(demo.actions):
        act(SUBMIT)
    return demo


def _sweep(rng, act, cfg, task, program, answer, hasty) -> None:
    options = [(number, text) for _, number, text in all_rewrites(task.source, program.variables())]
    lines = task.source.split("\n")
    left = [option for option in options if option != answer]
    edited = 0  # the line that a failed attempt left changed; 0 for none
    num_turns = 1
    known = False
    while True:
        if not known and (rng.random() < cfg.know or not left):
            known = True
            number, text = answer
        elif left:
            number, text = left[0]
            if rng.random() > cfg.stay: number, text = rng.choice(left)
            left.remove((number, text))
        else:
            return
        if edited not in (0, number):
            act(f"{EDIT} {edited} {lines[edited - 1].strip()}")
            num_turns += 1
        act(f"{EDIT} {number} {text}")
        num_turns += 1
        edited = number
        if hasty:
            return
        observation = act(RUN)
        num_turns += 1
        if ":" not in observation or rng.random() < cfg.give_up or num_turns + 5 > cfg.max_turns:
            return
