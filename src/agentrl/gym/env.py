"""The BugFix environment: text in, text out. An agent views, runs, edits and submits a buggy function."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from agentrl.gym.sandbox import Outcome, Sandbox, same_value
from agentrl.gym.tasks import Case, Task, replaced

Executor = Callable[[str, str, Sequence[tuple[Any, ...]]], list[Outcome]]

_MAX_MALFORMED = 3  # in a row; the next one ends the episode
_MAX_SHOWN = 40  # characters of a value or an error that an observation shows

VIEW, RUN, EDIT, SUBMIT = "view", "run", "edit", "submit"
USAGE = "use view, run, edit LINE TEXT or submit"


@functools.cache
def _shared_sandbox() -> Sandbox:
    return Sandbox()


class StepResult(NamedTuple):
    """What one action led to: (observation, reward, done)."""

    observation: str  # ends with a newline; empty once the episode is over
    reward: float  # 1.0 if and only if the episode was submitted and every hidden test passes
    done: bool


class EnvConfig(Protocol):
    """The part of a configuration that the environment reads."""

    @property
    def max_turns(self) -> int:
        """Actions after which an episode that did not submit ends with reward 0."""
        ...


class BugFixEnv:
    """One episode at a time: `reset(task)` gives the prompt, `step(action)` an observation.

    Actions: `view` shows the numbered source; `run` runs the visible tests; `edit LINE TEXT` replaces a line,
    keeping its indentation; `submit` ends the episode. `execute` runs code (default: the sandbox that all
    environments of this process share, with its cache; it starts at the first run).
    """

    def __init__(self, max_turns: int = 16, execute: Executor | None = None) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {max_turns}")
        self.max_turns = max_turns
        self._execute = execute
        self._task: Task | None = None
        self._lines: list[str] = []
        self._num_turns = 0
        self._num_malformed = 0

    @property
    def source(self) -> str:
        """The function as edited so far."""
        return "\n".join(self._lines)

    def reset(self, task: Task) -> str:
        """Start an episode; returns the prompt."""
        self._task = task
        self._lines = task.source.split("\n")
        self._num_turns = self._num_malformed = 0
        return f"fix {task.name}\n"

    def step(self, action: str) -> StepResult:
        """Carry out one action. Raises RuntimeError where no episode is running."""
        if self._task is None:
            raise RuntimeError("no episode is running: call reset(task) first")
        self._num_turns += 1
        verb, _, rest = action.strip().partition(" ")
        if verb == SUBMIT and not rest:
            reward = float(all(passes for _, passes in self._results(self._task.hidden)))
            self._task = None
            return StepResult("", reward, True)
        if verb == VIEW and not rest:
            observation = "".join(f"{i} {line}\n" for i, line in enumerate(self._lines, start=1))
        elif verb == RUN and not rest:
            observation = self._run(self._task)
        elif verb == EDIT:
            observation = self._edit(rest)
        else:
            observation = f"error: {USAGE}\n"
        self._num_malformed = self._num_malformed + 1 if observation.startswith("error") else 0
        if self._num_turns >= self.max_turns or self._num_malformed > _MAX_MALFORMED:
            self._task = None
            return StepResult("", 0.0, True)
        return StepResult(observation, 0.0, False)

    def _edit(self, rest: str) -> str:
        number, _, text = rest.partition(" ")
        if number not in map(str, range(1, len(self._lines) + 1)):
            return f"error: no such line, it has {len(self._lines)}\n"
        text = text.strip()
        if not text or not (text.isascii() and text.isprintable()):
            return "error: edit needs one line of ASCII text\n"
        self._lines = replaced(self.source, int(number), text).split("\n")
        return "ok\n"

    def _results(self, cases: Sequence[Case]) -> list[tuple[Outcome, bool]]:
        """Outcome of each case, and whether it is what was wanted; the comparison happens here, outside."""
        assert self._task is not None
        execute = self._execute or _shared_sandbox().call
        outcomes = execute(self.source, self._task.name, [case.arguments for case in cases])
        return [(o, o.ok and same_value(o.value, c.wanted)) for o, c in zip(outcomes, cases, strict=True)]

    def _run(self, task: Task) -> str:
        results = self._results(task.visible)
        passes = [passed for _, passed in results]
        report = f"pass {sum(passes)}/{len(passes)}"
        if all(passes):
            return f"{report}\n"
        first = passes.index(False)
        case, outcome = task.visible[first], results[first][0]
        arguments = ", ".join(map(shown, case.arguments))
        got = f"got {shown(outcome.value)}" if outcome.ok else f"raised {outcome.error.partition(':')[0]}"
        return f"{report}: ({arguments}) {got} wanted {shown(case.wanted)}\n"


def shown(value: Any) -> str:
    """A value as observations show it: ASCII, and cut to 40 characters with `...`."""
    text = ascii(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def make_env(cfg: EnvConfig) -> BugFixEnv:
    """A fresh BugFix environment with `cfg.max_turns` actions an episode.

    Raises ValueError where that is below 1.
    """
    return BugFixEnv(cfg.max_turns)
