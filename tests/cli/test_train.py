"""`agentrl train` and `agentrl eval` with a small untrained model in the place of the supervised base."""

import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.cli.main import main
from agentrl.cli.train import parse, summary_table
from agentrl.models.tiny import TinyAgent, TinyConfig
from agentrl.train.config import RunConfig
from agentrl.train.directory import RunDirectory
from agentrl.train.run import load_policy

SMALL = [
    "--steps", "3", "--eval-samples", "1", "--group-size", "2", "--prompts-per-step", "2",
    "--max-tokens", "16", "--max-turns", "2", "--checkpoint-every", "1",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _small_base(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_small(tok: Any, **_: Any) -> TinyAgent:
        return TinyAgent(TinyConfig(vocab_size=len(tok), width=8, num_layers=1, num_heads=1))

    monkeypatch.setattr("agentrl.train.base.make_rl_base", make_small)


def in_child(function: Callable[[], int]) -> int:
    """Call the function in a child process that ends with what it returns; gives the child's id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12: the parent has threads
        child = os.fork()
    if child == 0:
        status = 99
        try:
            status = function()
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    return child


def records(path: Path) -> list[dict[str, Any]]:
    kept = RunDirectory(path).metrics.read()
    return [{k: v for k, v in record.items() if not k.startswith("seconds")} for record in kept]


def test_episodes_cut_short_are_counted_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Reward 0 for want of tokens looks like failure; the table says which it was."""
    path = tmp_path / "run"
    assert main(["train", "--run-dir", str(path), *SMALL, "--max-turns", "16"]) == 0
    cut, played = (sum(r[name] for r in records(path)) for name in ("truncated_episodes", "episodes"))
    assert 0.5 <= cut / played <= 1
    assert f"{cut / played:.0%} of the episodes; raise --max-tokens" in capsys.readouterr().out
    summary = RunDirectory(path).load_summary()
    for count, said in ((0, False), (1, True)):
        table = summary_table({**summary, "truncated_episodes": count}, path)
        assert ("out of tokens" in table.columns[0].cells) == said
        assert not any("raise" in str(cell) for cell in table.columns[1].cells)


def test_a_run_ends_with_a_table_and_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    assert main(["train", "--run-dir", str(path), *SMALL]) == 0
    out = capsys.readouterr().out
    assert "held-out pass rate" in out
    assert "seconds sampling" in out
    assert "step   3/3  pass rate" in out
    assert "tokens/s" in out
    assert "12, of which 100% wasted: no gradient" in out, "an untrained policy fixes nothing"
    assert "\x1b" not in out, "no terminal, no escape codes"
    assert {p.name for p in path.iterdir()} == {
        "config.toml", "metrics.jsonl", "checkpoints", "model.safetensors", "summary.json",
    }  # fmt: skip
    assert [record["pool"] for record in records(path)] == [2, 2, 2], "the default rule offers what it chose"
    summary = json.loads((path / "summary.json").read_text())
    assert summary["episodes"] == 12
    assert len(summary["after"]["per_task"]) == 10

    before = (path / "summary.json").read_bytes()
    assert main(["train", "--resume", str(path)]) == 0  # finished: shows the table again
    assert "held-out pass rate" in capsys.readouterr().out
    assert (path / "summary.json").read_bytes() == before

    assert main(["train", "--run-dir", str(path), *SMALL]) == 2
    assert "already holds a run; continue it with --resume" in capsys.readouterr().err

    assert main(["train", "--resume", str(path), "--lr", "0.5"]) == 2
    assert "other settings of [rl]" in capsys.readouterr().err

    assert main(["train", "--resume", str(path), "--steps", "4", "--curriculum", "band"]) == 2
    assert "made with curriculum top, not band, and cannot change it" in capsys.readouterr().err

    assert main(["eval", str(path), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["per_task"] == summary["after"]["per_task"]
    assert figures["step"] is None
    assert main(["eval", str(path), "--step", "2", "--split", "train", "--samples", "1"]) == 0
    assert "all train tasks" in capsys.readouterr().out
    assert main(["eval", str(path), "--step", "99"]) == 2
    assert "holds no checkpoint of step 99; it has [2, 3]" in capsys.readouterr().err


def test_low_precision_and_recomputation_need_no_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "run"
    flags = ["--compute-dtype", "bfloat16", "--checkpoint-activations", "--kl-coef", "0.1"]
    assert os.waitpid(in_child(lambda: main(["train", "--run-dir", str(path), *SMALL, *flags])), 0)[1] == 0
    assert len(records(path)) == 3
    assert {p.suffix for p in (path / "checkpoints").iterdir()} == {".shards"}
    policy, _ = load_policy(RunDirectory(path))
    assert {p.dtype for p in policy.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_the_run_continues(tmp_path: Path, signum: int) -> None:
    path, output = tmp_path / "run", tmp_path / "output"
    args = ["train", "--run-dir", str(path), *SMALL, "--steps", "40", "--checkpoint-every", "1000"]

    def start() -> int:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        status = main(args)
        sys.stdout.flush()
        return status

    child = in_child(start)
    deadline = time.monotonic() + 60
    while not (path / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(child, signum)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signum
    said = output.read_text()
    assert f"agentrl train --resume {path}" in said
    num_done = len(records(path))
    assert 0 < num_done < 40
    run = RunDirectory(path)
    checkpoint = run.load_latest(run.load_config())
    assert checkpoint is not None
    assert checkpoint.step == num_done
    assert main(["train", "--resume", str(path)]) == 0
    assert main(["train", "--run-dir", str(tmp_path / "whole"), *args[3:]]) == 0
    assert records(path) == records(tmp_path / "whole")
    weights, others = (load_policy(RunDirectory(p))[0].state_dict() for p in (path, tmp_path / "whole"))
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_flags_override_the_file_and_unknown_keys_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    file.write_text("steps = 7\n[rl]\nlr = 0.25\nseed = 3\n")
    config = parse(["--config", str(file), "--lr", "0.5"]).run
    assert (config.steps, config.rl.lr, config.rl.seed) == (7, 0.5, 3)
    file.write_text("stepz = 7\n")
    assert main(["train", "--config", str(file)]) == 2
    assert "unknown key 'stepz'; did you mean steps?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_info:
        main(["train", "--grup-size", "4"])
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert "--group-size" in captured.out + captured.err


def test_contradictory_and_absent_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume", str(tmp_path), "--config", "x.toml"]) == 2
    assert "leave --config out" in capsys.readouterr().err
    for folder in ("", str(tmp_path)):
        assert main(["train", "--config", folder]) == 2
        assert f"--config {folder or '.'}: a folder, not a TOML file; --resume" in capsys.readouterr().err
    assert main(["train", "--model", ""]) == 2
    assert "--model is empty; give a folder or OWNER/NAME" in capsys.readouterr().err
    assert main(["train", "--resume", str(tmp_path / "absent")]) == 2
    assert "is not the directory of a run" in capsys.readouterr().err
    assert not (tmp_path / "absent").exists()
    assert main(["train", "--config", str(tmp_path / "absent.toml")]) == 2
    assert "absent.toml" in capsys.readouterr().err
    assert main(["eval", str(tmp_path)]) == 2
    assert "is not the directory of a run" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "eval"])
def test_help_reads_well(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([command, "--help"])
    assert exit_info.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: agentrl {command}" in out
    assert "None" not in out
    assert ">>>" not in out


def test_samples_that_cannot_be_played_are_refused_before_the_model_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path)
    run.create(RunConfig())  # and no model
    for samples, message in (("0", "at least 1, got 0"), ("10001", "at most 10,000 episodes a task, got 1")):
        assert main(["eval", str(tmp_path), "--samples", samples]) == 2
        assert f"agentrl eval: --samples must be {message}" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["nowhere", "", "meta", "cuda:99"])
def test_a_device_that_is_not_here_is_refused_at_once(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *SMALL, "--run-dir", str(tmp_path / "run"), "--device", device]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"agentrl train: --device {device}: this machine cannot compute there: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not (tmp_path / "run").exists()


def test_a_run_from_a_machine_with_another_device_is_evaluated_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", *SMALL, "--run-dir", str(run)]) == 0
    config = run / "config.toml"
    config.write_text(config.read_text().replace('device = "cpu"', 'device = "cuda:99"'))
    assert main(["eval", str(run)]) == 2
    assert "eval: --device cuda:99: this machine cannot compute there" in capsys.readouterr().err
    assert main(["eval", str(run), "--device", "cpu"]) == 0


def test_a_diverged_run_ends_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", *SMALL, "--run-dir", str(tmp_path / "run"), "--temperature", "1e-300"]
    assert main(command) == 2
    assert "there is no token to sample" in capsys.readouterr().err


REFUSED = [
    ("--seed -1", "seed must be at least 0 and below 2**63, got -1"),
    ("--seed 9223372036854775808", "seed must be at least 0 and below 2**63, got 9223372036854775808"),
    ("--betas 0.9 nan", "betas must be two numbers from 0 to below 1, got (0.9, nan)"),
    ("--microbatch-tokens 0", "microbatch_tokens must be at least max_tokens (16), the longest trajectory, "),
    ("--loss-mode constant", "loss mode 'constant' divides by norm_const; give a positive one, got None"),
    ("--lr 1e38", "lr must be at most 10, as Adam moves every weight by about lr at once: the policy would "),
    (
        "--threads 100000000000",
        "threads must be at most 1,024, which is more than a machine has cores, got 1",
    ),
    (
        "--group-size 1000000000000",
        "prompts_per_step x group_size must be at most 1,000,000, as a step holds all its episodes at once, ",
    ),
    ("--eval-samples 1000000000000", "eval_samples must be at most 10,000 episodes a task, got 10"),
    (
        "--num-epochs 1000000000000",
        "num_epochs must be at most 1,000 passes over the same trajectories, got ",
    ),
    ("--steps -1", "steps must be at least 0, got -1"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_a_value_out_of_range_is_one_line_at_once(
    flags: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *SMALL, "--run-dir", str(tmp_path / "run"), *flags.split()]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"agentrl train: {message}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not (tmp_path / "run").exists()
