"""`agentrl train --model`: a Hugging Face model from a local folder, alone and on two processes."""

import json
import os
import shutil
import socket
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.cli.main import main
from agentrl.gym.instructions import INSTRUCTIONS
from agentrl.gym.tasks import make_tasks
from agentrl.train.config import RunConfig
from agentrl.train.directory import RunDirectory
from agentrl.train.run import load_policy
from agentrl.train.start import load_tokenizer

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

SMALL = [
    "--steps", "2", "--eval-samples", "1", "--group-size", "4", "--prompts-per-step", "2",
    "--max-tokens", "48", "--max-turns", "2", "--checkpoint-every", "1", "--instructions", "Fix it.",
]  # fmt: skip


def save_tokenizer(folder: Path, **special: str) -> int:
    """A byte-level tokenizer of the gym's text in the folder; returns how many ids it has."""
    tok = tokenizers.Tokenizer(tokenizers.models.BPE())
    tok.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "<end>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator((task.source for task in make_tasks("all")), trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tok, **special)
    fast.save_pretrained(folder)
    return len(fast)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with tied embeddings and its tokenizer, as from_pretrained reads them."""
    path = tmp_path_factory.mktemp("hf") / "model"
    num_ids = save_tokenizer(path, eos_token="<end>", pad_token="<pad>")
    config = transformers.Qwen3Config(
        vocab_size=num_ids, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def _half_of_the_episodes_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model solves nothing: reward an action by its text, so that there is something to learn."""
    from agentrl.gym.env import BugFixEnv, StepResult

    def step(self: BugFixEnv, action: str) -> StepResult:
        return StepResult("", float(len(action) % 2), True)

    monkeypatch.setattr(BugFixEnv, "step", step)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_policy(RunDirectory(path))[0].module.state_dict()


def records(path: Path) -> list[dict[str, Any]]:
    kept = RunDirectory(path).metrics.read()
    return [{k: v for k, v in r.items() if not k.startswith(("seconds", "distortion"))} for r in kept]


@pytest.fixture
def finished(folder: Path) -> Path:
    """A run of two steps on one process, made once."""
    path = folder.parent / "run"
    if not path.exists():
        assert main(["train", "--model", str(folder), "--run-dir", str(path), *SMALL]) == 0
    return path


