"""Runs on several processes, as torchrun starts them, that are one process's run to rounding."""

import copy
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.train.conftest import Letters, NoBs, Word
from torch.distributed.tensor import DTensor

from agentrl.models.tiny import TinyAgent, TinyConfig
from agentrl.rollout.episode import sample_groups, sample_step
from agentrl.train.checkpoint import checkpoints_by_step, load_checkpoint
from agentrl.train.config import RLConfig, RunConfig
from agentrl.train.directory import RunDirectory
from agentrl.train.distributed import ONE_RANK, RankLost, Ranks, contact, gathered, layers_of, shard_policy
from agentrl.train.loop import Trainer
from agentrl.train.run import Hooks, load_policy, train_run

CONFIG = RunConfig(
    rl=RLConfig(group_size=4, prompts_per_step=3, max_tokens=12, lr=0.01, kl_coef=0.01, microbatch_tokens=64),
    steps=6,
    checkpoint_every=2,
)


class Alternating:
    """A curriculum with state: the task it leaves out depends on all rewards so far."""

    def __init__(self) -> None:
        self.rewards = 0.0

    def pool(self, step: int) -> list[Word]:
        return [word for i, word in enumerate(TASKS) if i != int(self.rewards) % len(TASKS)]

    def observe(self, sampled: Sequence[Any], step: int) -> None:
        self.rewards += sum(t.reward for t in sampled)

    def metrics(self) -> dict[str, float]:
        return {"rewards": self.rewards}

    def state_dict(self) -> dict[str, Any]:
        return {"rewards": self.rewards}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rewards = state["rewards"]


TASKS = [Word(name) for name in ("a", "ac", "acd", "d", "e")]


def new_trainer(ranks: Ranks = ONE_RANK) -> Trainer:
    model = TinyAgent(TinyConfig(vocab_size=10, width=8, num_layers=2, num_heads=2, max_positions=16))
    reference = copy.deepcopy(model)
    if ranks.num_ranks > 1:
        shard_policy(model)
        shard_policy(reference)

    def sample(policy: Any, pool: Sequence[Any], generator: torch.Generator) -> Any:
        return sample_step(policy, NoBs, pool, Letters(), CONFIG.rl, generator, share=ranks.share)

    return Trainer(model, CONFIG.rl, Alternating(), sample, pad_id=0, ranks=ranks, reference=reference)


def evaluation(policy: Any) -> dict[str, Any]:
    trajs = sample_groups(policy, NoBs, TASKS, Letters(), CONFIG.rl, torch.Generator().manual_seed(1))
    return {"pass_rate": sum(t.reward for t in trajs) / len(trajs)}


def carry(path: Path, ranks: Ranks = ONE_RANK, **hooks: Any) -> dict[str, Any] | None:
    run = RunDirectory(path)
    if not run.config_path.exists() and ranks.is_first:
        run.create(CONFIG)
    ranks.gather(None)
    return train_run(run, CONFIG, new_trainer(ranks), evaluation, Hooks(**hooks))


def figures(path: Path) -> list[dict[str, Any]]:
    """Records without the seconds, and without `distortion`, which depends on the split."""
    records = RunDirectory(path).metrics.read()
    return [{k: v for k, v in r.items() if not k.startswith(("seconds", "distortion"))} for r in records]


