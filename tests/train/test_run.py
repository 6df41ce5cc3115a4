"""A run that is stopped, killed or continued."""

import json
import math
import os
import random
import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.conftest import (
    CONFIG,
    TASKS,
    TWO_TURNS,
    Letters,
    assert_same_run,
    carry,
    new_trainer,
    newest,
    result,
    snapshot,
)

from agentrl.report.run import load_run
from agentrl.rollout.episode import has_signal, play, sample_groups
from agentrl.train.checkpoint import (
    checkpoints_by_step,
    deserialize,
    load_checkpoint,
    save_checkpoint,
    serialize,
)
from agentrl.train.directory import RunDirectory
from agentrl.train.recording import position_counts
from agentrl.train.run import load_policy


def test_a_run_learns_and_leaves_its_files(whole: Path) -> None:
    records, weights, summary = result(whole)
    assert [record["step"] for record in records] == list(range(1, 10))
    assert any(record["updated"] for record in records)
    assert not torch.equal(
        weights["token_embedding.weight"], new_trainer().model.module.state_dict()["token_embedding.weight"]
    )
    assert summary["steps"] == 9
    assert summary["episodes"] == 9 * 8
    assert summary["pass_rate_before"] == summary["before"]["pass_rate"]
    names = {p.name for p in whole.iterdir()}
    assert names == {
        "config.toml", "metrics.jsonl", "batch.json", "checkpoints", "model.safetensors", "summary.json",
    }  # fmt: skip
    assert list(checkpoints_by_step(whole / "checkpoints")) == [8, 9]


def test_the_report_reads_what_a_run_wrote(whole: Path, tmp_path: Path) -> None:
    phases: list[str] = []
    config = replace(CONFIG, eval_every=3)
    summary = carry(tmp_path / "run", config, on_phase=phases.append, clock=iter(range(1000)).__next__)
    assert phases == ["evaluating", "training", *["evaluating", "training"] * 2, "evaluating"]
    assert summary is not None
    assert summary["seconds_evaluating"] == 4  # before, after steps 3 and 6, and after: one tick each
    run = load_run(tmp_path / "run")
    assert [(step, episodes) for step, episodes, _ in run.heldout()] == [(0, 0), (3, 24), (6, 48), (9, 72)]
    heldout = {"heldout_pass_rate"}
    records = [{k: v for k, v in r.items() if k not in heldout} for r in result(run.path)[0]]
    assert records == result(whole)[0], "evaluating in between changes nothing"
    assert run.finished
    assert run.batch is not None
    last = run.records[run.batch.step - 1]
    rows = {name: [run for row in each for run in row.runs] for name, each in run.batch.layouts.items()}
    tokens = {name: sum(n for kind, n in runs if kind != "padding") for name, runs in rows.items()}
    assert sum(n for _, n in rows["padded"]) == last.positions_padded
    assert tokens["packed"] == tokens["padded"] == last.positions_packed
    assert last.positions_tree is not None
    assert last.positions_tree <= tokens["tree"] <= tokens["packed"]  # a tree larger than a row is split
    assert sum(n for kind, n in rows["packed"] if kind == "action") == last.action_tokens


def test_decoded_positions_are_those_that_the_sampler_counted() -> None:
    trainer = new_trainer()
    episodes = [TASKS[0], TASKS[0], TASKS[1], TASKS[2]]
    generator = torch.Generator().manual_seed(0)
    trajs, stats = play(
        trainer.model,
        TWO_TURNS,
        episodes,
        Letters(),
        max_tokens=12,
        temperature=1.0,
        generator=generator,
        num_slots=3,
    )
    counts = position_counts(trajs, [])
    assert counts["positions_decoded"] == stats.num_positions
    assert counts["positions_uncached"] == stats.num_without_cache


