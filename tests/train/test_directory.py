"""The directory of a run that is damaged, in use, or not free."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.conftest import (
    CONFIG,
    assert_same_run,
    carry,
    evaluation,
    new_trainer,
    newest,
    snapshot,
)

from agentrl.train.checkpoint import deserialize, serialize
from agentrl.train.directory import RunDirectory
from agentrl.train.run import Hooks, train_run


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "a bit of the checkpoint": (lambda d: flip_a_bit(newest(d)), "is damaged: its content"),
    "a cut checkpoint": (lambda d: os.truncate(newest(d), 100), "is damaged: its content"),
    "an empty checkpoint": (lambda d: os.truncate(newest(d), 0), "is damaged: its content"),
    "a record that is a list": (lambda d: forge(d, meta=lambda m: [m]), "be read: .*its record is a list"),
    "a record without its curriculum": (
        lambda d: forge(d, meta=lambda m: {k: v for k, v in m.items() if k != "curriculum"}),
        "cannot be read: .*`curriculum`",
    ),
    "a record of another step": (lambda d: forge(d, meta=lambda m: {**m, "step": 8}), "it is of step 8, not"),
    "a checkpoint without random states": (
        lambda d: forge(d, lambda t: {k: v for k, v in t.items() if not k.startswith("random/")}),
        "has no random state 'generator'",
    ),
    "a random state that is none": (
        lambda d: forge(d, lambda t: {**t, "random/torch": torch.zeros(3)}),
        "has no random state 'torch': ",
    ),
    "moments of no parameter": (
        lambda d: forge(d, lambda t: {**t, "optimizer/99/step": torch.zeros(())}),
        "has moments of parameter 99, the model ",
    ),
    "moments of another shape": (
        lambda d: forge(d, lambda t: {**t, "optimizer/0/exp_avg": torch.zeros(3)}),
        "moments of parameter 0 are .*'exp_avg': \\(3,\\).*but must be",
    ),
    "a parameter with half its moments": (
        lambda d: forge(d, lambda t: {k: v for k, v in t.items() if k != "optimizer/0/step"}),
        "moments of parameter 0 are .*but must be",
    ),
    "no checkpoints": (lambda d: shutil.rmtree(d / "checkpoints"), "checkpoints/ nothing"),
    "no config": (lambda d: (d / "config.toml").unlink(), "holds no config.toml"),
    "config that is not TOML": (lambda d: (d / "config.toml").write_text("steps = ["), "is not TOML"),
    "another config": (
        lambda d: (d / "config.toml").write_text("[rl]\nlr = 1.0\n"),
        r"other settings of \[rl\]",
    ),
    "metrics with a hole": (lambda d: cut_lines(d, 2, 3), "does not hold steps 1 to 9"),
    "metrics too short": (lambda d: cut_lines(d, 5, 99), "does not hold steps 1 to 9"),
    "metrics that are not JSON": (lambda d: (d / "metrics.jsonl").write_text("no\n"), "line 1 is not a JSON"),
    "a summary that is not JSON": (
        lambda d: (d / "summary.json").write_text("{"),
        r"summary\.json is damaged",
    ),
    "a summary without its seconds": (
        lambda d: edit_summary(d, lambda s: {"before": s["before"]}),
        r"summary\.json is damaged: .*`seconds_before`",
    ),
    "a summary whose evaluation is none": (
        lambda d: edit_summary(d, lambda s: {"before": {}, "seconds_before": 1.0}),
        r"summary\.json is damaged: .*`pass_rate`",
    ),
    "a summary that ended without figures": (
        lambda d: edit_summary(d, lambda s: {n: s[n] for n in ("before", "seconds_before", "after")}),
        r"summary\.json is damaged: .*`steps`",
    ),
    "a summary of brackets": (
        lambda d: (d / "summary.json").write_text("[" * 100_000),
        "is damaged: maximum",
    ),
    "metrics of brackets": (
        lambda d: (d / "metrics.jsonl").write_text("[" * 100_000 + "\n"),
        "line 1 is not a JSON record: maximum",
    ),
    "config of brackets": (lambda d: (d / "config.toml").write_text("a=" + "[" * 5000), "is not TOML: max"),
    "metrics of another program": (
        lambda d: (d / "metrics.jsonl").write_text("".join(f'{{"step": {i + 1}}}\n' for i in range(9))),
        r"metrics\.jsonl is damaged: line 1: .*`episodes`",
    ),
    "metrics with figures that are none": (
        lambda d: (d / "metrics.jsonl").write_text(
            (d / "metrics.jsonl").read_text().replace('"tokens": ', '"tokens": null, "was": ')
        ),
        r"metrics\.jsonl is damaged: line 1: .*tokens",
    ),
    "metrics with a NaN": (
        lambda d: (d / "metrics.jsonl").write_text(
            (d / "metrics.jsonl").read_text().replace('"tokens": ', '"x": NaN, "tokens": ')
        ),
        "line 1 is not a JSON record: NaN",
    ),
    "metrics written twice": (
        lambda d: (d / "metrics.jsonl").write_text((d / "metrics.jsonl").read_text() * 2),
        "does not hold steps 1 to 9",
    ),
    "a file in the place of checkpoints": (
        lambda d: [shutil.rmtree(d / "checkpoints"), (d / "checkpoints").touch()],
        "checkpoints is not a directory",
    ),
    "a cut model": (lambda d: os.truncate(d / "model.safetensors", 2000), r"model\.safetensors is damaged"),
    "an empty model": (lambda d: os.truncate(d / "model.safetensors", 0), r"model\.safetensors is damaged"),
    "no summary": (lambda d: (d / "summary.json").unlink(), r"summary\.json, written before any"),
    "an empty directory": (lambda d: [shutil.rmtree(d), d.mkdir()], "not the directory of a run"),
    "a foreign directory": (
        lambda d: [shutil.rmtree(d), d.mkdir(), (d / "notes.txt").write_text("mine")],
        "not the directory of a run",
    ),
    "no directory": (lambda d: shutil.rmtree(d), "not the directory of a run"),
}


def forge(
    path: Path,
    tensors: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = lambda tensors: tensors,
    meta: Callable[[dict[str, Any]], Any] = lambda meta: meta,
) -> None:
    """Change what the newest checkpoint holds and give it the digest of that."""
    old = newest(path)
    held, record = deserialize(old.read_bytes())
    content = serialize(tensors(held), meta(record))
    old.unlink()
    digest = hashlib.sha256(content).hexdigest()[:16]
    old.with_name(f"step-{CONFIG.steps:06d}-{digest}.safetensors").write_bytes(content)


def edit_summary(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    summary = path / "summary.json"
    summary.write_text(json.dumps(change(json.loads(summary.read_text()))))


def cut_lines(path: Path, start: int, end: int) -> None:
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(lines[:start] + lines[end:]))


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named_and_nothing_is_touched(whole: Path, tmp_path: Path, case: str) -> None:
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    spoil, message = DAMAGE[case]
    spoil(path)
    before = snapshot(path)
    run = RunDirectory(path)
    with pytest.raises(ValueError, match=message):
        train_run(run, run.load_config(), new_trainer(), evaluation, Hooks())
    assert snapshot(path) == before


def test_a_forged_checkpoint_that_changes_nothing_is_read(whole: Path, tmp_path: Path) -> None:
    """The cases above would prove little if every forged checkpoint was refused."""
    shutil.copytree(whole, tmp_path / "run")
    forge(tmp_path / "run", meta=lambda m: dict(reversed(m.items())))
    assert newest(tmp_path / "run").name != newest(whole).name
    assert carry(tmp_path / "run") == RunDirectory(whole).load_summary()


def test_a_model_that_is_missing_is_written_again(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run/model.safetensors").unlink()
    carry(tmp_path / "run")
    assert snapshot(tmp_path / "run")["model.safetensors"] == snapshot(whole)["model.safetensors"]
    assert_same_run(whole, tmp_path / "run")


def test_two_do_not_train_in_one_directory(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    refused: list[str] = []

    def meddle(record: dict[str, Any]) -> None:
        before = snapshot(path)
        with pytest.raises(ValueError, match="is in use: another process trains in it") as caught:
            carry(path)
        refused.append(str(caught.value))
        assert snapshot(path) == before

    carry(path, on_step=meddle)
    assert len(refused) == CONFIG.steps
    assert_same_run(whole, path)


def test_moving_a_damaged_checkpoint_away_goes_on_from_the_one_before(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    newest(tmp_path / "run").unlink()
    assert carry(tmp_path / "run") is not None
    assert_same_run(whole, tmp_path / "run")


def test_a_new_run_does_not_write_where_something_is(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="already holds a run; continue it with --resume"):
        RunDirectory(whole).create(CONFIG)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not an empty directory"):
        RunDirectory(tmp_path).create(CONFIG)
    with pytest.raises(ValueError, match="not an empty directory"):
        RunDirectory(tmp_path / "notes.txt").create(CONFIG)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
