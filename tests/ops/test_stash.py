"""Exponentials kept in the weight's gradient: read once, for any tokens, and only where they may be kept."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import log_probs
from agentrl.ops.head_inputs import read_head_inputs
from agentrl.ops.log_probs import action_log_probs
from agentrl.ops.peak_memory import peak_bytes
from agentrl.ops.stash import Stash
from agentrl.ops.tiles import Buffers

CLOSE = {"rtol": 1e-11, "atol": 1e-13}


def problem(n: int, v: int, d: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((n, d), (v, d))
    )
    return hidden, weight, torch.randint(v, (n,), generator=generator)


def stash_of(score: Tensor) -> Any:
    node: Any = score.grad_fn
    return node.stash


def test_any_tokens_can_be_read_back_from_both_areas() -> None:
    """9 tokens of width 4: 4 stand in the gradient, 3 in memory of their own, 2 nowhere."""
    hidden, weight, targets = problem(9, 50, 4)
    inputs = read_head_inputs("test", 2, hidden, weight, targets, tile_bytes=8 * 60)
    for extra, kept in ((0, 4), (3 * 50 * 8, 4), (5 * 50 * 8, 9)):  # a thin tile of 3 is not worth keeping
        stash = Stash.reserve(inputs, 9, extra)
        assert stash.maxima.shape[1] == kept
        plane, maxima = torch.rand(9, 50).double(), torch.rand(9).double()
        for tile in stash.grid.walk(vocab_outermost=False):
            stash.keep(tile, plane[tile.n0 : tile.n1, tile.v0 : tile.v1].clone(), maxima)
        for tokens in ([0, 1, 2, 3, 4, 5, 6, 7, 8], [1, 3, 4, 6, 8], [5], [8], [0, 3]):
            seen = 0
            chosen = stash.select(torch.tensor(tokens))
            for tile in chosen.grid.walk(vocab_outermost=True):
                held = chosen.held(tile, Buffers(hidden.device))
                mine = tokens[tile.n0 : tile.n1]
                assert (held is None) == (mine[0] >= kept)
                if held is not None:
                    assert torch.equal(held[0], plane[mine, tile.v0 : tile.v1])
                    assert torch.equal(held[1].squeeze(1), maxima[mine])
                    seen += held[0].numel()
            assert seen == 50 * sum(token < kept for token in tokens)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("entropy", [False, True])
def test_a_second_backward_recomputes(softcap: float | None, entropy: bool) -> None:
    hidden, weight, targets = problem(30, 70, 8)
    bias, temperature = (
        torch.randn(70).double().requires_grad_(),
        (torch.rand(30).double() + 1).requires_grad_(),
    )
    leaves = (hidden, weight, bias, temperature)

    def loss(**keywords: Any) -> Tensor:
        found = action_log_probs(
            hidden, weight, targets, bias=bias, temperature=temperature, softcap=softcap,
            return_entropy=True, tile_bytes=900, **keywords,
        )  # fmt: skip
        gain = torch.linspace(-1, 1, 30).double().relu()  # half of the tokens are idle
        return (gain * found[0] + (gain * found[1] if entropy else 0)).sum()

    kept = loss()
    first = [part.clone() for part in torch.autograd.grad(kept, leaves, retain_graph=True)]
    second, plain = torch.autograd.grad(kept, leaves), torch.autograd.grad(loss(recompute=True), leaves)
    torch.testing.assert_close(first, list(plain), **CLOSE)
    torch.testing.assert_close(second, plain, **CLOSE)


def test_no_gradient_at_all_gives_the_stash_back_as_zeros() -> None:
    hidden, weight, targets = problem(5, 40, 8)
    score = action_log_probs(hidden, weight, targets)
    stash = stash_of(score)
    found = torch.autograd.grad((score * 0).sum(), weight)[0]
    assert found.data_ptr() == stash.weight_gradient.data_ptr()
    assert torch.equal(found, torch.zeros_like(weight))


def test_it_is_kept_only_where_it_pays_and_rounds_nothing() -> None:
    def stashed(n: int, d: int, dtype: torch.dtype = torch.float32, **keywords: Any) -> bool:
        hidden, weight, targets = problem(n, 40, d, dtype)
        return stash_of(action_log_probs(hidden, weight, targets, **keywords)) is not None

    assert stashed(32, 4)
    assert not stashed(33, 4)  # 8 D tokens and one
    assert not stashed(0, 4)
    assert not stashed(32, 4, torch.bfloat16)
    assert not stashed(32, 4, recompute=True)
    hidden, weight, targets = problem(32, 40, 4)
    assert stash_of(action_log_probs(hidden, weight.detach(), targets, return_entropy=True)[0]) is None
    with torch.autograd.graph.save_on_cpu():
        assert stash_of(action_log_probs(hidden, weight, targets)) is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_keeps_nothing_until_backward(reentrant: bool) -> None:
    hidden, weight, targets = problem(8, 40, 8)
    upstream = torch.linspace(-1, 1, 8).double()
    with log_probs.ProductCount() as counted:
        score: Any = checkpoint(action_log_probs, hidden, weight, targets, use_reentrant=reentrant)
        torch.autograd.backward(score, upstream)
    # forward, and again before backward; only a reentrant one leaves what is kept to the head
    assert counted.operations / (2 * 8 * 40 * 8) == (4 if reentrant else 5)
    wanted = torch.autograd.grad(action_log_probs(hidden, weight, targets), (hidden, weight), upstream)
    torch.testing.assert_close((hidden.grad, weight.grad), wanted, **CLOSE)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_what_graphs_hold_while_they_wait() -> None:
    """Three graphs: three gradients of the weight, or a few numbers a token."""
    hidden, weight, targets = problem(64, 32_000, 32, torch.float32)
    gradient, tiles = weight.numel() * 4, 5 << 20

    def peak(recompute: bool) -> int:
        return peak_bytes(
            lambda: [
                action_log_probs(hidden, weight, targets, recompute=recompute, tile_bytes=4 << 20)
                for _ in range(3)
            ]
        )

    assert 3 * gradient <= peak(False) <= 3 * gradient + tiles
    assert peak(True) <= tiles


def test_a_frozen_head_holds_nothing_of_hidden() -> None:
    hidden, weight, targets = problem(8, 40, 4)
    rows = hidden * 1
    scores = action_log_probs(rows, weight.detach(), targets)
    rows.mul_(2)  # which a tensor that waits for backward would forbid
    kept = weakref.ref(rows)
    del rows
    assert kept() is None
    (found,) = torch.autograd.grad(scores.sum(), hidden)
    (wanted,) = torch.autograd.grad(action_log_probs(hidden, weight.detach(), targets).sum(), hidden)
    assert torch.equal(found, wanted)
