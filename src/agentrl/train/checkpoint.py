"""Checkpoints: written whole or not at all, each under a name that holds the digest of its content.

One rank writes a file; ranks that share a sharded model write a folder, each its own shards, by
torch.distributed.checkpoint. Either is read on any number of ranks.
"""

import hashlib
import json
import os
import re
import shutil
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, distribute_tensor

from agentrl.train.distributed import ONE_RANK, Ranks

FORMAT = 1
_META = "agentrl"
_NAME = re.compile(r"step-(\d{6,})-([0-9a-f]{16})\.(safetensors|shards)")
_REST = "rest.safetensors"  # in a folder: all but model and optimizer


class _Meta(msgspec.Struct):
    """What a checkpoint says beside its tensors and its format; see `Checkpoint`."""

    step: Annotated[int, msgspec.Meta(ge=0)]
    config_hash: str
    curriculum: dict[str, Any]
    model_config: dict[str, Any]


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
    shards: Path | None = None  # the folder that holds model and optimizer, which are empty here


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
        meta = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][_META])
    except (
        safetensors.SafetensorError,
        struct.error,
        KeyError,
        ValueError,
        RecursionError,  # brackets without end
    ) as error:
        raise ValueError(f"not a file that agentrl wrote ({error})") from error
    if not isinstance(meta, dict):
        raise ValueError(f"not a file that agentrl wrote (its record is a {type(meta).__name__})")
    return tensors, meta


def placed_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor placed over ranks as `like` is, if that is sharded and has its shape; else itself.

    Each rank takes its shard of its own copy. Nothing is sent, so ranks may place tensors in any order, as
    they do: safetensors gives the tensors of a file in an order that differs between processes.
    """
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor) or tensor.shape != like.shape:
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int, ranks: Ranks = ONE_RANK) -> Path:
    """Write the checkpoint into `folder`, then delete all but the `keep` newest; returns its path.

    All ranks call it. A sharded model gives a folder to which each rank writes, any other a file.
    """
    meta = {
        "format": FORMAT,
        "step": checkpoint.step,
        "config_hash": checkpoint.config_hash,
        "curriculum": checkpoint.curriculum,
        "model_config": checkpoint.model_config,
    }
    if any(isinstance(tensor, DTensor) for tensor in checkpoint.model.values()):
        path = _save_shards(folder, checkpoint, meta, ranks)
    else:
        path = ranks.first(lambda: _save_file(folder, checkpoint, meta))
    if ranks.is_first:
        for old in list(checkpoints_by_step(folder).values())[:-keep]:
            _remove(old)
        for aside in folder.glob(".*.aside"):  # left by a run that was killed while it wrote
            _remove(aside)
    return path


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    tensors = {f"model/{name}": tensor for name, tensor in checkpoint.model.items()}
    for index, moments in checkpoint.optimizer.items():
        tensors |= {f"optimizer/{index}/{name}": tensor for name, tensor in moments.items()}
    return tensors


def _save_file(folder: Path, checkpoint: Checkpoint, meta: dict[str, Any]) -> Path:
    random = {f"random/{name}": state for name, state in checkpoint.random.items()}
    content = serialize(_tensors(checkpoint) | random, meta)
    digest = hashlib.sha256(content).hexdigest()[:16]
    path = folder / f"step-{checkpoint.step:06d}-{digest}.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)
    return path


def _save_shards(folder: Path, checkpoint: Checkpoint, meta: dict[str, Any], ranks: Ranks) -> Path:
    aside = folder / f".step-{checkpoint.step:06d}.aside"

    def prepare() -> None:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)

    def finish() -> Path:
        random = {f"random/{name}": state for name, state in checkpoint.random.items()}
        write_atomically(aside / _REST, serialize(random, meta))
        path = folder / f"step-{checkpoint.step:06d}-{_folder_digest(aside)}.shards"
        if path.exists():  # written before a kill, and now again from the same state
            shutil.rmtree(path)
        aside.replace(path)
        sync_folder(folder)
        return path

    ranks.first(prepare)
    save(_tensors(checkpoint), checkpoint_id=aside)
    return ranks.first(finish)


def _folder_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.name} {content}\n".encode())
    return digest.hexdigest()[:16]


def read_shards(
    folder: Path, like: dict[str, Tensor], parameters: Sequence[Tensor]
) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    """Model and optimizer of a folder of shards, placed as the model's state `like` and its parameters are.

    Whatever ranks wrote them: each reads only what it holds. Raises ValueError where the names or shapes of
    the model differ.
    """
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    shapes = {
        name: tuple(entry.size) for name, entry in saved.items() if isinstance(entry, TensorStorageMetadata)
    }
    wanted = {f"model/{name}": tuple(tensor.shape) for name, tensor in like.items()}
    if wanted != {name: shape for name, shape in shapes.items() if name.startswith("model/")}:
        raise ValueError(f"{folder} holds another model: names or shapes of its tensors differ")
    tensors = {f"model/{name}": torch.empty_like(tensor) for name, tensor in like.items()}
    for name, shape in shapes.items():
        if name.startswith("optimizer/"):
            index = int(name.split("/")[1])
            if not 0 <= index < len(parameters):
                raise ValueError(f"{folder} has moments of parameter {index}, the model {len(parameters)}")
            parameter = parameters[index]
            whole = parameter.shape == shape
            tensors[name] = torch.empty_like(parameter) if whole else torch.empty(shape)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process: that is meant
        load(tensors, checkpoint_id=folder, no_dist=not dist.is_initialized())
    model: dict[str, Tensor] = {}
    optimizer: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition("/")
        if part == "model":
            model[rest] = tensor.detach()
        else:
            index, _, moment = rest.partition("/")
            optimizer.setdefault(int(index), {})[moment] = tensor.detach()
    return model, optimizer


def checkpoints_by_step(folder: Path) -> dict[int, Path]:
    """The checkpoints of a folder, oldest step first; a file that was not finished is none."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return dict(sorted(found))


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and verify it.

    Raises ValueError, naming the file, where its content does not have the digest that its name gives, was
    written by another format, or lacks a part, has one of the wrong type or of another step.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is not named as a checkpoint is (step-NUMBER-DIGEST.safetensors)")
    sharded = match[3] == "shards"
    content = (path / _REST if sharded else path).read_bytes()
    digest = _folder_digest(path) if sharded else hashlib.sha256(content).hexdigest()[:16]
    if digest != match[2]:
        raise ValueError(
            f"{path} is damaged: its content does not have the digest in its name. "
            "Move it away to continue from the checkpoint before it"
        )
    try:
        tensors, meta = deserialize(content)
        found = meta.get("format")
        if type(found) is not int or found != FORMAT:
            raise ValueError(f"it has format {found}, this version of agentrl reads {FORMAT}")
        record = msgspec.convert(meta, _Meta)
        if record.step != int(match[1]):
            raise ValueError(f"it is of step {record.step}, not of the one in its name")
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "random": {}, "optimizer": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition("/")
            if part not in parts:
                raise ValueError(f"it holds a tensor {name!r}, which is no part of a checkpoint")
            parts[part][rest] = tensor
        optimizer: dict[int, dict[str, Tensor]] = {}
        for name, tensor in parts["optimizer"].items():
            index, _, moment = name.partition("/")
            optimizer.setdefault(int(index), {})[moment] = tensor
        return Checkpoint(
            step=record.step,
            config_hash=record.config_hash,
            model=parts["model"],
            optimizer=optimizer,
            random=parts["random"],
            curriculum=record.curriculum,
            model_config=record.model_config,
            shards=path if sharded else None,
        )
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
