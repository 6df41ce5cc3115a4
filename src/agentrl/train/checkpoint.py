"""Checkpoints: one file each, written whole or not at all, whose name holds the digest of its content."""

import hashlib
import json
import os
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

FORMAT = 1
_META = "agentrl"
_NAME = re.compile(r"step-(\d{6,})-([0-9a-f]{16})\.safetensors")


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """Everything that the rest of a run depends on."""

    step: int  # training steps done
    config_hash: str  # of the settings it was made with
    model: dict[str, Tensor]
    optimizer: dict[int, dict[str, Tensor]]  # by the parameter's index; empty before the first update
    random: dict[str, Tensor]  # states of the random generators, uint8
    curriculum: dict[str, Any] = field(default_factory=dict)  # JSON, opaque here
    model_config: dict[str, Any] = field(default_factory=dict)  # JSON: builds the model anew


def write_atomically(path: Path, content: bytes) -> None:
    """Make `path` hold `content`, on disk when this returns; a crash leaves the old file or the new one."""
    aside = path.with_name(f".{path.name}.aside")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Put a folder's entries on disk, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def serialize(tensors: dict[str, Tensor], meta: dict[str, Any]) -> bytes:
    """Tensors and a JSON record as the bytes of a safetensors file."""
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return safetensors.torch.save(own, metadata={_META: json.dumps(meta)})


def deserialize(content: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `serialize` was given. Raises ValueError for bytes that it did not write."""
    try:
        tensors = safetensors.torch.load(content)
        (length,) = struct.unpack("<Q", content[:8])
        return tensors, json.loads(json.loads(content[8 : 8 + length])["__metadata__"][_META])
    except (safetensors.SafetensorError, struct.error, KeyError, ValueError) as error:
        raise ValueError(f"not a file that agentrl wrote ({error})") from error


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write the checkpoint into `folder`, then delete all but the `keep` newest; returns its path."""
    tensors = {f"model/{name}": tensor for name, tensor in checkpoint.model.items()}
    tensors |= {f"random/{name}": state for name, state in checkpoint.random.items()}
    for index, moments in checkpoint.optimizer.items():
        tensors |= {f"optimizer/{index}/{name}": tensor for name, tensor in moments.items()}
    meta = {
        "format": FORMAT,
        "step": checkpoint.step,
        "config_hash": checkpoint.config_hash,
        "curriculum": checkpoint.curriculum,
        "model_config": checkpoint.model_config,
    }
    content = serialize(tensors, meta)
    digest = hashlib.sha256(content).hexdigest()[:16]
    path = folder / f"step-{checkpoint.step:06d}-{digest}.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)
    for old in list(checkpoints_by_step(folder).values())[:-keep]:
        old.unlink()
    for aside in folder.glob(".*.aside"):  # left by a run that was killed while it wrote
        aside.unlink()
    return path


def checkpoints_by_step(folder: Path) -> dict[int, Path]:
    """The checkpoints of a folder, oldest step first; a file that was not finished is none."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return dict(sorted(found))


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and verify it.

    Raises ValueError, naming the file and what to do, where its content does not have the digest that its
    name gives, or was written by another format.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is not named as a checkpoint is (step-NUMBER-DIGEST.safetensors)")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest()[:16] != match[2]:
        raise ValueError(
            f"{path} is damaged: its content does not have the digest in its name. "
            "Move it away to continue from the checkpoint before it"
        )
    try:
        tensors, meta = deserialize(content)
        if meta["format"] != FORMAT:
            raise ValueError(f"it has format {meta['format']}, this version of agentrl reads {FORMAT}")
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "random": {}, "optimizer": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition("/")
            parts[part][rest] = tensor
        optimizer: dict[int, dict[str, Tensor]] = {}
        for name, tensor in parts["optimizer"].items():
            index, _, moment = name.partition("/")
            optimizer.setdefault(int(index), {})[moment] = tensor
        return Checkpoint(
            step=meta["step"],
            config_hash=meta["config_hash"],
            model=parts["model"],
            optimizer=optimizer,
            random=parts["random"],
            curriculum=meta["curriculum"],
            model_config=meta["model_config"],
        )
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