def assert_same_learning(one: Path, other: Path) -> None:
    for a, b in zip(figures(one), figures(other), strict=True):
        assert a == pytest.approx(b, rel=2e-4, abs=1e-6)
    weights, others = (load_policy(RunDirectory(path))[0].state_dict() for path in (one, other))
    for name, value in weights.items():
        torch.testing.assert_close(value, others[name], rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("alone") / "run"
    assert carry(path) is not None
    return path


def test_ranks_learn_what_one_rank_learns_and_resume_at_other_numbers(
    alone: Path, tmp_path: Path, in_ranks: Any
) -> None:
    path = tmp_path / "run"
    seen: list[Any] = []

    def stops_at(step: int) -> Any:
        seen.clear()
        return {"on_step": seen.append, "should_stop": lambda: bool(seen) and seen[-1]["step"] == step}

    assert in_ranks(3, lambda ranks: carry(path, ranks, **stops_at(3))) == [None, None, None]
    written = list(checkpoints_by_step(path / "checkpoints").values())
    assert [p.suffix for p in written] == [".shards", ".shards"]
    checkpoint = load_checkpoint(written[-1])
    assert checkpoint.curriculum == {"rewards": RunDirectory(path).metrics.read()[-1]["rewards"]}
    _, step = load_policy(RunDirectory(path))
    assert step == 3
    assert carry(path, **stops_at(4)) is None  # one rank goes on from the shards of three
    assert load_checkpoint(list(checkpoints_by_step(path / "checkpoints").values())[-1]).shards is None
    summaries = in_ranks(2, lambda ranks: carry(path, ranks))  # and two from its file
    assert summaries[0] is not None
    assert summaries[0] == summaries[1]
    assert_same_learning(alone, path)

    shard = next(p for p in written[-1].parent.glob("*.shards/*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match="damaged"):
        load_checkpoint(shard.parent)


def test_ranks_may_place_tensors_in_any_order(in_ranks: Any) -> None:
    """A file's tensors come in an order of each process's own; sending them would swap those of one size."""
    generator = torch.Generator().manual_seed(0)
    values = {
        name: torch.randn(value.shape, generator=generator)
        for name, value in new_trainer().model.module.state_dict().items()
    }

    def on_rank(ranks: Ranks) -> list[float]:
        trainer = new_trainer(ranks)
        order = sorted(values, reverse=ranks.rank == 1)
        shuffled = {name: values[name] for name in order}
        trainer.restore(replace(trainer.checkpoint(), model=shuffled))
        state = trainer.model.module.state_dict()
        return [
            float((cast(DTensor, state[n]).full_tensor() - value).abs().max()) for n, value in values.items()
        ]

    for differences in in_ranks(3, on_rank):
        assert differences == [0.0] * len(values)


def test_a_rank_that_dies_ends_the_others_with_a_clear_message(
    alone: Path, tmp_path: Path, in_ranks: Any
) -> None:
    path = tmp_path / "run"

    def on_rank(ranks: Ranks) -> str:
        def die(record: dict[str, Any]) -> None:
            if record["step"] == 3 and ranks.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        with pytest.raises(RankLost) as caught, contact(ranks.rank):  # as the command wraps its run
            carry(path, ranks, on_step=die)
        return str(caught.value)

    start = time.monotonic()
    said, status = in_ranks(2, on_rank)
    assert time.monotonic() - start < 60
    assert status == -signal.SIGKILL
    assert "rank 0 lost contact with another rank" in said
    assert said.count("resumed from its last checkpoint") == 1
    assert in_ranks(2, lambda ranks: carry(path, ranks) is not None) == [True, True]
    assert_same_learning(alone, path)


def test_shares_of_the_groups_are_what_one_rank_samples() -> None:
    model = new_trainer().model

    def sampled(share: Any) -> tuple[list[Any], list[Any]]:
        return sample_step(
            model, NoBs, TASKS, Letters(), CONFIG.rl, torch.Generator().manual_seed(3), share=share
        )

    kept, whole = sampled(None)
    parts = [sampled(Ranks(rank, 5).share) for rank in range(5)]  # more ranks than groups
    for want, got in ((kept, [t for k, _ in parts for t in k]), (whole, [t for _, s in parts for t in s])):
        assert [(t.episode, t.ids.tolist()) for t in got] == [(t.episode, t.ids.tolist()) for t in want]
    assert {len(s) for _, s in parts} == {0, CONFIG.rl.group_size}


def test_low_precision_computes_on_copies_of_float32_weights(in_ranks: Any) -> None:
    def on_rank(ranks: Ranks) -> list[str]:
        trainer = new_trainer()
        model = trainer.model
        shard_policy(model, compute_dtype=torch.bfloat16, checkpoint_activations=True)
        with gathered(model):
            seen = {p.dtype for p in model.module.parameters() if not isinstance(p, DTensor)}
        ids = torch.tensor([[1, 2, 3]])
        hidden = model.hidden_states(ids, torch.arange(3)[None], torch.full((1, 3), 3))
        hidden.float().square().sum().backward()
        stored = {p.dtype for p in model.module.parameters()}
        grads = {p.grad.dtype for p in model.module.parameters() if p.grad is not None}
        assert all(isinstance(p, DTensor) for p in model.module.parameters())
        return [*map(str, seen), str(hidden.dtype), *map(str, stored), *map(str, grads)]

    for dtypes in in_ranks(2, on_rank):
        assert dtypes == ["torch.bfloat16", "torch.bfloat16", "torch.float32", "torch.float32"]


def test_layers_are_the_heaviest_list(tmp_path: Path) -> None:
    model = TinyAgent(TinyConfig(vocab_size=5, width=4, num_heads=1))
    assert layers_of(model) is model.layers
    with pytest.raises(ValueError, match=r"has no nn\.ModuleList of layers"):
        layers_of(torch.nn.Linear(2, 2))


def test_contact_passes_other_errors_on() -> None:
    with pytest.raises(RuntimeError, match="shapes") as caught, contact(0):
        raise RuntimeError("shapes do not fit")
    assert not isinstance(caught.value, RankLost)
