"""One checkpoint file: whole or not at all, and verified."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from agentrl.train.checkpoint import (
    Checkpoint,
    checkpoints_by_step,
    deserialize,
    load_checkpoint,
    save_checkpoint,
    serialize,
    write_atomically,
)


def example(step: int = 3) -> Checkpoint:
    weight = torch.arange(6.0).view(2, 3)
    return Checkpoint(
        step=step,
        config_hash="abc",
        model={"weight": weight, "tied": weight, "half": weight.bfloat16(), "turned": weight.T},
        optimizer={0: {"step": torch.tensor(3.0), "exp_avg": weight}, 10: {"step": torch.tensor(2.0)}},
        random={"generator": torch.Generator().get_state()},
        curriculum={"seen": ["ä", 1.5, None]},
        model_config={"width": 8},
    )


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name])


def test_round_trip_is_exact(tmp_path: Path) -> None:
    saved = example()
    loaded = load_checkpoint(save_checkpoint(tmp_path / "checkpoints", saved, keep=1))
    assert (loaded.step, loaded.config_hash, loaded.curriculum, loaded.model_config) == (
        saved.step, saved.config_hash, saved.curriculum, saved.model_config,
    )  # fmt: skip
    assert_same(loaded.model, saved.model)
    assert_same(loaded.random, saved.random)
    assert loaded.optimizer.keys() == saved.optimizer.keys()
    for index, moments in saved.optimizer.items():
        assert_same(loaded.optimizer[index], moments)


def test_the_newest_are_kept_and_leftovers_swept(tmp_path: Path) -> None:
    for step in (0, 2, 4, 1_000_000):
        (tmp_path / ".step-000099-0123456789abcdef.safetensors.aside").write_bytes(b"half")
        save_checkpoint(tmp_path, example(step), keep=2)
    assert list(checkpoints_by_step(tmp_path)) == [4, 1_000_000]
    assert len(list(tmp_path.iterdir())) == 2


def test_files_of_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    for name in (
        "step-000001.safetensors",
        "step-000001-xyz.safetensors",
        "step-1-0123456789abcdef.safetensors",
    ):
        (tmp_path / name).write_bytes(b"")
    assert checkpoints_by_step(tmp_path) == {}
    assert checkpoints_by_step(tmp_path / "absent") == {}
    with pytest.raises(ValueError, match="is not named as a checkpoint"):
        load_checkpoint(tmp_path / "step-000001.safetensors")


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, example(), keep=1)
    content = path.read_bytes()
    for place in range(0, len(content), 97):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ValueError, match="is damaged"):
            load_checkpoint(path)


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.train.checkpoint.FORMAT", 99)
    path = save_checkpoint(tmp_path, example(), keep=1)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="it has format 99, this version of agentrl reads 1"):
        load_checkpoint(path)


META: dict[str, Any] = {"format": 1, "step": 3, "config_hash": "abc", "curriculum": {}, "model_config": {}}
FORGED = {
    "a list": ([], "its record is a list"),
    "a text": ("format", "its record is a str"),
    "a number": (1, "its record is a int"),
    "nothing": (None, "its record is a NoneType"),
    "an empty table": ({}, "it has format None"),
    **{f"no {name}": ({k: v for k, v in META.items() if k != name}, name) for name in META},
    **{
        f"{name} = {value!r}": ({**META, name: value}, name)
        for name, values in {
            "format": (None, "1", 1.0, True, [1], {}),
            "step": (None, "3", 3.0, True, [3], {}, -3),
            "config_hash": (None, 7, ["abc"], {}),
            "curriculum": (None, "top", 1, [], True),
            "model_config": (None, "tiny", 1, [["width", 8]], True),
        }.items()
        for value in values
    },
    "another step": ({**META, "step": 4}, "it is of step 4, not of the one in its name"),
}


def forge(folder: Path, content: bytes, kind: str) -> Path:
    """A checkpoint of step 3 with this content and the digest of it: a file, or what ranks share."""
    if kind == "safetensors":
        path = folder / f"step-000003-{hashlib.sha256(content).hexdigest()[:16]}.safetensors"
        path.write_bytes(content)
        return path
    digest = hashlib.sha256(f"rest.safetensors {hashlib.sha256(content).hexdigest()}\n".encode())
    path = folder / f"step-000003-{digest.hexdigest()[:16]}.shards"
    path.mkdir()
    (path / "rest.safetensors").write_bytes(content)
    return path


@pytest.mark.parametrize("kind", ["safetensors", "shards"])
@pytest.mark.parametrize("case", FORGED)
def test_a_record_of_the_wrong_kind_is_named_whatever_its_digest(
    tmp_path: Path, case: str, kind: str
) -> None:
    meta, message = FORGED[case]
    path = forge(tmp_path, serialize({"random/generator": torch.Generator().get_state()}, meta), kind)
    with pytest.raises(ValueError, match="cannot be read") as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_record_of_the_right_kind_is_read(tmp_path: Path) -> None:
    """The cases above would prove little if a forged checkpoint could not be read at all."""
    for kind in ("safetensors", "shards"):
        loaded = load_checkpoint(forge(tmp_path, serialize({"random/torch": torch.zeros(1)}, META), kind))
        assert (loaded.step, loaded.config_hash) == (3, "abc")


@pytest.mark.parametrize(
    ("name", "message"),
    [("weight", "holds a tensor 'weight'"), ("optimizer/first/exp_avg", "invalid literal for int()")],
)
def test_a_tensor_of_no_part_is_named_whatever_the_digest(tmp_path: Path, name: str, message: str) -> None:
    path = forge(tmp_path, serialize({name: torch.zeros(1)}, META), "safetensors")
    with pytest.raises(ValueError, match="cannot be read") as caught:
        load_checkpoint(path)
    assert message in str(caught.value)


def test_brackets_without_end_are_no_record() -> None:
    content = safetensors.torch.save({"a": torch.zeros(1)}, metadata={"agentrl": "[" * 100_000})
    with pytest.raises(ValueError, match="not a file that agentrl wrote"):
        deserialize(content)


@pytest.mark.parametrize("content", [b"", b"x", b"\0" * 8, b"\xff" * 64])
def test_other_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="not a file that agentrl wrote"):
        deserialize(content)


def test_a_crash_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def crash(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


def test_serialize_keeps_metadata_and_copies() -> None:
    tensors, meta = deserialize(serialize({"a": torch.ones(2, 2).T}, {"x": [1]}))
    assert torch.equal(tensors["a"], torch.ones(2, 2))
    assert meta == {"x": [1]}
