"""`agentrl plan`: its numbers, its three outputs, one line for input that cannot be, and a light start."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import agentrl
from agentrl.cli import plan as plan_command
from agentrl.cli.main import main
from agentrl.data.trajectory import Trajectory

ISSUE = ["plan", "--model", "Qwen/Qwen3-8B", "--gpu", "H200", "--gpus", "8", "--episodes", "512",
         "--tokens", "24000", "--sampled", "6000", "--context", "16384"]  # fmt: skip


def printed(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert main([*ISSUE, *more]) == 0
    return capsys.readouterr().out


def test_both_estimates_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys)
    rows = {line.split("  ")[0]: line.split()[-3:] for line in text.splitlines() if line}
    assert rows["train"][0] == "0.42"
    assert rows["decode"][0] == "0.95"
    assert rows["sum"][0] == "1.62"
    assert rows["GPU-hours, 300 steps"][0] == "487"
    assert rows["share of decode"][0] == "59%"
    assert "does not fit the cache of one H200: about 47 do" in text
    assert "1,796" in text
    assert "8,041" in text
    assert "Float32 logits take 0.61 MB a token, 19.9 GB" in text
    saves = text.split("What would save most")[1].split("\n\n")[0]
    assert saves.count("GPU-hours, ") == 3
    moves = text.split("What moves the answer")[1].split("\n\n")[0]
    assert moves.count(" or ") == 4


def test_every_assumption_is_shown_with_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--mfu", "0.3", "--no-prefix-cache")
    shown = dict(re.findall(r"^  (--[\w-]+) \S+ +(\w+) ", text, flags=re.M))
    parts = (plan_command.Workload, plan_command.Generation, plan_command.Training)
    assert len(shown) == sum(len(fields(part)) for part in parts) + len(plan_command._CONSTANTS)
    assert {flag for flag, origin in shown.items() if origin == "given"} == {
        "--episodes", "--tokens", "--sampled", "--context", "--mfu", "--prefix-cache",
    }  # fmt: skip
    assert shown["--tool-seconds"] == "assumed"
    assert shown["--bandwidth-share"] == "engine"
    plan_command._check_flags(list(shown), (plan_command.PlanOptions, *parts))  # each can be typed


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(printed(capsys, "--json"))
    assert round(answer["first_order"]["run_gpu_hours"]) == 487
    assert answer["kv_bytes_per_token"] == 147_456
    synchronous, overlapped = answer["calibrated"]
    assert synchronous["schedule"] == "synchronous"
    assert overlapped["generation_gpus"] + overlapped["train_gpus"] == 8
    assert synchronous["rollout"]["batch"] == 47
    assert len(answer["memory_variants"]) == 8
    assert (len(answer["savings"]), len(answer["uncertainties"])) == (3, 2)


def test_html(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    assert f"wrote {path}" in printed(capsys, "--html", str(path))
    page = path.read_text()
    assert "<script" not in page
    assert page.count("<figure") == 2
    assert "487" in page
    assert "logits recomputed" in page


def test_the_64k_redo_and_the_smaller_cache(capsys: pytest.CaptureFixture[str]) -> None:
    redo = json.loads(printed(capsys, "--json", "--context", "65536"))
    assert "--context (65,536) is more than an episode's 24,000 tokens." in redo["notes"]
    assert round(redo["first_order"]["step_gpu_hours"]["decode"], 2) == 3.53
    small = json.loads(printed(capsys, "--json", "--kv-shrink", "4"))
    assert small["kv_bytes_per_token"] == 36_864
    assert round(small["first_order"]["step_gpu_hours"]["decode"], 2) == 0.31


def test_the_answer_of_the_other_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--schedule", "overlapped")
    assert "Memory of each of 4 training GPUs" in text


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--gpus", "0"], "--gpus must be at least 1, got 0"),
        (["--tokens", "-5"], "--tokens must be positive, got -5"),
        (["--sampled", "30000"], "--sampled (30000) cannot be more than --tokens (24000)"),
        (["--gpu", "H20O"], "did you mean 'H200'?"),
        (["--model", "Qwen3-80B"], "did you mean 'Qwen/Qwen3-8B'?"),
        (["--model", "Llama-3.1-70B"], "meta-llama/Llama-3.1-70B does not fit"),
        (["--model", "DeepSeek-V3"], "deepseek-ai/DeepSeek-V3 does not fit"),
        (["--microbatch-tokens", "900000"], "lower --microbatch-tokens to 220160"),
        (["--gpuz", "3"], "no option --gpuz; did you mean --gpu?"),
        (["--engine-file", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_impossible_input_gives_one_line(
    args: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ISSUE, *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("agentrl plan: ")
    assert err.count("\n") == 1
    assert says in err


def test_calibrate_and_use_its_constants(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, shared_data: Path
) -> None:
    points = json.loads((shared_data / "decode_qwen3_8b_h100.json").read_text())["points"]
    csv, engine = tmp_path / "m.csv", tmp_path / "engine.toml"
    head = "input_tokens,output_tokens,concurrency,output_tokens_per_second"
    csv.write_text("\n".join([head, *(",".join(map(str, point[:4])) for point in points)]))
    command = [
        "plan",
        "calibrate",
        str(csv),
        "--cache-tokens",
        "377024",
        "--name",
        "mine",
        "--output",
        str(engine),
    ]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "5 rows fitted, 36 left out" in text
    assert "mean 5.4%, largest 22.3%" in text
    answer = json.loads(printed(capsys, "--json", "--engine-file", str(engine), "--step-seconds", "0.002"))
    assert answer["engine"] == "mine"
    assert {a["flag"]: a["value"] for a in answer["assumptions"]}["--step-seconds"] == 0.002
    few = points[::9]
    csv.write_text("\n".join([head, *(",".join(map(str, point[:4])) for point in few)]))
    assert main(["plan", "calibrate", str(csv)]) == 0
    assert "error on each row, fitted on the others" in capsys.readouterr().out
    csv.write_text("\n".join([head, "128,128,1,145"]))
    assert main(["plan", "calibrate", str(csv)]) == 0
    assert "nothing tests the fit" in capsys.readouterr().err


def test_episodes_from_trajectories(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def trajectory(mask: list[int], reward: float, group: str) -> Trajectory:
        zeros = torch.zeros(len(mask))
        ids = torch.zeros(len(mask) + 1, dtype=torch.int64)
        return Trajectory(ids, torch.tensor(mask).float(), zeros, reward, group=group)

    def load(path: Path) -> list[Trajectory]:
        return [
            trajectory([0, 0, 1, 1, 0, 1], 1.0, "a"),  # prompt 3, two turns
            trajectory([0, 1, 1, 1, 0, 0, 0, 0, 1, 0], 0.0, "a"),  # prompt 2, two turns
            trajectory([1, 1], 1.0, "b"),  # prompt 1, one turn; alone in its group
        ]

    monkeypatch.setattr(agentrl, "load_trajectories", load, raising=False)
    assert main(["plan", "--json", "--trajectories", "run.jsonl", "--turns", "7"]) == 0
    answer = json.loads(capsys.readouterr().out)
    values = {a["flag"]: (a["value"], a["origin"]) for a in answer["assumptions"]}
    assert values["--tokens"] == (7.0, "measured")
    assert values["--sampled"] == (3.0, "measured")
    assert values["--prompt"] == (2.0, "measured")
    assert values["--turns"] == (7, "given")
    assert values["--zero-advantage"][0] == pytest.approx(1 / 3)
    # after the prompt 4, 9 and 2 tokens: 0.8, 1.8 and 0.4 of their mean
    workload, lengths = plan_command.episodes_of(Path("run.jsonl"), plan_command.Workload(), set())
    assert lengths is not None
    assert max(lengths.relative) / min(lengths.relative) == pytest.approx(4.5)
    assert workload.length_cv == pytest.approx((lengths.squared_mean - 1) ** 0.5)
    assert plan_command.episodes_of(Path("run.jsonl"), workload, {"--length-cv"})[1] is None


def test_the_documentation_shows_real_output(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    blocks = re.findall(r"```console\n\$ agentrl ([^\n]+)\n(.*?)```", text, flags=re.S)
    assert len(blocks) == 5
    for command, shown in blocks:
        main(shlex.split(command))
        out, err = capsys.readouterr()
        begun = shown.removesuffix("...\n").rstrip()
        assert (out + err).startswith(begun), command


def test_a_plan_loads_nothing_heavy() -> None:
    code = (
        "import sys, contextlib, io\nfrom agentrl.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()): status = main(['plan'])\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'jinja2', 'transformers', 'rich'} & set(sys.modules)\n"
        "sys.exit(status or sorted(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
