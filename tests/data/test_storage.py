"""Trajectories survive a round trip through every format, and every kind of damage is one clear line."""

import gzip
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.records import BadRecord, RecordError, iter_raw_records, read_each
from agentrl.data.storage import iter_trajectories, load_trajectories, save_trajectories
from agentrl.data.trajectory import Trajectory

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    n = draw(st.integers(1, 9))
    ids = draw(st.lists(st.integers(0, 2**63 - 1), min_size=n, max_size=n))
    mask = torch.tensor(
        draw(st.lists(st.integers(0, 1), min_size=n - 1, max_size=n - 1)), dtype=torch.float32
    )
    logp = torch.full((n - 1,), math.nan)
    if draw(st.booleans()):
        finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
        logp = torch.tensor(draw(st.lists(finite, min_size=n - 1, max_size=n - 1)), dtype=torch.float32)
        logp = torch.where(mask == 1, logp, 0.0)
    info = draw(st.dictionaries(st.text(), json_values, max_size=3))
    reward = draw(st.floats(allow_nan=False, allow_infinity=False))
    return Trajectory(torch.tensor(ids), mask, logp, reward, info, draw(st.text()), draw(st.text()))


def assert_same(a: Trajectory, b: Trajectory) -> None:
    assert torch.equal(a.ids, b.ids)
    assert torch.equal(a.action_mask, b.action_mask)
    assert torch.equal(a.sample_logp.view(torch.int32), b.sample_logp.view(torch.int32))  # bits: NaN and -0.0
    assert (a.reward, a.group, a.episode) == (b.reward, b.group, b.episode)
    assert json.dumps(a.info) == json.dumps(b.info)


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(max_examples=40, deadline=None)
@given(trajs=st.lists(trajectories(), min_size=1, max_size=3))
def test_round_trip_is_lossless(suffix: str, trajs: list[Trajectory]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"run{suffix}"
        assert save_trajectories(path, iter(trajs)) == len(trajs)
        back = load_trajectories(path)
    assert len(back) == len(trajs)
    for a, b in zip(trajs, back, strict=True):
        assert_same(a, b)


def one(**changed: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "ids": torch.tensor([5, 7, 9]),
        "action_mask": torch.tensor([0.0, 1.0]),
        "sample_logp": torch.tensor([0.0, -0.5]),
        "reward": 1.0,
        "info": {"task": "abs"},
        "episode": "e",
    }
    return Trajectory(**{**fields, **changed})


def record(**changed: Any) -> dict[str, Any]:
    fields = {
        "agentrl": 1,
        "ids": [5, 7, 9],
        "action_mask": [0, 1],
        "sample_logp": [0.0, -0.5],
        "reward": 1.0,
    }
    return {**fields, "group": "g", "episode": "e", "info": {}, **changed}


def test_content_decides_not_the_name(tmp_path: Path) -> None:
    for suffix in SUFFIXES:
        path = tmp_path / f"run{suffix}"
        save_trajectories(path, [one()])
        assert_same(load_trajectories(path.rename(tmp_path / "anything.bin"))[0], one())


def test_the_same_trajectories_give_the_same_bytes(tmp_path: Path) -> None:
    for suffix in SUFFIXES:
        paths = [tmp_path / f"{name}{suffix}" for name in "ab"]
        for path in paths:
            save_trajectories(path, [one()])
        assert paths[0].read_bytes() == paths[1].read_bytes()


def test_files_stream(tmp_path: Path) -> None:
    """Reading hands out the first trajectory before it has looked at the last."""
    rest = {"action_mask": torch.zeros(39_999), "sample_logp": torch.zeros(39_999)}
    for suffix in SUFFIXES:
        path = tmp_path / f"run{suffix}"
        generator = torch.Generator().manual_seed(0)
        big = [one(ids=torch.randint(2**40, (40_000,), generator=generator), **rest) for _ in range(5)]
        save_trajectories(path, iter(big))
        with open(path, "r+b") as file:  # the middle is damaged, the beginning still reads
            if suffix != ".parquet":
                file.truncate(path.stat().st_size * 2 // 3)
        reading = iter_trajectories(path)
        assert torch.equal(next(reading).ids, big[0].ids)
        if suffix != ".parquet":
            with pytest.raises(ValueError, match=r"run\.jsonl"):
                list(reading)


@pytest.mark.parametrize(
    ("info", "named"),
    [
        ({"x": (1, 2)}, "info['x'] is a tuple"),
        ({"x": {"y": math.nan}}, "info['x'] is a dict"),
        ({"x": {1: 2}}, "info['x'] is a dict"),
        ({"x": torch.ones(1)}, "info['x'] is a Tensor"),
        ({3: 1}, "info[3] is a int"),
    ],
)
def test_info_that_json_would_change_is_refused(tmp_path: Path, info: dict[Any, Any], named: str) -> None:
    path = tmp_path / "run.jsonl"
    with pytest.raises(ValueError) as caught:
        save_trajectories(path, [one(), one(info=info)])
    assert named in str(caught.value)
    assert "trajectory 1" in str(caught.value)
    assert list(tmp_path.iterdir()) == []  # no half file


def test_infinite_log_probs_and_unknown_suffixes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sample_logp is infinite at 1"):
        save_trajectories(tmp_path / "run.jsonl", [one(sample_logp=torch.tensor([0.0, -math.inf]))])
    with pytest.raises(ValueError, match=r"end it with one of \.jsonl"):
        save_trajectories(tmp_path / "run.json", [one()])


BAD = [
    (record(action_mask=[0]), "action_mask: 1 entries, wanted 2, one fewer than ids has"),
    (record(sample_logp=[0.0]), "sample_logp: 1 entries, wanted 2"),
    (record(reward=math.nan), "reward: must be finite, got nan"),
    (record(sample_logp=[0.0, math.inf]), "sample_logp[1]: not finite"),
    (record(sample_logp=[0.0, -1e300]), "sample_logp[1]: not finite"),
    (record(sample_logp=[1.0, -0.5]), "sample_logp must be 0 where action_mask is 0"),
    (record(ids=[5, -7, 9]), "ids: out of range: -7"),
    (record(ids=[5, 2**63, 9]), f"ids: out of range: {2**63}"),
    (record(ids=[5, 100, 9]), "ids: out of range: 100, the vocabulary has 100"),
    (record(ids=[]), "ids: empty"),
    (record(ids=[5, "7", 9]), "ids[1]: expected `int`, got `str`"),
    (record(action_mask=[0, 2]), "action_mask: must hold only 0 and 1, got 2"),
    (record(reward="1"), "reward: expected `float`, got `str`"),
    (record(agentrl=2), "agentrl: format version 2; this agentrl reads 1"),
    (record(colour="red"), "object contains unknown field `colour`"),
    ({k: v for k, v in record().items() if k != "ids"}, "ids: missing"),
    ({"messages": []}, "agentrl: missing, so this is not agentrl's format"),
    ([1], "agentrl: missing, so this is not agentrl's format"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_a_bad_record_is_one_line_and_the_rest_is_read(tmp_path: Path, bad: object, message: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in (record(), bad, record())) + "\n")
    with pytest.raises(ValueError) as caught:
        load_trajectories(path, vocab_size=100)
    assert str(caught.value).startswith(f"{path}: line 2: {message}")
    assert "\n" not in str(caught.value)
    skipped: list[BadRecord] = []
    assert len(load_trajectories(path, vocab_size=100, skipped=skipped)) == 2
    assert [bad.place for bad in skipped] == ["line 2"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (json.dumps(record())[:40], "cut off, not valid JSON at character"),
        ("{'a': 1}", "not valid JSON at character 1"),
        (b'{"agentrl": "\xff"}', "not UTF-8 at byte 13"),
        ("[" * 100_000, "nested too deep"),
    ],
)
def test_damaged_json(tmp_path: Path, line: str | bytes, message: str) -> None:
    path = tmp_path / "run.jsonl"
    good = json.dumps(record()).encode()
    path.write_bytes(b"\n".join([good, line if isinstance(line, bytes) else line.encode(), good]))
    skipped: list[BadRecord] = []
    assert len(load_trajectories(path, skipped=skipped)) == 2
    assert [bad.place for bad in skipped] == ["line 2"]
    assert message in str(skipped[0])


def test_empty_and_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for content in (b"", b"\n \n", b"[]", gzip.compress(b"")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="run: no records in it"):
            load_trajectories(path, skipped=[])
    save_trajectories(tmp_path / "run.parquet", [one()])
    path.write_bytes((tmp_path / "run.parquet").read_bytes()[:-9])
    with pytest.raises(ValueError, match="run: damaged after 0 rows"):
        load_trajectories(path, skipped=[])


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
def test_a_compressed_file_cut_anywhere_never_ends_quietly(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"run{suffix}"
    save_trajectories(path, [one() for _ in range(20)])
    whole = path.read_bytes()
    for size in range(5, len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"damaged after|no records|not valid JSON"):
            load_trajectories(path)


def test_the_file_is_closed_as_soon_as_a_record_is_refused(tmp_path: Path) -> None:
    """Not when the error, whose traceback keeps the readers alive, is forgotten."""

    def refuse(line: object) -> None:
        raise RecordError("ids", "empty")

    path = tmp_path / "run.jsonl"
    path.write_text("{}\n{}\n")
    raw = iter_raw_records(path)
    with pytest.raises(ValueError, match="line 1: ids: empty"):
        list(read_each(path, raw, refuse, None))
    assert next(raw, None) is None
