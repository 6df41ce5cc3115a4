import pytest
import torch
from torch import Tensor

from agentrl.ops.peak_memory import peak_bytes


def test_what_lives_at_once_counts_and_what_is_gone_does_not() -> None:
    def step() -> Tensor:
        for _ in range(3):
            torch.zeros(1000)
        kept = torch.zeros(500)
        torch.zeros(250)
        return kept

    assert peak_bytes(step) == 4000
    assert peak_bytes(lambda: (torch.zeros(500), torch.zeros(500), torch.zeros(10))) == 4040
    assert peak_bytes(lambda: None) == 0


def test_what_was_held_before_does_not_count() -> None:
    held = torch.zeros(1000)
    assert peak_bytes(lambda: held.neg_()) == 0
    assert peak_bytes(lambda: held.clone()) == 4000


def test_gradients_and_saved_tensors_count() -> None:
    x = torch.ones(1000, requires_grad=True)
    # exp keeps its result, the sum is one number, its gradient is expanded, exp's gradient becomes x.grad
    peak = peak_bytes(lambda: x.exp().sum().backward())
    assert x.grad is not None
    assert 8000 <= peak <= 12_100


def test_a_view_costs_nothing_and_an_operators_inner_allocations_count() -> None:
    x = torch.zeros(64, 64)
    assert peak_bytes(lambda: x.T[:3].reshape(3, 64)) <= 3 * 64 * 4
    # a sort by key inside: its own buffers are seen, not only its results
    assert peak_bytes(lambda: torch.unique(torch.arange(1000))) > 2 * 8000


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="cpu and cuda"):
        peak_bytes(lambda: None, "meta")


@pytest.mark.gpu
def test_cuda_counters() -> None:
    held = torch.zeros(1 << 20, device="cuda")
    assert peak_bytes(lambda: held.clone(), "cuda") == held.nbytes
    assert peak_bytes(lambda: held.neg_(), "cuda") == 0
