"""A policy, a tokenizer, an environment and a sampler small enough to know by heart."""

import os
import pickle
import socket
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from agentrl import Trajectory
from agentrl.models.policy import Head
from agentrl.train.distributed import Ranks, process_group


class Bigram(nn.Module):
    """A policy whose next token depends on the last one only: logits = embedding[token] @ weight.T."""

    def __init__(
        self, vocab_size: int = 7, width: int = 5, seed: int = 0, dtype: torch.dtype = torch.float32
    ):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Parameter(torch.randn(vocab_size, width, generator=generator, dtype=dtype))
        self.weight = nn.Parameter(torch.randn(vocab_size, width, generator=generator, dtype=dtype))

    @property
    def module(self) -> nn.Module:
        return self

    def hidden_states(self, ids: Tensor, position_ids: Tensor, visible_until: Tensor) -> Tensor:
        return self.embedding[ids]

    def head(self) -> Head:
        return Head(self.weight)

    def new_cache(self, num_slots: int, max_tokens: int) -> Any:
        raise NotImplementedError

    def extend(self, ids: Tensor, num_new: Tensor, slots: Tensor, cache: Any) -> Tensor:
        raise NotImplementedError


def play(model: Bigram, task: str, generator: torch.Generator, temperature: float = 1.0) -> Trajectory:
    """Sample 1 to 6 tokens after a prompt of one or two; the reward is 1 if the first is odd."""
    prompt = [1, 2][: 1 + len(task) % 2]
    ids, logps = list(prompt), [0.0] * (len(prompt) - 1)
    with torch.no_grad():
        for _ in range(int(torch.randint(1, 7, (), generator=generator))):
            logits = model.embedding[ids[-1]] @ model.weight.T / temperature
            logp = torch.log_softmax(logits, -1)
            token = int(torch.multinomial(logp.exp(), 1, generator=generator))
            ids.append(token)
            logps.append(float(logp[token]))
    mask = torch.tensor([0.0] * (len(prompt) - 1) + [1.0] * (len(ids) - len(prompt)))
    reward = float(ids[len(prompt)] % 2)
    return Trajectory(torch.tensor(ids), mask, torch.tensor(logps), reward, {"task": task})


class Letters:
    """A tokenizer of single letters; the last id ends an action, the first pads."""

    pad_id, end_id = 0, 9

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") + 1 for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + i - 1) for i in ids if 0 < i < 9)

    def __len__(self) -> int:
        return 10


@dataclass(frozen=True)
class Word:
    name: str


class NoBs:
    """`num_turns` actions an episode, each answered with a c; the reward is 1 where none has a b."""

    def __init__(self, num_turns: int = 1) -> None:
        self.num_turns = num_turns

    def reset(self, task: Word) -> str:
        self.said: list[str] = []
        return task.name

    def step(self, action: str) -> tuple[str, float, bool]:
        self.said.append(action)
        return "c", float("b" not in "".join(self.said)), len(self.said) == self.num_turns


def without_seconds(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if not k.startswith("seconds")} for record in records]


@pytest.fixture
def bigram() -> type[Bigram]:
    return Bigram


@pytest.fixture
def make_trajs() -> Any:
    def make(model: Bigram, count: int, seed: int = 0, temperature: float = 1.0) -> list[Trajectory]:
        generator = torch.Generator().manual_seed(seed)
        return [play(model, "ab" if i % 2 else "c", generator, temperature) for i in range(count)]

    return make


@pytest.fixture(autouse=True)
def _fixed_global_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def in_ranks(tmp_path: Path) -> Any:
    """in_ranks(num_ranks, function): function(ranks) in that many processes, as torchrun would start them.

    Returns what each rank returned; a rank that raised gives its exception, one that died its exit status.
    """

    def run(num_ranks: int, function: Callable[[Ranks], Any]) -> list[Any]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children: list[int] = []
        for rank in range(num_ranks):
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", DeprecationWarning
                )  # from Python 3.12: the parent has threads
                child = os.fork()
            if child == 0:
                os.environ |= {"TORCHELASTIC_RUN_ID": "test", "RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
                try:
                    with process_group(torch.device("cpu")) as ranks:
                        result = function(ranks)
                except BaseException as error:
                    traceback.print_exc()
                    result = error
                (tmp_path / f"rank-{rank}").write_bytes(pickle.dumps(result))
                os._exit(0)
            children.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        results = [
            pickle.loads((tmp_path / f"rank-{rank}").read_bytes()) if status == 0 else status
            for rank, status in enumerate(statuses)
        ]
        for path in tmp_path.glob("rank-*"):
            path.unlink()
        return results

    return run
