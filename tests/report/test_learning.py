"""Curves of runs: where points stand, and what is left out."""

import re
from pathlib import Path

import pytest

from agentrl.report.learning import filter_section, learning_section, running_mean, tasks_section
from agentrl.report.run import Evaluation, Run, StepRecord, Summary


def run(name: str = "run", num_steps: int = 4, finished: bool = True) -> Run:
    records = tuple(
        StepRecord(
            step=step, episodes=8, pass_rate=step / 10, zero_adv_frac=0.25,
            entropy=None if step == 2 else 1.0, heldout_pass_rate=0.5 if step == 2 else None,
        )
        for step in range(1, num_steps + 1)
    )  # fmt: skip
    after = Evaluation(pass_rate=0.75, per_task={"a": 1.0}) if finished else None
    summary = Summary(before=Evaluation(pass_rate=0.25, per_task={"a": 0.5, "b": 0.0}), after=after)
    return Run(path=Path(name), config={}, records=records, summary=summary)


def test_heldout_points_stand_at_their_steps_and_episodes() -> None:
    assert run().heldout() == [(0, 0, 0.25), (2, 16, 0.5), (4, 32, 0.75)]
    assert run(finished=False).heldout() == [(0, 0, 0.25), (2, 16, 0.5)]
    assert run(num_steps=0, finished=False).heldout() == [(0, 0, 0.25)]


def test_curves_of_one_run() -> None:
    section = learning_section(run())
    assert [figure.title for figure in section.figures] == [
        "Learning curve", "Pass rate over episodes", "Share of episodes without signal", "Entropy",
    ]  # fmt: skip
    assert section.figures[0].body.count("<circle") == 3  # the evaluations
    entropy = re.findall(r'points="([^"]*)"', section.figures[3].body)
    assert len(entropy) == 1
    assert len(entropy[0].split()) == 3  # a step without an update has none
    assert learning_section(run(num_steps=0)).figures == ()


def test_runs_side_by_side() -> None:
    section = filter_section([run("runs/all"), run("runs/band", 2, finished=False)])
    assert section.tables[0].rows == (
        ("all", "32", "25%", "0.25 to 0.75"), ("band", "16", "25%", "0.25 to 0.50"),
    )  # fmt: skip
    assert [figure.title for figure in section.figures] == [
        "Held-out pass rate over episodes", "Episodes a step",
    ]  # fmt: skip
    assert section.figures[0].body.count("<circle") == 5
    same = filter_section([run("x/run"), run("y/run")])
    assert [row[0] for row in same.tables[0].rows] == ["x/run", "y/run"]
    with pytest.raises(ValueError, match="at most 5 runs can be told apart, got 6"):
        filter_section([run()] * 6)


def test_tasks_before_and_after() -> None:
    section = tasks_section(run())
    assert section is not None
    assert section.tables[0].rows == (("a", "0.50", "1.00"), ("b", "0.00", ""))
    assert tasks_section(Run(path=Path("r"), config={}, records=(), summary=Summary())) is None


def test_running_mean_of_gaps() -> None:
    assert running_mean([None, 1.0, None, None], 2) == (None, 1.0, 1.0, None)
    assert running_mean([], 2) == ()