def test_the_toy_is_learnt(tmp_path: Path) -> None:
    """From 5 of 32 episodes to all; with the loss's sign turned it ends at none."""
    rl = replace(CONFIG.rl, group_size=8, prompts_per_step=3, kl_coef=0.0, lr=0.02)
    summary = carry(tmp_path / "run", replace(CONFIG, rl=rl, steps=30, checkpoint_every=30))
    assert summary is not None
    assert summary["pass_rate_before"] < 0.3
    assert summary["pass_rate_after"] > 0.9


def test_same_seed_same_bits_and_another_seed_others(whole: Path, tmp_path: Path) -> None:
    carry(tmp_path / "again")
    assert_same_run(whole, tmp_path / "again")
    carry(tmp_path / "other", replace(CONFIG, rl=replace(CONFIG.rl, seed=1)))
    assert result(tmp_path / "other")[0] != result(whole)[0]


@pytest.mark.parametrize("stop_after", [0, 1, 4, 8])
def test_a_stopped_run_continues_to_the_same_bits(whole: Path, tmp_path: Path, stop_after: int) -> None:
    seen: list[Any] = []
    assert carry(tmp_path / "run", on_step=seen.append, should_stop=lambda: len(seen) == stop_after) is None
    torch.manual_seed(99)  # what happens in between does not matter
    assert carry(tmp_path / "run") is not None
    assert_same_run(whole, tmp_path / "run")


class Killed(BaseException):
    pass


@pytest.mark.parametrize("step", [1, 2, 5, 9])
def test_a_crash_after_a_record_and_before_its_checkpoint(whole: Path, tmp_path: Path, step: int) -> None:
    def crash(record: dict[str, Any]) -> None:
        if record["step"] == step:
            raise Killed

    with pytest.raises(Killed):
        carry(tmp_path / "run", on_step=crash)
    run = RunDirectory(tmp_path / "run")
    with run.metrics.path.open("a") as file:
        file.write('{"step": 99, "pass_r')  # a line that the crash cut off
    (run.checkpoints / ".step-000004-0123456789abcdef.safetensors.aside").write_bytes(b"half a checkpo")
    assert carry(tmp_path / "run") is not None
    assert_same_run(whole, tmp_path / "run")
    assert not list(run.path.rglob("*.aside"))


