"""The command: tables, JSON, the page, and bad input."""

import json
from pathlib import Path
from typing import Literal

import pytest
import torch

from agentrl.cli.main import main
from agentrl.data.storage import save_trajectories
from agentrl.data.trajectory import Trajectory

from .browser import faults, see


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    trajs = [
        Trajectory(
            torch.arange(n), torch.ones(n - 1), -torch.ones(n - 1), float(n % 2), {"task": f"[{n // 4}]"}
        )
        for n in range(4, 24)
    ]
    path = tmp_path / "run.jsonl"
    save_trajectories(path, trajs)
    return path


def test_tables(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(run_file)]) == 0
    out = capsys.readouterr().out
    for words in ("padding to the longest", "rows of 32", "groups without signal", "0 of 5", "what to do"):
        assert words in out


def test_a_narrow_terminal_breaks_no_heading(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setenv("COLUMNS", "44")
    assert main(["analyze", str(run_file)]) == 0
    out = capsys.readouterr().out
    for heading in ("Trajectories", "Microbatches", "padding to", "distortion"):
        assert heading in out


def test_json(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(run_file), "--json", "--model", "Qwen3-8B", "--max-tokens", "64"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_trajectories"] == 20
    assert {"Positions", "Groups", "Cost"} <= set(found["sections"])
    for findings in found["sections"].values():
        assert all(set(finding) == {"name", "value", "text", "advice"} for finding in findings)


def test_page(run_file: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["analyze", str(run_file), "--html", str(page)]) == 0
    text = page.read_text()
    assert "padding to the longest" in text
    assert "At a glance" in text
    assert "Positions that a model would compute" in text
    assert "M positions" in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text


FIGURES = [
    "Positions that a model would compute", "Lengths of trajectories", "Memory of a microbatch's logits",
    "Pass rates of groups",
]  # fmt: skip


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_figure_is_seen_wide_and_on_a_phone(
    scheme: Literal["light", "dark"], run_file: Path, tmp_path: Path
) -> None:
    with open(run_file, "a") as file:
        file.write('{"agentrl": 1, "ids": [1, 2\n')
    page = tmp_path / "page.html"
    assert main(["analyze", str(run_file), "--skip-bad", "--model", "Qwen3-8B", "--html", str(page)]) == 0
    for seen in see(page, tmp_path, scheme, widths=(1100, 390), height=6000):
        assert [figure["title"] for figure in seen.measured["figures"]] == FIGURES
        assert faults(seen, scheme) == []


def test_bad_records(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(run_file, "a") as file:
        file.write('{"agentrl": 1, "ids": [1, 2\n')
    assert main(["analyze", str(run_file)]) == 2
    error = capsys.readouterr().err
    assert f"{run_file}: line 21: cut off" in error
    assert "--skip-bad" in error
    assert main(["analyze", str(run_file), "--skip-bad"]) == 0
    error = capsys.readouterr().err
    assert f"skipped {run_file}: line 21: cut off" in error
    assert "skipped 1 records, read 20 trajectories" in error
    assert main(["analyze", str(run_file), "--skip-bad", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["skipped"]) == 1


def test_progress_is_a_line_now_and_then_where_no_terminal_listens(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.cli.analyze._SECONDS_BETWEEN_LINES", -1)
    assert main(["analyze", str(run_file)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "read 20 trajectories, 100% of the files"
    assert not any("\x1b" in line for line in lines)


def test_wrong_input_is_one_line(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    for args, words in [
        ([str(empty)], "no records in it"),
        ([str(tmp_path / "none.jsonl")], "No such file"),
        ([str(run_file), "--microbatch", "0"], "--microbatch must be at least 1, got 0"),
        ([str(run_file), "--vocab-size", "10"], "ids: out of range: 10, the vocabulary has 10"),
        ([str(run_file), "--model", "no-such-model"], "no-such-model"),
        ([str(run_file), "--gpu", "H100"], "--gpu says what a run would cost; name its --model too"),
        ([str(run_file), "--steps", "9"], "--steps says what a run would cost; name its --model too"),
        ([str(run_file), "--model", "Qwen3-8B", "--steps", "0"], "--steps must be at least 1, got 0"),
    ]:
        assert main(["analyze", *args]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
