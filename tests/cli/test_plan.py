"""`agentrl plan`: its numbers, its three outputs, one line for input that cannot be, and a light start."""

import json
import math
import os
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
from agentrl.cli.plan_episodes import episodes_of
from agentrl.data.trajectory import Trajectory
from agentrl.plan.engine import EngineConstants
from agentrl.plan.hours import Plan
from agentrl.plan.inputs import flag_of, ranges_of

ISSUE = ["plan", "--model", "Qwen/Qwen3-8B", "--gpu", "H200", "--gpus", "8", "--episodes", "512",
         "--tokens", "24000", "--sampled", "6000", "--context", "16384"]  # fmt: skip


def printed(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert main([*ISSUE, *more]) == 0
    return capsys.readouterr().out


def test_both_estimates_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys)
    rows = {line.split("  ")[0]: line.split()[-3:] for line in text.split("\n\n")[1].splitlines()}
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
    assert moves.count(", half, or ") == moves.count(", double)") == 2


def test_every_assumption_is_shown_with_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--mfu", "0.3", "--no-prefix-cache")
    rows = re.findall(r"^  (--[\w-]+) (\S+) +(\w+) ", text, flags=re.M)
    origins = {flag: origin for flag, _, origin in rows}
    run = ["--model", "--parameters", "--gpu", "--gpus", "--schedule"]
    parts = (plan_command.Workload, plan_command.Generation, plan_command.Training)
    assert list(origins)[:5] == run
    assert len(origins) == 5 + sum(len(fields(part)) for part in parts) + len(ranges_of(EngineConstants))
    assert {flag for flag, origin in origins.items() if origin == "given"} == {
        "--model", "--gpu", "--gpus", "--episodes", "--tokens", "--sampled", "--context", "--mfu",
        "--prefix-cache",
    }  # fmt: skip
    assert (origins["--tool-seconds"], origins["--parameters"]) == ("assumed", "model")
    assert origins["--bandwidth-share"] == "engine"
    assert "989 TFLOP/s of dense bfloat16, 4,800 GB/s, 150.8 GB (NVIDIA H200" in text


def test_the_assumptions_can_be_typed_again(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--mfu", "0.3", "--no-prefix-cache")
    again: list[str] = []
    for flag, value in re.findall(r"^  (--[\w-]+) (\S+) +\w+ ", text, flags=re.M):
        again += {"yes": [flag], "no": [flag.replace("--", "--no-", 1)]}.get(value, [flag, value])
    assert main(["plan", *again]) == 0
    table = text.split("\n\n")[1]
    assert capsys.readouterr().out.split("\n\n")[1] == table


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(printed(capsys, "--json"))
    assert round(answer["first_order"]["run_gpu_hours"]) == 487
    assert answer["kv_bytes_per_token"] == 147_456
    synchronous, overlapped = answer["calibrated"]
    assert synchronous["schedule"] == "synchronous"
    assert overlapped["generation_gpus"] + overlapped["train_gpus"] == 8
    assert synchronous["rollout"]["sequences_in_flight"] == 47
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
        (["--tokens", "-5"], "--tokens must be at least 1, got -5"),
        (["--sampled", "30000"], "--sampled (30000) cannot be more than --tokens (24000)"),
        (["--gpu", "H20O"], "did you mean 'H200'?"),
        (["--model", "Qwen3-80B"], "did you mean 'Qwen/Qwen3-8B'?"),
        (["--model", "Llama-3.1-70B"], "meta-llama/Llama-3.1-70B does not fit"),
        (["--model", "DeepSeek-V3"], "deepseek-ai/DeepSeek-V3 does not fit"),
        (["--microbatch-tokens", "900000"], "lower --microbatch-tokens to 220160"),
        (["--gpuz", "3"], "no option --gpuz; did you mean --gpu?"),
        (["--engine-file", "nowhere.toml"], "nowhere.toml"),
        (["--gpu", "H99"], "did you mean 'H200'? known are A100, H100, "),
        (["--model", "./nope.json"], "no such file: ./nope.json"),
        (["--model", "docs"], "the folder docs holds no config.json"),
        (["--episodes", "1e3"], "--episodes takes a whole number, got '1e3'; write 1000"),
        (["--mfu=much"], "--mfu takes a number, got 'much'"),
        (["--batch"], "--batch needs a value"),
        (["--gpu", "--batch", "8"], "--gpu needs a value"),
        (["--no-mfu"], "no option --no-mfu; did you mean --mfu?"),
        (["-x"], "no option -x; --help lists them"),
        (["calibrate"], "'calibrate' belongs to no option"),
        (["--schedule", "both"], "--schedule must be one of synchronous, overlapped, got 'both'"),
        (["--kv-bits", "7"], "--kv-bits must be one of 16, 8, 4, got '7'"),
        (["--context", "1000000"], "a sequence of 1,000,000 tokens (--context) does not fit"),
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
    csv.write_text("\n".join([head, *(["128,128,1,145"] * 2), "128,128,8,1000"]))
    assert main(["plan", "calibrate", str(csv)]) == 0
    assert "3 rows of 2 settings; repeats are averaged" in capsys.readouterr().out
    for args, says in [
        (["--rows", "0"], "--rows must be at least 1, got 0"),
        (["--cache-tokens", "0"], "--cache-tokens must be at least 1, got 0"),
        (["--cache-tokens", "1000000"], "1,000,000 tokens of cache cannot be: "),
        (["other.csv"], "'other.csv' belongs to no option"),
        (["--weight-bits", "7"], "--weight-bits must be one of 16, 8, 4, got '7'"),
    ]:
        assert main(["plan", "calibrate", str(csv), *args]) == 2
        err = capsys.readouterr().err
        assert says in err
        assert err.count("\n") == 1
    assert main(["plan", "calibrate", "--rows", "5"]) == 2
    assert capsys.readouterr().err == "agentrl plan: name a CSV file of measurements\n"


PARTS = (plan_command.Workload, plan_command.Generation, plan_command.Training, EngineConstants, Plan)
FLAGS = [flag_of(name) for part in PARTS for name in ranges_of(part)]


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e300", "1e-300", "9" * 400])
@pytest.mark.parametrize("flag", [*FLAGS, "--parameters", "--weight-bits", "--kv-bits"])
def test_every_number_gives_a_result_or_one_line_that_names_its_flag(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["plan", "--json", flag, value])
    out, err = capsys.readouterr()
    if status == 0:
        answer = json.loads(out)
        for estimate in (answer["first_order"], *answer["calibrated"]):
            assert 0 < estimate["run_gpu_hours"] < math.inf
        return
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"agentrl plan: {flag} ")
    assert len(err) < 150


