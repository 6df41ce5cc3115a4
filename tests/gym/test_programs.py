"""Generated programs are none of the tasks, and each has one bug that a test shows."""

import random

from agentrl.gym.programs import (
    FAMILIES,
    NAMES,
    canonical,
    make_buggy,
    run_trusted,
    task_shapes,
)
from agentrl.gym.sandbox import Sandbox, same_value
from agentrl.gym.tasks import Task, make_tasks

TASKS = make_tasks("all")


def generated(seed: int, count: int = 150) -> list[Task]:
    rng = random.Random(seed)
    return [make_buggy(rng, task_shapes())[0] for _ in range(count)]


def test_no_generated_program_is_a_task() -> None:
    shapes = task_shapes()
    assert len(shapes) > 30
    for task in generated(1):
        assert canonical(task.source) not in shapes
        assert canonical(task.fixed) not in shapes
        assert task.name in NAMES
    assert {task.name for task in TASKS}.isdisjoint(NAMES)


def test_a_renamed_task_is_still_recognised() -> None:
    """The planted copy: a task under other names has the task's canonical form."""
    copy = "def f(v, w):\n    if v < w:\n        return w\n    return v"
    assert canonical(copy) in task_shapes()
    assert canonical(copy.replace("<", "<=")) not in task_shapes()


def test_each_bug_is_one_line_and_told_apart_by_a_visible_case() -> None:
    families: set[str] = set()
    for task in generated(2):
        arguments = [case.arguments for case in task.visible]
        buggy, fixed = task.source.split("\n"), task.fixed.split("\n")
        assert sum(b != f for b, f in zip(buggy, fixed, strict=True)) == 1
        for source, wanted in ((task.fixed, True), (task.source, False)):
            outcomes = run_trusted(source, task.name, arguments)
            passes = [
                o.ok and same_value(o.value, c.wanted) for o, c in zip(outcomes, task.visible, strict=True)
            ]
            assert all(passes) == wanted
        families.add(task.family)
    assert families == set(FAMILIES)


def test_the_same_seed_gives_the_same_programs() -> None:
    assert generated(3, 40) == generated(3, 40)
    assert generated(3, 40) != generated(4, 40)


def test_run_trusted_answers_like_the_sandbox() -> None:
    with Sandbox() as sandbox:
        for task in generated(5, 12):
            arguments = [case.arguments for case in task.visible]
            assert run_trusted(task.source, task.name, arguments) == sandbox.call(
                task.source, task.name, arguments
            )
        for body in ("return x // 0", "return y", "return x[0]", "return [1][x]"):
            source = f"def f(x):\n    {body}"
            ours, theirs = run_trusted(source, "f", [(3,)])[0], sandbox.call(source, "f", [(3,)])[0]
            assert ours.ok == theirs.ok
            assert ours.error.partition(":")[0] == theirs.error.partition(":")[0]
        source = "def f(x):\n    return (x"
        assert run_trusted(source, "f", [(3,)])[0].error.startswith("SyntaxError")
        assert sandbox.call(source, "f", [(3,)])[0].error.startswith("SyntaxError")
