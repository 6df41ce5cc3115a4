"""The rewrites that make bugs also repair them, and write code as a formatter would."""

import random

import pytest

from agentrl.gym.programs import make_program
from agentrl.gym.rewrites import all_rewrites, joined, pieces
from agentrl.gym.tasks import Task, make_tasks, replaced

TASKS = make_tasks("all")


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_repair_of_every_task_is_a_rewrite_of_its_source(task: Task) -> None:
    names = [
        piece
        for piece in dict.fromkeys(pieces(task.source.replace("\n", " ")))
        if piece.isidentifier() and piece not in (task.name, "items", "append")
    ]
    repairs = {replaced(task.source, line, text) for _, line, text in all_rewrites(task.source, names)}
    assert task.fixed in repairs


def test_joining_pieces_formats_like_the_tasks() -> None:
    for task in TASKS:
        for line in (task.source + "\n" + task.fixed).split("\n"):
            assert joined(pieces(line)) == line.strip()


def test_every_rewrite_stands_as_a_formatter_would_write_it_and_can_be_undone() -> None:
    rng = random.Random(0)
    num_undone = num_rewrites = 0
    for _ in range(200):
        program = make_program(rng)
        variables = program.variables()
        for _, line, text in all_rewrites(program.source, variables):
            assert joined(pieces(text)) == text
            changed = replaced(program.source, line, text)
            back = {replaced(changed, n, t) for _, n, t in all_rewrites(changed, variables)}
            num_rewrites += 1
            num_undone += program.source in back
    assert num_undone / num_rewrites > 0.99  # only `len(items) + 1` to `len(items)` has no way back
