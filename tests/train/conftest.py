"""A policy, a tokenizer, an environment, a sampler and a run small enough to know by heart."""

import os
import pickle
import socket
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from agentrl import Trajectory
from agentrl.models.policy import Head
from agentrl.models.tiny import TinyAgent, TinyConfig
from agentrl.rollout.episode import sample_groups, sample_step
from agentrl.train.checkpoint import checkpoints_by_step
from agentrl.train.config import RLConfig, RunConfig
from agentrl.train.directory import RunDirectory
from agentrl.train.distributed import Ranks, process_group
from agentrl.train.loop import Trainer
from agentrl.train.run import Hooks, load_policy, train_run


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


CONFIG = RunConfig(
    rl=RLConfig(group_size=4, prompts_per_step=2, max_tokens=12, lr=0.01, kl_coef=0.01),
    steps=9,
    checkpoint_every=2,
)


class Rotation:
    """A curriculum with state: it leaves out another task every step, and counts rewards."""

    def __init__(self, tasks: Sequence[Word]) -> None:
        self.tasks, self.seen = tasks, {"rewards": 0.0, "left_out": 0}

    def pool(self, step: int) -> Sequence[Word]:
        return [task for i, task in enumerate(self.tasks) if i != self.seen["left_out"]]

    def observe(self, sampled: Sequence[Any], step: int) -> None:
        rewards = self.seen["rewards"] + sum(t.reward for t in sampled)
        self.seen = {"rewards": rewards, "left_out": int(rewards) % len(self.tasks)}

    def metrics(self) -> dict[str, float]:
        return {"left_out": self.seen["left_out"]}

    def state_dict(self) -> dict[str, Any]:
        return self.seen

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state


TWO_TURNS = partial(NoBs, num_turns=2)
TASKS = [Word(name) for name in ("a", "ab", "abc", "d")]


def new_trainer(cfg: RLConfig = CONFIG.rl) -> Trainer:
    """The trainer of an untrained TinyAgent that plays two turns of `NoBs`."""
    tok = Letters()
    model = TinyAgent(TinyConfig(vocab_size=10, width=8, num_layers=1, num_heads=2, max_positions=16))

    def sample(policy: Any, pool: Sequence[Any], generator: torch.Generator) -> Any:
        return sample_step(policy, TWO_TURNS, pool, tok, cfg, generator)

    return Trainer(model, cfg, Rotation(TASKS), sample, pad_id=0)


def evaluation(policy: Any) -> dict[str, Any]:
    cfg = replace(CONFIG.rl, group_size=8)
    trajs = sample_groups(policy, TWO_TURNS, TASKS, Letters(), cfg, torch.Generator().manual_seed(1))
    return {"pass_rate": sum(t.reward for t in trajs) / len(trajs)}


def carry(path: Path, config: RunConfig = CONFIG, **hooks: Any) -> dict[str, Any] | None:
    """Start or continue the run at `path`, as the command does."""
    run = RunDirectory(path)
    if not run.config_path.exists():
        run.create(config)
    return train_run(run, config, new_trainer(config.rl), evaluation, Hooks(**hooks))


def result(path: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], dict[str, Any]]:
    """Records, weights and summary of the run at `path`, without what a clock gave."""
    run = RunDirectory(path)
    summary = {k: v for k, v in run.load_summary().items() if not k.startswith("seconds")}
    return without_seconds(run.metrics.read()), load_policy(run)[0].state_dict(), summary


def assert_same_run(one: Path, other: Path) -> None:
    (records, weights, summary), (records2, weights2, summary2) = result(one), result(other)
    assert records == records2
    assert summary == summary2
    assert all(torch.equal(weights[name], weights2[name]) for name in weights)
    last = [list(checkpoints_by_step(RunDirectory(p).checkpoints).items())[-1] for p in (one, other)]
    assert last[0][0] == last[1][0] == CONFIG.steps


def snapshot(path: Path) -> dict[str, bytes]:
    """Every file below `path` with its content."""
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def newest(path: Path) -> Path:
    """The newest checkpoint of the run at `path`."""
    return list(checkpoints_by_step(path / "checkpoints").values())[-1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that nothing disturbed; copy it to change it."""
    path = tmp_path_factory.mktemp("whole") / "run"
    assert carry(path) is not None
    return path


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
