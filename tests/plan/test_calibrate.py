"""Calibration: planted constants come back, and five published rows foretell the other 36."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from agentrl.plan.calibrate import (
    Measurement,
    check_requests_fit,
    choose_rows,
    constants_to_toml,
    fit,
    leave_one_out,
    merge_repeats,
    overhead_bytes,
    read_measurements,
)
from agentrl.plan.configs import find_model
from agentrl.plan.engine import VLLM_0_30_0, Engine, constants_from_toml
from agentrl.plan.gpus import find_gpu
from agentrl.plan.roofline import decode_tokens_per_second

ENGINE = Engine(shape=find_model("Qwen/Qwen3-8B"), gpu=find_gpu("H100"), constants=VLLM_0_30_0)
SETTINGS = [(i, o, c) for i, o in [(128, 1024), (2048, 2048), (8192, 512)] for c in (1, 8, 32, 128)]


@pytest.fixture
def published(shared_data: Path) -> list[Measurement]:
    points = json.loads((shared_data / "decode_qwen3_8b_h100.json").read_text())["points"]
    return [Measurement(int(i), int(o), int(c), float(rate)) for i, o, c, rate, _ in points]


def test_five_published_rows_foretell_the_others(published: list[Measurement]) -> None:
    assert len(published) == 41
    result = fit(ENGINE, published, choose_rows(ENGINE, published))
    assert (len(result.fitted), len(result.held_out)) == (5, 36)
    assert result.mean_error <= 0.10
    assert result.mean_error == pytest.approx(0.0537, abs=5e-4)  # what docs/plan.md says
    assert result.max_error == pytest.approx(0.2226, abs=5e-4)


@pytest.mark.parametrize(
    ("setting", "rate"),
    [((2048, 2048, 64), 3463), ((128, 1024, 256), 13567), ((8192, 512, 32), 951), ((1024, 128, 128), 3349)],
)
def test_rows_that_anyone_can_look_up(
    published: list[Measurement], setting: tuple[int, int, int], rate: int
) -> None:
    row = next(row for row in published if row.setting == setting)
    assert round(row.output_tokens_per_second) == rate
    assert ENGINE.serving_tokens_per_second(*setting) == pytest.approx(rate, rel=0.10)  # none was fitted


def test_the_shipped_constants_are_that_fit(published: list[Measurement], shared_data: Path) -> None:
    result = fit(ENGINE, published, choose_rows(ENGINE, published))
    for name, value in asdict(VLLM_0_30_0).items():
        if name != "name":
            assert value == pytest.approx(getattr(result.constants, name), rel=1e-3), name
    measured = json.loads((shared_data / "decode_qwen3_8b_h100.json").read_text())
    assert measured["engine"] in VLLM_0_30_0.name
    assert overhead_bytes(ENGINE, measured["kv_cache_tokens"]) == pytest.approx(
        VLLM_0_30_0.overhead_bytes, rel=1e-3
    )


def test_the_first_order_fails_the_same_bar(published: list[Measurement]) -> None:
    errors = [
        decode_tokens_per_second(8.2e9, 147_456, 3.35e12, r.concurrency, r.input_tokens + r.output_tokens / 2)
        / r.output_tokens_per_second - 1 for r in published
    ]  # fmt: skip
    assert np.mean(np.abs(errors)) > 0.5


def test_the_choice_of_rows_does_not_look_at_the_rates(published: list[Measurement]) -> None:
    other = [replace(row, output_tokens_per_second=1.0 + i) for i, row in enumerate(published)]
    assert choose_rows(ENGINE, published) == choose_rows(ENGINE, other)
    assert len(set(choose_rows(ENGINE, published, 41))) == 41
    with pytest.raises(ValueError, match="cannot choose 42 of 41"):
        choose_rows(ENGINE, published, 42)


def test_planted_constants_come_back() -> None:
    planted = replace(
        VLLM_0_30_0, step_seconds=4e-3, sequence_seconds=3e-5, bandwidth_share=0.7, compute_share=0.4
    )
    true = replace(ENGINE, constants=planted)
    rows = [Measurement(i, o, c, true.serving_tokens_per_second(i, o, c)) for i, o, c in SETTINGS]
    result = fit(ENGINE, rows, choose_rows(ENGINE, rows, 6))
    assert result.mean_error < 0.01
    once = fit(ENGINE, rows, range(len(rows)))
    often = fit(ENGINE, 20 * rows, range(20 * len(rows)))
    for name in ("step_seconds", "sequence_seconds", "bandwidth_share", "compute_share"):
        # the prior pulls a little; against twenty times the rows it pulls a twentieth
        pull = [abs(getattr(c.constants, name) / getattr(planted, name) - 1) for c in (once, often)]
        assert pull[1] < 0.02, name
        assert pull[1] < pull[0] / 10, name
    assert once.held_out == ()
    assert np.isnan(once.mean_error)
    assert np.isnan(once.max_error)


def test_csv_rows_and_their_errors(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    head = "concurrency,input_tokens,output_tokens,output_tokens_per_second,note\n"
    path.write_text(head + "64,2048,1024,3463.5,x\n")
    assert read_measurements(path) == [Measurement(2048, 1024, 64, 3463.5)]
    path.write_text(
        "\n, ,\n" + head + "\n 64, 2048 ,1024,3463.5\n,,\n", encoding="utf-8-sig"
    )  # as spreadsheets write it
    assert read_measurements(path) == [Measurement(2048, 1024, 64, 3463.5)]
    for text, says in [
        ("a,b\n1,2\n", "lacks the columns"),
        (head, "holds no rows"),
        ("\n \n", "lacks the columns"),
        (
            head.replace("note", "concurrency") + "64,2048,1024,1,8\n",
            r"has the columns \['concurrency'\] twice",
        ),
        (head + "64," + "x" * 999 + ",1024,1\n", r"input_tokens must be a number, got 'x{24}'\.\.\.$"),
        (head + "64,2048,many,1,x\n", "m.csv, line 2: output_tokens must be a number, got 'many'"),
        (head + "64,2048,1024\n", "m.csv, line 2: output_tokens_per_second must be a number, got ''"),
        (head + "64,2048,10.5,1,x\n", "line 2: output_tokens must be a whole number, got '10.5'"),
        (head + "64,2048,1024,1,x\n0,2048,1024,1,x\n", "line 3: concurrency must be at least 1, got 0"),
        (head + "64,2048,1024,inf,x\n", "line 2: output_tokens_per_second must be at most"),
        (head + "64,1e300,1024,1,x\n", "line 2: input_tokens must be at most"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=says):
            read_measurements(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"m\.csv is not a UTF-8 text file"):
        read_measurements(path)


def test_a_repeat_of_a_fitted_row_tests_nothing(published: list[Measurement]) -> None:
    again = [*published, *(replace(row, output_tokens_per_second=1.0) for row in published[:3])]
    chosen = [0, 1, 2, 9, 20]
    assert fit(ENGINE, again, chosen).held_out == fit(ENGINE, published, chosen).held_out
    merged = merge_repeats([published[0], replace(published[0], output_tokens_per_second=1.0), published[1]])
    assert len(merged) == 2
    assert merged[0].output_tokens_per_second == pytest.approx(published[0].output_tokens_per_second ** 0.5)
    with pytest.raises(ValueError, match="merge_repeats"):
        leave_one_out(ENGINE, again)


def test_a_cache_that_cannot_be() -> None:
    most = int(0.9 * ENGINE.gpu.memory_bytes - ENGINE.shape.weight_bytes(2)) // 147_456
    assert 0 < overhead_bytes(ENGINE, most) < 147_456
    with pytest.raises(ValueError, match=f"hold at most {most:,}; check --cache-tokens"):
        overhead_bytes(ENGINE, most + 1)


def test_absurd_rates_end_at_constants_that_can_be(published: list[Measurement]) -> None:
    for rate in (1e-6, 1e12):
        absurd = [replace(row, output_tokens_per_second=rate) for row in published[:5]]
        assert fit(ENGINE, absurd, range(5)).constants.bandwidth_share <= 2
        assert fit(ENGINE, absurd, range(5)).at_the_edge
    assert not fit(ENGINE, published, range(5)).at_the_edge


def test_a_request_that_no_cache_holds_was_not_measured(published: list[Measurement]) -> None:
    check_requests_fit(ENGINE, published)
    with pytest.raises(
        ValueError, match="a request of 2,000,000 \\+ 1,000 tokens cannot be: the cache of 1 x"
    ):
        check_requests_fit(ENGINE, [*published, Measurement(2_000_000, 1_000, 4, 10.0)])


def test_constants_survive_toml() -> None:
    assert constants_from_toml(constants_to_toml(VLLM_0_30_0)) == VLLM_0_30_0
    with pytest.raises(ValueError, match="at least one row"):
        fit(ENGINE, [Measurement(1, 1, 1, 1.0)], [])


def test_leaving_each_row_out_once(published: list[Measurement]) -> None:
    five = [published[i] for i in choose_rows(ENGINE, published)]
    errors = leave_one_out(ENGINE, five)
    assert errors[2] == fit(ENGINE, five, [0, 1, 3, 4]).held_out_errors[0]
    assert len(errors) == 5
    with pytest.raises(ValueError, match="two rows at least"):
        leave_one_out(ENGINE, five[:1])
