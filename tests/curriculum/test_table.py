"""Keys, rows and columns of the task table."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from agentrl.curriculum.pass_rate import BetaPosterior, WindowMean
from agentrl.curriculum.table import TaskTable, task_key


def filled(estimator: BetaPosterior | WindowMean, *keys: str) -> TaskTable:
    table = TaskTable(estimator)
    table.add(keys, step=-1)
    return table


def test_keys_of_tasks() -> None:
    assert task_key("abs") == "abs"
    assert task_key(np.int64(3)) == 3
    assert type(task_key(np.int64(3))) is int
    assert task_key(SimpleNamespace(name="abs")) == "abs"
    assert task_key(SimpleNamespace(key="k", name="abs")) == "k"
    for bad in (1.5, None, SimpleNamespace(name=2.5), ("a", 1)):
        with pytest.raises(ValueError, match=r"has \.key or \.name"):
            task_key(bad)


def test_add_refuses_duplicates_and_changes_nothing() -> None:
    table = filled(BetaPosterior(), "a", "b")
    for new in (["c", "a"], ["c", "c"]):
        with pytest.raises(ValueError, match="duplicate task key"):
            table.add(new, step=3)
    assert table.keys == ["a", "b"]
    assert len(table.states) == 2
    assert "c" not in table


def test_remove_keeps_the_other_rows() -> None:
    table = filled(BetaPosterior(), "a", "b", "c")
    table.learn(table.rows(["c"]), np.ones((1, 4)), step=2)
    table.visit(table.rows(["c"]), step=2)
    table.remove(["b"])
    assert table.keys == ["a", "c"]
    assert table.states[table.rows(["c"])[0]].tolist() == [4.0, 0.0]
    assert table.since.tolist() == [-1, 2]
    with pytest.raises(ValueError, match="unknown task key 'b'"):
        table.rows(["b"])
    with pytest.raises(ValueError, match="no task"):
        table.remove(["a", "c"])


def test_learn_counts_certain_groups_in_a_row() -> None:
    table = filled(BetaPosterior(), "a", "b")
    rows = table.rows(["a", "b"])
    assert table.learn(rows, np.array([[1.0, 1.0], [1.0, 0.0]]), step=0).tolist() == [True, False]
    table.learn(rows[:1], np.zeros((1, 2)), step=1)
    assert table.num_certain.tolist() == [2, 0]
    table.learn(rows[:1], np.array([[1.0, 0.0]]), step=1)
    assert table.num_certain.tolist() == [0, 0]


def test_json_has_no_nan_and_comes_back() -> None:
    table = filled(WindowMean(3), "a", "b")
    table.learn(table.rows(["a"]), np.array([[1.0, 0.0, 0.0]]), step=4)
    text = json.dumps(table.to_json(), allow_nan=False)
    other = filled(WindowMean(3), "new", "b", "a")
    other.load_json(json.loads(text), step=9)
    assert np.array_equal(other.states[[2, 1]], table.states, equal_nan=True)
    assert other.since.tolist() == [9, -1, -1]
    assert other.evidence.tolist() == [9, -1, 4]


def test_load_refuses_columns_that_do_not_fit() -> None:
    table = filled(BetaPosterior(), "a")
    good = table.to_json()
    damaged = [{}, {**good, "since": []}, {**good, "since": None}, {**good, "since": ["soon"]}]
    damaged += [{**good, "state": [[1.0]]}, {**good, "state": [[1.0, "x"]]}]
    for broken in damaged:
        with pytest.raises(ValueError, match="not the columns of a task table"):
            table.load_json(broken, step=0)  # type: ignore[arg-type]
    assert table.to_json() == good