def test_a_folder_is_trained_evaluated_and_resumed(
    folder: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert RunDirectory(finished).load_config().model == str(folder)
    assert any(record["updated"] for record in records(finished))
    before = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    after = weights(finished)
    assert any(not torch.equal(value, before[name]) for name, value in after.items())

    capsys.readouterr()
    assert main(["eval", str(finished), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    summary = RunDirectory(finished).load_summary()
    assert figures["per_task"] == summary["after"]["per_task"]
    assert figures["mean_tokens"] == summary["after"]["mean_tokens"]

    other = tmp_path / "run"
    args = ["train", "--model", os.path.relpath(folder), "--run-dir", str(other), *SMALL]
    assert main([*args, "--steps", "1"]) == 0
    assert f"loading {folder}" in capsys.readouterr().out.replace("\n", "")
    assert main(["train", "--resume", str(other), "--steps", "2"]) == 0
    assert records(other) == records(finished)
    assert all(torch.equal(value, after[name]) for name, value in weights(other).items())

    assert main(["train", "--resume", str(other), "--model", str(folder.parent)]) == 2
    assert f"the run started from {folder}; leave --model out" in capsys.readouterr().err


TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_a_chat_template_frames_every_episode_of_a_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    once, twice = tmp_path / "once", tmp_path / "twice"
    flags = ["--model", str(model), *SMALL, "--max-tokens", "64", "--max-turns", "1"]
    assert main(["train", "--run-dir", str(once), *flags]) == 0
    config = RunDirectory(once).load_config()
    assert (config.instructions, config.chat_template) == ("Fix it.", True)
    tok = load_tokenizer(config)
    prompt = tok.encode_prompt("fix clamp\n")  # type: ignore[attr-defined]
    asked = [{"role": "user", "content": "Fix it.\n\nfix clamp\n"}]
    assert prompt == tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    capsys.readouterr()
    assert main(["eval", str(once), "--json"]) == 0
    after = RunDirectory(once).load_summary()["after"]
    assert json.loads(capsys.readouterr().out)["mean_tokens"] == after["mean_tokens"]
    assert after["mean_tokens"] > min(
        len(tok.encode_prompt(f"fix {task.name}\n"))  # type: ignore[attr-defined]
        for task in make_tasks("heldout")
    )

    assert main(["train", "--run-dir", str(twice), *flags, "--steps", "1"]) == 0
    for name, flag in (
        ("instructions", ["--instructions", "Go."]),
        ("chat-template", ["--no-chat-template"]),
    ):
        assert main(["train", "--resume", str(twice), *flag]) == 2
        assert f"started with another --{name}, which cannot change" in capsys.readouterr().err
    assert main(["train", "--resume", str(twice), "--steps", "2"]) == 0
    assert records(twice) == records(once)
    assert any(record["updated"] for record in records(once))


def test_the_instructions_are_the_gym_s_unless_a_run_says_otherwise(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert RunConfig().instructions is None
    assert RunConfig(model="m").instructions == INSTRUCTIONS
    assert RunConfig(model="m", instructions="").instructions == ""
    flags = ["--run-dir", str(tmp_path / "run"), *SMALL[:-2]]
    assert main(["train", "--model", str(folder), *flags]) == 2
    said = capsys.readouterr().err
    assert "but an episode holds 48" in said
    assert "raise max_tokens, or shorten the prompt and the instructions before it" in said
    assert main(["train", *flags, "--instructions", "Fix it."]) == 2
    assert "instructions must be left out without --model" in capsys.readouterr().err


def on_two_ranks(args: list[str]) -> list[int]:
    """The command in two processes, as torchrun starts them; their exit statuses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children: list[int] = []
    for rank in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12: the parent has threads
            child = os.fork()
        if child == 0:
            os.environ |= {"TORCHELASTIC_RUN_ID": "test", "RANK": str(rank), "LOCAL_RANK": str(rank)}
            os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            status = 99
            try:
                status = main(args)
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def test_two_ranks_learn_what_one_learns(folder: Path, finished: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    args = ["train", "--model", str(folder), "--run-dir", str(path), *SMALL]
    assert on_two_ranks([*args, "--steps", "1"]) == [0, 0]
    assert {p.suffix for p in (path / "checkpoints").iterdir()} == {".shards"}
    load_policy(RunDirectory(path), step=1)
    assert on_two_ranks(["train", "--resume", str(path), "--steps", "2"]) == [0, 0]
    for got, want in zip(records(path), records(finished), strict=True):
        known = {name: value for name, value in want.items() if value is not None}
        assert {name: got[name] for name in known} == pytest.approx(known, rel=2e-4, abs=1e-6)
        assert {name for name in want if got[name] is None} == want.keys() - known.keys()
    alone = weights(finished)
    for name, value in weights(path).items():
        torch.testing.assert_close(value, alone[name], rtol=1e-3, atol=1e-4)


def test_bfloat16_recomputation_and_a_reference_on_two_ranks(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    flags = ["--compute-dtype", "bfloat16", "--checkpoint-activations", "--kl-coef", "0.1"]
    args = ["train", "--model", str(folder), "--run-dir", str(path), *SMALL, *flags]
    assert on_two_ranks(args) == [0, 0]
    assert {value.dtype for value in weights(path).values()} == {torch.float32}
    assert any(record["updated"] for record in records(path))


def test_the_tokenizer_adds_nothing_and_text_cannot_forge_its_end(folder: Path) -> None:
    tok = load_tokenizer(RunConfig(model=str(folder)))
    assert (tok.pad_id, tok.end_id) == (0, 1)
    for text in ("edit 2     return x\n", "fix clamp\n", "", "a <end> b"):
        ids = tok.encode(text)
        assert tok.decode([*ids, tok.end_id]) == text
        assert tok.end_id not in ids


def test_what_cannot_be_trained_is_named_in_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(model: Path) -> str:
        assert main(["train", "--model", str(model), "--run-dir", str(tmp_path / "run"), *SMALL]) == 2
        assert not (tmp_path / "run").exists()
        last = capsys.readouterr().err.splitlines()[-1]  # after transformers' bar, if it got so far
        assert last.startswith("agentrl train: ")
        return last

    assert "there is no such folder" in said(tmp_path / "absent")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"{empty} holds no tokenizer that loads" in said(empty)
    endless = tmp_path / "endless"
    shutil.copytree(folder, endless)
    save_tokenizer(endless, pad_token="<pad>")
    assert "has no eos token" in said(endless)
    weightless = tmp_path / "weightless"
    shutil.copytree(folder, weightless)
    (weightless / "model.safetensors").unlink()
    assert "holds no causal language model that loads" in said(weightless)
    many = tmp_path / "many"
    shutil.copytree(folder, many)
    more = transformers.AutoTokenizer.from_pretrained(folder)
    more.add_tokens(["<more>"])
    more.save_pretrained(many)
    assert "resize its embeddings" in said(many)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert said(folder).endswith("needs transformers: pip install 'agentrl[hf]'")
