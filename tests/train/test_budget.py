from multiprocessing import get_context
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from agentrl.data.packing import pack_sequences
from agentrl.data.trajectory import Trajectory
from agentrl.models.scoring import packed_log_probs
from agentrl.models.tiny import TinyAgent, TinyConfig
from agentrl.ops.peak_memory import peak_bytes
from agentrl.train.budget import suggest_max_tokens


def tiny(device: str = "cpu") -> TinyAgent:
    return TinyAgent(TinyConfig(vocab_size=50, width=32, num_layers=2, max_positions=64)).to(device)


def parameter_bytes(policy: nn.Module) -> int:
    return sum(p.nbytes for p in policy.parameters())


def trajectories(num_tokens: int, longest: int) -> list[Trajectory]:
    lengths = [longest] * (num_tokens // longest) + ([num_tokens % longest] if num_tokens % longest else [])
    return [Trajectory(torch.zeros(n).long(), torch.ones(n - 1), -torch.ones(n - 1), 0.0) for n in lengths]


def peak_of_a_step(policy: TinyAgent, num_tokens: int, longest: int) -> int:
    """Bytes of weights, gradients and a step that adds to the gradients, measured here."""
    device = policy.head().weight.device

    def step() -> None:
        packed = pack_sequences(trajectories(num_tokens, longest), num_tokens).to(device)
        packed_log_probs(policy, packed).sum().backward()

    step()
    try:
        return 2 * parameter_bytes(policy) + peak_bytes(step, device)
    finally:
        policy.zero_grad(set_to_none=True)


def test_the_budget_fits_and_a_little_more_does_not() -> None:
    policy = tiny()
    limit = 6_000_000
    budget = suggest_max_tokens(policy, longest=48, limit_bytes=limit)
    assert budget > 96
    assert peak_of_a_step(policy, budget, 48) <= limit
    assert peak_of_a_step(policy, int(budget * 1.04) + 48, 48) > limit
    assert suggest_max_tokens(policy, longest=48, limit_bytes=limit, reserved_bytes=3_000_000) < budget


def test_nothing_else_changes() -> None:
    policy = tiny()
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    state = torch.get_rng_state()
    suggest_max_tokens(policy, longest=32, limit_bytes=10**9, at_most=64, step=lambda _: torch.rand(3))
    assert torch.equal(torch.get_rng_state(), state)
    suggest_max_tokens(policy, longest=32, limit_bytes=10**9, at_most=64)
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    assert all(p.grad is None for p in policy.parameters())


@pytest.mark.parametrize("bytes_of", [lambda n: 1000 * n, lambda n: n * n, lambda n: 50_000 + 16 * n])
def test_the_search_finds_the_largest_that_fits(bytes_of: Any) -> None:
    """A step of known size: linear, quadratic, or mostly fixed; the answer is known within the tolerance."""
    policy = tiny()
    sizes: list[int] = []

    def step(trajs: list[Trajectory]) -> Tensor:
        sizes.append(sum(t.num_tokens for t in trajs))
        assert all(t.num_tokens <= 100 for t in trajs)
        return torch.empty(bytes_of(sizes[-1]), dtype=torch.uint8)

    held = parameter_bytes(policy)
    for room in (bytes_of(100), bytes_of(333), bytes_of(1000), bytes_of(4321)):
        sizes.clear()
        budget = suggest_max_tokens(policy, longest=100, limit_bytes=held + room, step=step, at_most=5000)
        best = max(n for n in range(100, 5001) if bytes_of(n) <= room)
        assert budget in sizes
        assert bytes_of(budget) <= room
        assert best <= budget * 1.02 + 1
        assert len(sizes) <= 18


def test_running_out_of_memory_is_an_answer() -> None:
    def step(trajs: list[Trajectory]) -> None:
        if sum(t.num_tokens for t in trajs) > 777:
            raise torch.OutOfMemoryError("no memory left")

    budget = suggest_max_tokens(tiny(), longest=50, limit_bytes=10**9, step=step)
    assert budget <= 777 <= budget * 1.02 + 1


def budget_of_rank(rank: int, store: Path, found: "Queue[tuple[int, int]]") -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

    def step(trajs: list[Trajectory]) -> Tensor:
        dist.barrier()  # hangs unless both ranks run the same number of steps
        return torch.empty(sum(t.num_tokens for t in trajs) * 1000 * (rank + 1), dtype=torch.uint8)

    policy = tiny()
    limit = parameter_bytes(policy) + 2_000_000
    found.put((rank, suggest_max_tokens(policy, longest=100, limit_bytes=limit, step=step)))
    dist.destroy_process_group()


def test_ranks_agree_on_what_fits_them_all(tmp_path: Path) -> None:
    context = get_context("fork")
    found = context.Queue()
    ranks = [context.Process(target=budget_of_rank, args=(r, tmp_path / "store", found)) for r in (0, 1)]
    for rank in ranks:
        rank.start()
    budgets = dict(found.get(timeout=60) for _ in ranks)
    for rank in ranks:
        rank.join(timeout=60)
        assert rank.exitcode == 0
    assert budgets[0] == budgets[1]
    assert 980 <= budgets[0] <= 1000  # 1000 fit rank 1, 2000 would fit rank 0


def test_no_more_is_tried_than_allowed() -> None:
    sizes: list[int] = []

    def step(trajs: list[Trajectory]) -> None:
        sizes.append(sum(t.num_tokens for t in trajs))

    assert suggest_max_tokens(tiny(), longest=10, limit_bytes=10**9, step=step) == 640
    assert suggest_max_tokens(tiny(), longest=10, limit_bytes=10**9, step=step, at_most=10) == 10
    assert max(sizes) == 640


def test_errors() -> None:
    policy = tiny()
    with pytest.raises(
        ValueError, match=r"one sequence of 32 tokens takes [\d,]+ bytes but 100,000 are free"
    ):
        suggest_max_tokens(policy, longest=32, limit_bytes=100_000)
    assert all(p.grad is None for p in policy.parameters())
    with pytest.raises(ValueError, match="limit_bytes must be given"):
        suggest_max_tokens(policy, longest=32)
    with pytest.raises(ValueError, match="longest"):
        suggest_max_tokens(policy, longest=1, limit_bytes=10**9)
    with pytest.raises(ValueError, match="at_most"):
        suggest_max_tokens(policy, longest=9, limit_bytes=10**9, at_most=8)
    with pytest.raises(ValueError, match="reserved_bytes must be at least 0"):
        suggest_max_tokens(policy, longest=9, limit_bytes=10**9, reserved_bytes=-1)
    with pytest.raises(ValueError, match="tolerance"):
        suggest_max_tokens(policy, longest=9, limit_bytes=10**9, tolerance=0)
    policy(torch.tensor([[1, 2]])).sum().backward()
    with pytest.raises(ValueError, match="has gradients"):
        suggest_max_tokens(policy, longest=9, limit_bytes=10**9)


@pytest.mark.gpu
def test_the_budget_of_a_gpu() -> None:
    policy = tiny("cuda")
    limit = 64 << 20
    budget = suggest_max_tokens(policy, longest=48, limit_bytes=limit)
    assert budget > 48
    held = torch.cuda.memory_allocated() - parameter_bytes(policy)
    assert peak_of_a_step(policy, budget, 48) + held <= limit * 1.01
