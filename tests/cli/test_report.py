"""`agentrl report`: the page of a run, in a real browser, and while the run goes on."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from PIL import Image

import agentrl.cli.report as report
from agentrl.cli.main import main

from .browser import Seen, faults, see

WriteRun = Callable[..., Path]
FIGURES = [
    "Learning curve", "Pass rate over episodes", "Share of episodes without signal", "Entropy",
    "Held-out pass rate over episodes", "Episodes a step", "Seconds", "Sampled tokens",
    "Positions that training computes", "Positions with logits", "Positions that sampling computes",
    "One batch in rows", "Memory of this batch's logits, a vocabulary of 600",
    "Memory of a GPU that trains Qwen/Qwen3-8B, 32,768 tokens a microbatch",
]  # fmt: skip
REFRESH = 'http-equiv="refresh"'


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_figure_is_seen_wide_and_on_a_phone(
    scheme: Literal["light", "dark"], write_run: WriteRun, tmp_path: Path
) -> None:
    run, other = write_run(), write_run("filtered", num_tasks=4)
    assert main(["report", str(run), "--against", str(other)]) == 0
    for seen in see(run / "report.html", tmp_path, scheme, widths=(1100, 390), height=7000):
        assert [figure["title"] for figure in seen.measured["figures"]] == FIGURES
        assert faults(seen, scheme) == []


def test_the_page_of_a_plan_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert main(["plan", "--html", str(page)]) == 0
    for seen in see(page, tmp_path, "dark", widths=(1100, 390), height=6000):
        assert len(seen.measured["figures"]) == 2
        assert faults(seen, "dark") == []


def test_a_page_that_looks_wrong_is_seen_to() -> None:
    chart = {"box": [10, 50, 90, 100], "texts": [["a", 10, 60, 30, 72], ["b", 25, 60, 40, 72],
                                                 ["c", 80, 80, 99, 86]]}  # fmt: skip
    figure = {"title": "F", "box": [5, 5, 95, 105], "marks": 0, "charts": [chart],
              "labels": [[50, 10, 120, 20]]}  # fmt: skip
    measured = {
        "width": 100,
        "page": 130,
        "figures": [figure, {**figure, "title": "G", "box": [5, 5, 95, 900]}],
    }
    said = "; ".join(faults(Seen(measured, Image.new("RGB", (100, 200), "white")), "dark"))
    for fault in (
        "130 wide in a window of 100", "background is (255, 255, 255) in dark", "F: nothing is drawn",
        "F: almost blank", "[50, 10, 120, 20] sticks out", "'a' on 'b'", "'c' is cut off",
        "'c' is 6.0 pixels high", "G: below the screenshot",
    ):  # fmt: skip
        assert fault in said


def test_a_finished_run_on_one_self_contained_page(
    write_run: WriteRun, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = write_run(steps=6, done=6)
    page = tmp_path / "page.html"
    assert main(["report", str(run), "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"wrote {page}\n"
    text = page.read_text()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert f"6 of 6 steps, {sum(r['episodes'] for r in records)} episodes, finished" in text
    assert f'<td class="number">{sum(r["positions_packed"] for r in records):,}</td>' in text
    share = sum(r["sampled_actions"] for r in records) / sum(r["tokens"] for r in records)
    assert f"share of action tokens, {share:.0%}" in text
    for outside in ("http://", "https://", "<script", "<link", "<img", "url(", REFRESH):
        assert outside not in text
    assert not (run / "report.html").exists()


def test_a_run_that_has_just_begun(write_run: WriteRun) -> None:
    run = write_run(steps=6, done=1)
    for absent in ("batch.json", "summary.json", "metrics.jsonl"):
        assert main(["report", str(run)]) == 0
        (run / absent).unlink()
    assert main(["report", str(run)]) == 0
    assert "No step is done yet." in (run / "report.html").read_text()


def test_records_of_a_run_that_recorded_less(write_run: WriteRun) -> None:
    run = write_run(steps=6, done=6)
    (run / "metrics.jsonl").write_text('{"step": 1, "episodes": 8, "more": [1]}\n{"step": 2, "epis')
    assert main(["report", str(run)]) == 0
    text = (run / "report.html").read_text()
    assert "1 of 6 steps, 8 episodes" in text
    assert "What each saving was worth" not in text


def test_watch_follows_the_run_to_its_end(
    write_run: WriteRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(steps=6, done=3)
    whole = write_run("whole", steps=6, done=6)
    page, slept, seen = run / "report.html", [], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        seen.append(page.read_text())
        if len(slept) == 2:
            for name in ("metrics.jsonl", "summary.json"):
                (run / name).write_bytes((whole / name).read_bytes())

    monkeypatch.setattr(report.time, "sleep", sleep)
    assert main(["report", str(run), "--watch", "--seconds", "3"]) == 0
    assert slept == [3.0, 3.0]
    assert all(f'{REFRESH} content="3.0"' in text and "3 of 6 steps" in text for text in seen)
    assert REFRESH not in page.read_text()
    assert "6 of 6 steps" in page.read_text()
    assert not list(run.glob("*.aside")) + list(run.glob(".*.aside"))
    assert capsys.readouterr().out.endswith(f"the run has finished\nwrote {page}\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_watch_ends_with_ctrl_c_and_when_it_is_told_to(
    number: signal.Signals,
    write_run: WriteRun,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = write_run(steps=6, done=3)
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(report.time, "sleep", lambda seconds: signal.raise_signal(number))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        assert main(["report", str(run), "--watch"]) == 0
    finally:
        signal.signal(signal.SIGINT, before)
    assert REFRESH not in (run / "report.html").read_text()
    said = capsys.readouterr().out
    assert "stopped watching; the run goes on" in said
    assert said.endswith(f"wrote {run / 'report.html'}\n")
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["absent"], "absent is not the directory of a run"),
        (["run", "--seconds", "0"], "--seconds must be positive, got 0.0"),
        (["run", "--against", *"abcde"], "--against takes at most 4 runs, got 5"),
        (["run", "--model", "Qwen3-8X"], "Qwen3-8X"),
    ],
)
def test_wrong_input_is_one_line(
    args: list[str], says: str, write_run: WriteRun, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(write_run(steps=2, done=2).parent)
    assert main(["report", *args]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "batch.json", "config.toml"])
def test_a_damaged_file_is_named(name: str, write_run: WriteRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(steps=2, done=2)
    (run / name).write_text('{"step": "no"}\n')
    assert main(["report", str(run)]) == 2
    assert str(run / name) in capsys.readouterr().err
