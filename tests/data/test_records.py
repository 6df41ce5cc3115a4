"""Files fall into records whatever their layout, and records that are too long do not fill the memory."""

import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data import records
from agentrl.data.records import iter_raw_records

DOCUMENTS = [{"a": 'quote " bracket ]},{ \\'}, {"b": [1, [2, {"c": "\u00e9\n"}]]}, {}, [], {"d": "x" * 50}]


def split(path: Path, text: str, max_bytes: int = 10**6) -> list[tuple[str, object]]:
    path.write_text(text)
    return [
        (place, raw if raw is None else json.loads(raw)) for place, raw in iter_raw_records(path, max_bytes)
    ]


@pytest.mark.parametrize("chunk", [1, 2, 7, 2**20])
@pytest.mark.parametrize("indent", [None, 2])
def test_arrays_split_at_their_commas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, indent: int | None
) -> None:
    monkeypatch.setattr(records, "_CHUNK_BYTES", chunk)
    found = split(tmp_path / "x", json.dumps(DOCUMENTS, indent=indent) + "\n")
    assert found == [(f"record {i}", value) for i, value in enumerate(DOCUMENTS, 1)]


@pytest.mark.parametrize("chunk", [1, 2, 7, 2**20])
def test_lines_keep_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(records, "_CHUNK_BYTES", chunk)
    objects = [{"a": i} for i in range(4)]
    lines = [json.dumps(value) for value in objects]
    text = f"{lines[0]}\n\n{lines[1]}\r\n{lines[2]}\n \n{lines[3]}"
    assert [place for place, _ in split(tmp_path / "x", text)] == ["line 1", "line 3", "line 4", "line 6"]


def test_a_pretty_printed_object_is_one_record(tmp_path: Path) -> None:
    document = {"history": [{"role": "user"}, {"role": "assistant"}]}
    assert split(tmp_path / "x", json.dumps(document, indent=2)) == [("the document", document)]


def test_a_damaged_first_line_does_not_hide_the_others(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text('{"a": \n{"b": 1}\n{"c": 2}\n')
    assert [place for place, _ in iter_raw_records(path)] == ["line 1", "line 2", "line 3"]


@pytest.mark.parametrize("chunk", [3, 2**20])
def test_a_record_over_the_limit_is_none_and_the_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(records, "_CHUNK_BYTES", chunk)
    long, short = {"long": "x" * 99}, {"short": 1}
    expected = [short, None, short]
    text = "\n".join(map(json.dumps, (short, long, short)))
    assert [value for _, value in split(tmp_path / "x", text, 40)] == expected
    assert [value for _, value in split(tmp_path / "x", json.dumps([short, long, short]), 40)] == expected


@pytest.mark.parametrize("opening", [b"", b'[{"a": "'])
def test_a_huge_line_is_not_held(tmp_path: Path, opening: bytes) -> None:
    path = tmp_path / "x"
    with open(path, "wb") as file:
        file.write(opening)
        for _ in range(64):
            file.write(b"x" * 2**20)
    tracemalloc.start()
    found = [raw for _, raw in iter_raw_records(path, max_bytes=2**22)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == [None]
    assert peak < 24 * 2**20  # six times the limit, against the file's 64 MiB


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(1, 200), indent=st.sampled_from([None, 1]))
def test_an_array_cut_anywhere_says_so(
    tmp_path_factory: pytest.TempPathFactory, cut: int, indent: int | None
) -> None:
    text = json.dumps(DOCUMENTS, indent=indent)
    path = tmp_path_factory.mktemp("cut") / "x"
    path.write_text(text[: min(cut, len(text) - 1)])
    *_, (_, last) = iter_raw_records(path)
    assert last is not None
    with pytest.raises(json.JSONDecodeError):
        json.loads(last)
