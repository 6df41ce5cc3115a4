"""Every action, every malformed one, and every way in which an episode ends."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agentrl.gym.env import BugFixEnv, make_env, shown
from agentrl.gym.programs import run_trusted
from agentrl.gym.sandbox import Outcome
from agentrl.gym.tasks import Task, make_tasks
from agentrl.train.config import RLConfig

TASKS = {task.name: task for task in make_tasks()}
CLAMP = TASKS["floor_at"]
USAGE = "error: use view, run, edit LINE TEXT or submit\n"


def env_on(task: Task = CLAMP, max_turns: int = 16) -> BugFixEnv:
    env = BugFixEnv(max_turns, run_trusted)
    assert env.reset(task) == f"fix {task.name}\n"
    return env


def test_view_numbers_the_lines() -> None:
    assert env_on().step("view") == (
        "1 def floor_at(x, lo):\n2     if x > lo:\n3         return lo\n4     return x\n", 0.0, False,
    )  # fmt: skip


def test_run_reports_the_first_failing_case_with_arguments_got_and_wanted() -> None:
    env = env_on()
    first = CLAMP.visible[0]
    assert env.step("run").observation == f"pass 1/4: (3, 5) got 3 wanted {first.wanted}\n"
    env.step("edit 2 if x < lo:")
    assert env.step("run").observation == "pass 4/4\n"


@pytest.mark.parametrize(("text", "error"), [
    ("return 1 // 0", "ZeroDivisionError"), ("return y", "NameError"), ("return (", "SyntaxError"),
    ("return x[0]", "TypeError"),
])  # fmt: skip
def test_run_names_the_exception(text: str, error: str) -> None:
    env = env_on()
    env.step(f"edit 4 {text}")
    env.step("edit 2 if x < 0:")
    assert f" raised {error} wanted " in env.step("run").observation


def test_run_executes_the_visible_cases_once_and_submit_the_hidden_ones_once() -> None:
    calls: list[list[tuple[Any, ...]]] = []

    def execute(source: str, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Outcome]:
        calls.append(list(arguments))
        return run_trusted(source, name, arguments)

    env = BugFixEnv(16, execute)
    env.reset(CLAMP)
    env.step("run")
    env.step("submit")
    assert calls == [[c.arguments for c in CLAMP.visible], [c.arguments for c in CLAMP.hidden]]


def test_edit_keeps_the_indentation_and_nothing_else() -> None:
    env = env_on()
    assert env.step("edit 3             return   7  ").observation == "ok\n"
    assert env.source == "def floor_at(x, lo):\n    if x > lo:\n        return   7\n    return x"


@pytest.mark.parametrize(("action", "observation"), [
    ("", USAGE), ("  ", USAGE), ("look", USAGE), ("View", USAGE), ("view 2", USAGE), ("run all", USAGE),
    ("submit now", USAGE), ("view\nrun", USAGE), ("edit", "error: no such line, it has 4\n"),
    ("edit 0 x", "error: no such line, it has 4\n"), ("edit 5 x", "error: no such line, it has 4\n"),
    ("edit -1 x", "error: no such line, it has 4\n"), ("edit two x", "error: no such line, it has 4\n"),
    ("edit \u00b2 x", "error: no such line, it has 4\n"),
    ("edit 2", "error: edit needs one line of ASCII text\n"),
    ("edit 2    ", "error: edit needs one line of ASCII text\n"),
    *((f"edit 2 a{odd}b", "error: edit needs one line of ASCII text\n")
      for odd in "\n\r\t\f\v\0\x1b\x7f\x85\u2028\u00e9\u2192\U0001f600"),
    ("edit " + "9" * 5000 + " x", "error: no such line, it has 4\n"),
])  # fmt: skip
def test_a_malformed_action_is_told_what_is_wrong(action: str, observation: str) -> None:
    env = env_on()
    assert env.step(action) == (observation, 0.0, False)
    assert env.source == CLAMP.source


def test_four_malformed_actions_in_a_row_end_the_episode() -> None:
    env = env_on()
    for action in ("x", "x", "x", "view", "x", "edit 9 x", "x"):  # a good one in between starts anew
        assert not env.step(action).done
    assert env.step("x") == ("", 0.0, True)


def test_the_turns_run_out() -> None:
    env = env_on(max_turns=3)
    env.step("edit 2 if x < lo:")
    assert not env.step("view").done
    assert env.step("run") == ("", 0.0, True)
    env.reset(CLAMP)
    env.step("edit 2 if x < lo:")
    env.step("view")
    assert env.step("submit") == ("", 1.0, True)  # the last turn may still submit


@pytest.mark.parametrize("end", [["submit"], ["x"] * 4])
def test_after_the_end_a_step_is_refused(end: list[str]) -> None:
    env = env_on()
    for action in end:
        env.step(action)
    with pytest.raises(RuntimeError, match=r"call reset\(task\) first"):
        env.step("view")
    env.reset(CLAMP)
    assert env.source == CLAMP.source
    assert not env.step("view").done


def test_before_the_first_reset_a_step_is_refused() -> None:
    with pytest.raises(RuntimeError):
        BugFixEnv().step("view")


def test_no_turns_is_refused() -> None:
    with pytest.raises(ValueError, match="max_turns must be at least 1, got 0"):
        BugFixEnv(0)


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_only_the_repair_is_rewarded(task: Task) -> None:
    env = env_on(task)
    assert env.step("submit") == ("", 0.0, True)
    env.reset(task)
    pairs = zip(task.source.split("\n"), task.fixed.split("\n"), strict=True)
    (line,) = [i for i, (old, new) in enumerate(pairs, start=1) if old != new]
    env.step(f"edit {line} {task.fixed.split(chr(10))[line - 1]}")
    assert env.source == task.fixed
    assert env.step("submit") == ("", 1.0, True)


def outcomes_for(task: Task, wrong: int) -> Callable[..., list[Outcome]]:
    """An executor whose answers are right but for hidden case `wrong`."""

    def execute(_source: str, _name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Outcome]:
        values = [case.wanted for case in task.hidden]
        assert len(arguments) == len(values)
        return [Outcome(True, "wrong" if i == wrong else value, "") for i, value in enumerate(values)]

    return execute


@pytest.mark.parametrize("wrong", [-1, 0, 1, 2, 3])
def test_one_wrong_hidden_case_costs_the_reward(wrong: int) -> None:
    env = BugFixEnv(16, outcomes_for(CLAMP, wrong))
    env.reset(CLAMP)
    assert env.step("submit").reward == float(wrong == -1)


def test_passing_the_visible_cases_only_is_not_enough() -> None:
    task = TASKS["minus"]
    env = env_on(task)
    table = {case.arguments: case.wanted for case in task.visible}
    env.step(f"edit 2 return {table}.get((a, b))")
    assert env.step("run").observation == "pass 4/4\n"
    assert env.step("submit").reward == 0.0


def test_values_are_shown_as_short_ascii() -> None:
    assert shown("\u00e9\n") == "'\\xe9\\n'"
    assert len(shown(list(range(100)))) == 40
    assert shown(list(range(100))).endswith("...")


def test_the_sandbox_is_what_runs_by_default() -> None:
    env = make_env(RLConfig())
    env.reset(CLAMP)
    env.step("edit 2 import os; os._exit(0)")
    assert env.step("run").observation.startswith("pass 0/4: (3, 5) raised ")
    assert env.step("submit") == ("", 0.0, True)
