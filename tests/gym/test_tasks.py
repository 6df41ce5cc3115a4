"""The thirty tasks are what the issue of the gym promises."""

import difflib

import pytest

from agentrl.gym.rewrites import pieces
from agentrl.gym.sandbox import same_value
from agentrl.gym.tasks import Case, Task, copied, make_tasks, reference_values

TASKS = make_tasks("all")


def passes(source: str, task: Task, cases: tuple[Case, ...]) -> list[bool]:
    values = reference_values(source, task.name, [case.arguments for case in cases])
    return [same_value(value, case.wanted) for value, case in zip(values, cases, strict=True)]


def test_splits_are_disjoint_and_ordered() -> None:
    train, heldout = make_tasks("train"), make_tasks("heldout")
    assert (len(train), len(heldout), len(TASKS)) == (20, 10, 30)
    assert train + heldout == TASKS
    assert len({task.name for task in TASKS}) == 30
    assert len({task.source for task in TASKS} | {task.fixed for task in TASKS}) == 60


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="split must be 'train', 'heldout' or 'all', got 'test'"):
        make_tasks("test")  # pyright: ignore[reportArgumentType]


def test_a_dozen_families_and_every_held_out_one_in_training() -> None:
    train = {task.family for task in make_tasks("train")}
    assert len(train) >= 12
    assert {task.family for task in make_tasks("heldout")} <= train


def repair(task: Task) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """What a task's repair takes out of the buggy line and what it puts in."""
    ((buggy, fixed),) = (
        (pieces(b), pieces(f))
        for b, f in zip(task.source.split("\n"), task.fixed.split("\n"), strict=True)
        if b != f
    )
    steps = difflib.SequenceMatcher(None, buggy, fixed, autojunk=False).get_opcodes()
    return [(buggy[i:j], fixed[k:m]) for tag, i, j, k, m in steps if tag != "equal"]


def test_every_held_out_repair_is_trained_on_another_function() -> None:
    trained = [repair(task) for task in make_tasks("train")]
    assert [task.name for task in make_tasks("heldout") if repair(task) not in trained] == []


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_one_bug_on_one_line_that_both_kinds_of_tests_see(task: Task) -> None:
    buggy, fixed = task.source.split("\n"), task.fixed.split("\n")
    assert fixed[0].startswith(f"def {task.name}(")
    assert 1 <= len(fixed) <= 6
    assert sum(b != f for b, f in zip(buggy, fixed, strict=True)) == 1
    visible, hidden = ([repr(c.arguments) for c in cases] for cases in (task.visible, task.hidden))
    assert len(set(visible)) >= 4
    assert len(set(hidden) - set(visible)) >= 4
    for cases in (task.visible, task.hidden):
        assert all(passes(task.fixed, task, cases))
        assert not all(passes(task.source, task, cases))


def test_a_copy_shares_no_list() -> None:
    value = ([1, [2]], "text")
    twin = copied(value)
    twin[0][1].append(3)
    assert value == ([1, [2]], "text")