def test_small_runs_keep_digits_that_count(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--episodes", "1", "--steps", "1", "--tokens", "300", "--sampled", "100", "--prompt", "100"]
    assert main(["plan", "--gpus", "2", *small]) == 0
    text = capsys.readouterr().out
    rows = {line.split("  ")[0]: line.split()[-3:] for line in text.splitlines() if line}
    assert all(len(figure.replace(".", "").strip("0")) >= 2 for figure in rows["sum"])
    assert " 0 GPU-hours" not in text
    assert "0.00000" not in rows["GPU-hours, 1 step"]
    assert json.loads(printed(capsys, "--json", *small))["first_order"]["run_gpu_hours"] > 0


def note(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["plan", "--json", *args]) == 0
    return "\n".join(json.loads(capsys.readouterr().out)["notes"])


def test_notes_name_what_is_idle_and_its_cause(capsys: pytest.CaptureFixture[str]) -> None:
    three = note(capsys, "--tensor-parallel", "3")
    assert "--tensor-parallel 3 does not divide the 32 attention heads" in three
    assert "(--tensor-parallel 3) use 6 of 8 GPUs; the other 2 generate nothing" in three
    assert "8 engines have 5 episodes a step to play, so 3 of them stay idle" in note(
        capsys, "--episodes", "5"
    )
    plain = note(capsys)
    assert "attention heads" not in plain
    assert "idle" not in plain
    both = re.search(r"about (\d+) do.* decodes (\d+)\.", plain)
    assert both is not None
    assert both[1] == both[2] == "49"  # 49.6 fit: one rounding for both
    assert "about 49 do" in (few := note(capsys, "--episodes", "80"))
    assert "decodes 10, all that an engine has to play." in few
    assert "An engine has only 10 episodes to play" in note(capsys, "--episodes", "80", "--batch", "16")
    long = note(capsys, "--length-cv", "2")
    assert "--length-cv 2" in long
    assert "--context" not in long


def save(path: Path, *trajs: tuple[list[int], float, str]) -> Path:
    agentrl.save_trajectories(path, [
        Trajectory(torch.zeros(len(mask) + 1, dtype=torch.int64), torch.tensor(mask).float(),
                   torch.zeros(len(mask)), reward, group=group)
        for mask, reward, group in trajs
    ])  # fmt: skip
    return path


def assumed(capsys: pytest.CaptureFixture[str], path: Path, *more: str) -> dict[str, tuple[float, str]]:
    assert main(["plan", "--json", "--trajectories", str(path), *more]) == 0
    answer = json.loads(capsys.readouterr().out)
    return {a["flag"]: (a["value"], a["origin"]) for a in answer["assumptions"]}


def test_episodes_from_trajectories(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = save(
        tmp_path / "run.jsonl",
        ([0, 0, 1, 1, 0, 1], 1.0, "a"),  # prompt 3, two turns
        ([0, 1, 1, 1, 0, 0, 0, 0, 1, 0], 0.0, "a"),  # prompt 2, two turns
        ([1, 1], 1.0, "b"),  # prompt 1, one turn; alone in its group
    )
    values = assumed(capsys, path, "--turns", "7")
    assert values["--tokens"] == (7.0, "measured")
    assert values["--sampled"] == (3.0, "measured")
    assert values["--prompt"] == (2.0, "measured")
    assert values["--turns"] == (7, "given")
    assert values["--zero-advantage"] == (0.0, "measured")  # a group of one says nothing
    # after the prompt 4, 9 and 2 tokens: 0.8, 1.8 and 0.4 of their mean
    found = episodes_of(path, plan_command.Workload(), set())
    assert found.lengths is not None
    assert max(found.lengths.relative) / min(found.lengths.relative) == pytest.approx(4.5)
    assert found.workload.length_cv == pytest.approx((found.lengths.squared_mean - 1) ** 0.5)
    assert episodes_of(path, found.workload, {"--length-cv"}).lengths is None


def test_the_share_without_signal_is_that_of_groups_that_can_have_some(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mask = [0, 1, 1]
    half = save(tmp_path / "half.jsonl", *[(mask, r, g) for g, rs in
                {"a": (1, 1), "b": (0, 1), "c": (1,)}.items() for r in rs])  # fmt: skip
    assert assumed(capsys, half)["--zero-advantage"] == (0.5, "measured")
    alone = save(tmp_path / "alone.jsonl", (mask, 1.0, "a"), (mask, 1.0, "b"))
    assert assumed(capsys, alone)["--zero-advantage"] == (0.0, "assumed")
    assert "the share without signal stays assumed" in note(capsys, "--trajectories", str(alone))
    silent = save(tmp_path / "silent.jsonl", (mask, 1.0, "a"), (mask, 1.0, "a"))
    assert main(["plan", "--trajectories", str(silent)]) == 2
    assert f"{silent}: the rewards of each of its groups are all equal" in capsys.readouterr().err
    assert assumed(capsys, silent, "--zero-advantage", "0.4")["--zero-advantage"] == (0.4, "given")


def test_trajectories_that_cannot_be_used_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = save(tmp_path / "run.jsonl", ([0, 0, 0], 1.0, "a"))
    assert main(["plan", "--trajectories", str(path)]) == 2
    assert f"{path}: its 1 trajectories have 0 sampled tokens on average" in capsys.readouterr().err
    save(path, ([0, 1, 1], 1.0, "a"))
    path.write_text(path.read_text() + "{\n")
    assert main(["plan", "--trajectories", str(path)]) == 2
    assert "--skip-bad" in capsys.readouterr().err
    assert "Skipped 1 bad records" in note(capsys, "--trajectories", str(path), "--skip-bad")


def test_trajectories_of_another_program(capsys: pytest.CaptureFixture[str], shared_data: Path) -> None:
    values = assumed(capsys, shared_data / "tau_airline_gpt4o.json")
    assert values["--zero-advantage"] == (0.48, "measured")  # 24 of the 50 groups of 4
    assert values["--tokens"][0] == pytest.approx(835_444 / 200, rel=0.05)


def test_the_documentation_shows_real_output(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    blocks = re.findall(r"```console\n\$ agentrl ([^\n]+)\n(.*?)```", text, flags=re.S)
    assert len(blocks) == 6
    for command, shown in blocks:
        main(shlex.split(command))
        out, err = capsys.readouterr()
        begun = shown.removesuffix("...\n").rstrip()
        assert (out + err).startswith(begun), command


def test_a_terminal_that_lacks_a_letter_gets_the_answer(tmp_path: Path) -> None:
    # the locale C without coercion: arguments hold surrogates, the output takes ASCII only
    folder = tmp_path / "mod\u00e8le"
    folder.mkdir()
    shape = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 128, "vocab_size": 1000}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))
    for more in (
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ):
        code = "import sys\nfrom agentrl.cli.main import main\nsys.exit(main(sys.argv[1:]))"
        command = [
            sys.executable,
            "-c",
            code,
            "plan",
            "--model",
            str(folder),
            "--html",
            str(tmp_path / "p.html"),
        ]
        done = subprocess.run(command, capture_output=True, check=False, env={**os.environ, **more})
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"config.json on 8 x H200" in done.stdout
        assert "config.json on 8 x H200" in (tmp_path / "p.html").read_text(encoding="utf-8")


def test_a_plan_loads_nothing_heavy() -> None:
    # typeguard brings unittest, asyncio and ssl with it
    code = (
        "import sys, contextlib, io\nfrom agentrl.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()): status = main(['plan'])\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'jinja2', 'transformers', 'rich', 'typeguard'}\n"
        "sys.exit(status or sorted(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