def fork(function: Callable[[], Any]) -> int:
    """Call the function in a child process, which starts at once as it imports nothing; returns its id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12: the parent has threads
        child = os.fork()
    if child == 0:
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def test_killed_at_random_moments(whole: Path, tmp_path: Path) -> None:
    """SIGKILL, again and again, at moments spread over all that a run does, until one gets through."""
    path = tmp_path / "run"
    start = time.perf_counter()
    assert os.waitpid(fork(lambda: carry(tmp_path / "unhurt")), 0)[1] == 0
    seconds, moments, num_kills = time.perf_counter() - start, random.Random(0), 0
    for _ in range(12):
        child = fork(lambda: carry(path))
        time.sleep(moments.random() * 0.5 * seconds)
        os.kill(child, signal.SIGKILL)
        num_kills += os.waitpid(child, 0)[1] == signal.SIGKILL
    assert num_kills > 0
    assert os.waitpid(fork(lambda: carry(path)), 0)[1] == 0
    assert_same_run(whole, path)


FORGOTTEN = {
    "moments": lambda c: replace(c, optimizer={}),
    "generator": lambda c: replace(c, random={**c.random, "generator": torch.Generator().get_state()}),
    "curriculum": lambda c: replace(c, curriculum={"rewards": 0.0, "left_out": 0}),
    "weights": lambda c: replace(c, model=new_trainer().checkpoint().model),
}


@pytest.mark.parametrize("part", FORGOTTEN)
def test_a_checkpoint_that_forgot_something_would_be_noticed(whole: Path, tmp_path: Path, part: str) -> None:
    seen: list[Any] = []
    carry(tmp_path / "run", on_step=seen.append, should_stop=lambda: len(seen) == 6)
    folder = tmp_path / "run" / "checkpoints"
    saved = newest(tmp_path / "run")
    checkpoint = FORGOTTEN[part](load_checkpoint(saved))
    saved.unlink()
    save_checkpoint(folder, checkpoint, keep=2)
    carry(tmp_path / "run")
    with pytest.raises(AssertionError):
        assert_same_run(whole, tmp_path / "run")


def test_a_finished_run_is_left_alone(whole: Path) -> None:
    before = snapshot(whole)
    summary = carry(whole)
    assert summary == RunDirectory(whole).load_summary()
    assert snapshot(whole) == before


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ([], "is damaged: .*its record is a list"),
        ({}, "is damaged: .*`model_config`"),
        ({"model_config": None}, r"is damaged: .*`\$.model_config`"),
        ({"model_config": ["width"]}, r"is damaged: .*`\$.model_config`"),
        ({"model_config": {"width": "wide"}}, "the run's model is not a TinyAgent: "),
    ],
)
def test_a_model_file_of_the_wrong_kind_is_named(
    whole: Path, tmp_path: Path, meta: Any, message: str
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    path = tmp_path / "run" / "model.safetensors"
    tensors, _ = deserialize(path.read_bytes())
    path.write_bytes(serialize(tensors, meta))
    with pytest.raises(ValueError, match=message):
        load_policy(RunDirectory(tmp_path / "run"))


def test_more_steps_continue_a_finished_run(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "longer")
    longer = replace(CONFIG, steps=11)
    assert carry(tmp_path / "longer", longer) is not None
    carry(tmp_path / "at_once", longer)
    records, weights, summary = result(tmp_path / "longer")
    others = result(tmp_path / "at_once")
    assert (records, summary) == (others[0], others[2])
    assert summary["steps"] == 11
    assert all(torch.equal(weights[name], others[1][name]) for name in weights)
    assert RunDirectory(tmp_path / "longer").load_config() == longer


def test_restore_refuses_another_model_or_other_settings() -> None:
    trainer = new_trainer()
    checkpoint = trainer.checkpoint()
    with pytest.raises(ValueError, match="other settings of learning"):
        new_trainer(replace(CONFIG.rl, lr=0.5)).restore(checkpoint)
    renamed = {f"x.{name}": value for name, value in checkpoint.model.items()}
    with pytest.raises(ValueError, match="holds another model"):
        trainer.restore(replace(checkpoint, model=renamed))


def test_a_step_without_signal_makes_no_update_and_says_so() -> None:
    trainer = new_trainer()
    trainer._sample = lambda policy, pool, generator: (
        [],
        sample_groups(policy, TWO_TURNS, pool, Letters(), CONFIG.rl, generator),
    )
    before = {name: value.clone() for name, value in trainer.model.module.state_dict().items()}
    record = trainer.step()
    assert record["updated"] is False
    assert record["zero_adv_frac"] == 1
    assert record["loss"] is None
    assert record["action_tokens"] == 0
    assert all(torch.equal(before[name], value) for name, value in trainer.model.module.state_dict().items())


def test_a_record_holds_the_statistics_of_the_step() -> None:
    trainer = new_trainer()
    ticks = iter(range(0, 100, 3))
    trainer._clock = lambda: next(ticks)
    record = next(record for record in iter(trainer.step, None) if 0 < record["zero_adv_frac"] < 1)
    assert record["seconds_sampling"] == record["seconds_training"] == 3
    assert record["episodes"] == 8
    assert record["tokens"] >= 8 * 2
    assert record["zero_adv_frac"] == 0.5
    assert 0 < record["entropy"] <= math.log(10)
    assert record["ratio_mean"] == pytest.approx(1, abs=0.1)
    assert {"loss", "ratio_max", "clip_frac", "grad_norm", "kl", "action_tokens", "left_out"} <= record.keys()
    json.dumps(record, allow_nan=False)


def test_toy_groups_have_signal() -> None:
    """The runs above would prove little if they never updated."""
    trajs = sample_groups(new_trainer().model, TWO_TURNS, TASKS * 10, Letters(), CONFIG.rl, torch.Generator())
    groups = [trajs[i : i + 4] for i in range(0, len(trajs), 4)]
    assert sum(map(has_signal, groups)) / len(groups) > 0.3
