"""Attention over packed rows: every backend against a loop over the rule, forward and backward."""

import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.ops import attention as attention_module
from agentrl.ops.attention import Backend, attention
from agentrl.ops.visibility import check_visibility, dense_mask, plan_segments, plans_of


def forest_row(rng: np.random.Generator, length: int, num_padding: int = 0) -> tuple[list[int], list[int]]:
    """Positions and visible_until of a random prefix forest laid out depth first, then padding."""
    positions, until = [0] * length, list(range(1, length + 1))

    def fill(start: int, end: int, depth: int, position: int) -> None:
        while start < end:
            last = int(rng.integers(start + 1, end + 1))
            own = int(rng.integers(start + 1, last + 1)) if depth < 3 else last
            for j in range(start, own):
                positions[j], until[j] = position + j - start, last
            fill(own, last, depth + 1, position + own - start)
            start = last

    fill(0, length - num_padding, 0, 0)
    return positions, until


def forests(seed: int, num_rows: int, length: int, num_padding: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    rows = [forest_row(rng, length, num_padding) for _ in range(num_rows)]
    return torch.tensor([p for p, _ in rows]), torch.tensor([u for _, u in rows])


def by_the_rule(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, until: Tensor, window, softcap, scale
) -> Tensor:
    """The definition, one query at a time: softmax over the keys that it reads and no others."""
    num_rows, num_heads, length, width = q.shape
    out = []
    for r in range(num_rows):
        for h in range(num_heads):
            g = h * k.shape[1] // num_heads
            for i in range(length):
                read = [
                    j
                    for j in range(i + 1)
                    if i < until[r, j] and (window is None or positions[r, i] - positions[r, j] < window)
                ]
                scores = k[r, g, read] @ q[r, h, i] * (width**-0.5 if scale is None else scale)
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                out.append(scores.softmax(0) @ v[r, g, read])
    return torch.stack(out).view(num_rows, num_heads, length, -1)


def random_qkv(seed: int, num_rows: int, length: int, dtype=torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(num_rows, heads, length, 8, generator=generator, dtype=dtype).requires_grad_()
        for heads in (4, 2, 2)
    ]


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    length=st.integers(1, 14),
    window=st.sampled_from([None, 1, 3, 100]),
    softcap=st.sampled_from([None, 2.0]),
    scale=st.sampled_from([None, 0.3]),
)
def test_backends_follow_the_rule_forward_and_backward(seed, length, window, softcap, scale) -> None:
    positions, until = forests(seed, 2, length, num_padding=seed % min(3, length))
    qkv = random_qkv(seed, 2, length)
    want = by_the_rule(*qkv, positions, until, window, softcap, scale)
    direction = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(seed))
    want_grads = torch.autograd.grad((want * direction).sum(), qkv, materialize_grads=True)
    for backend in ("segments", "dense", "auto"):
        got = attention(*qkv, positions, until, window=window, softcap=softcap, scale=scale, backend=backend)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
        grads = torch.autograd.grad((got * direction).sum(), qkv, materialize_grads=True)
        for grad, want_grad in zip(grads, want_grads, strict=True):
            torch.testing.assert_close(grad, want_grad, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_long_pieces_and_padded_calls_agree_with_one_dense_mask(monkeypatch, window, softcap) -> None:
    monkeypatch.setattr("agentrl.ops.visibility.MAX_MASKED_QUERIES", 37)
    positions, until = forests(3, 3, 150, num_padding=11)
    qkv = random_qkv(3, 3, 150)
    outputs, grads = [], []
    for backend in ("segments", "dense"):
        outputs.append(attention(*qkv, positions, until, window=window, softcap=softcap, backend=backend))
        grads.append(torch.autograd.grad(outputs[-1].square().sum(), qkv))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-10, atol=1e-12)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 2.0), (5, 2.0)])
def test_flex_forward_agrees_on_cpu(window, softcap) -> None:
    positions, until = forests(5, 2, 45, num_padding=4)
    q, k, v = (x.detach().float() for x in random_qkv(5, 2, 45))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile", UserWarning)
        got = attention(q, k, v, positions, until, window=window, softcap=softcap, backend="flex")
    want = attention(q, k, v, positions, until, window=window, softcap=softcap, backend="dense")
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)


def listed_blocks(counts: Tensor, indices: Tensor) -> Tensor:
    """Which key blocks [R, q, k] a BlockMask lists for each query block."""
    listed = torch.zeros(indices[:, 0].shape, dtype=torch.bool)
    for r, q in np.ndindex(*listed.shape[:2]):
        listed[r, q, indices[r, 0, q, : int(counts[r, 0, q])].long()] = True
    return listed


@pytest.mark.parametrize("window", [None, 400])
@pytest.mark.parametrize("length", [640, 700])
def test_flex_blocks_cover_what_is_read_and_call_full_only_what_is(length: int, window: int | None) -> None:
    rng_positions, rng_until = forests(4, 3, length, num_padding=30)
    flat = torch.arange(length) // 300 * 300
    positions = torch.cat([rng_positions, (torch.arange(length) - flat)[None], torch.arange(length)[None]])
    until = torch.cat([rng_until, (flat + 300).clamp(max=length)[None], torch.full((1, length), length)])
    mask: Any = attention_module._plan("flex", positions, until, window, 8)
    exact = torch.nn.functional.pad(
        dense_mask(positions, until, window), (0, -length % 128, 0, -length % 128)
    )
    tiles = exact.unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
    some, every = tiles.any(4).any(2), tiles.all(4).all(2)
    full = listed_blocks(mask.full_kv_num_blocks, mask.full_kv_indices)
    partial = listed_blocks(mask.kv_num_blocks, mask.kv_indices)
    assert full.any()
    assert not (full & partial).any()
    assert not (full & ~every).any()
    assert not (some & ~(full | partial)).any()
    if window is None:  # in flat rows no block is listed in vain
        assert torch.equal((full | partial)[3:], some[3:])


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (50, None), (None, 2.0)])
def test_flex_backward_agrees_on_cuda(window, softcap) -> None:
    positions, until = forests(6, 2, 300, num_padding=20)
    qkv = [x.detach().cuda().float().requires_grad_() for x in random_qkv(6, 2, 300)]
    exact = [x.detach().double().cpu().requires_grad_() for x in qkv]
    got = attention(*qkv, positions.cuda(), until.cuda(), window=window, softcap=softcap, backend="flex")
    want = attention(*exact, positions, until, window=window, softcap=softcap, backend="dense")
    torch.testing.assert_close(got.cpu().double(), want, rtol=2e-3, atol=2e-3)
    for a, b in zip(
        torch.autograd.grad(got.square().sum(), qkv),
        torch.autograd.grad(want.square().sum(), exact),
        strict=True,
    ):
        torch.testing.assert_close(a.cpu().double(), b, rtol=5e-3, atol=5e-3)


def test_window_counts_positions_not_places_in_the_row() -> None:
    # a prompt of 3, then two branches of 3: the second branch stands 3 further right than its position says
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 3, 4, 5]])
    until = torch.tensor([[9, 9, 9, 6, 6, 6, 9, 9, 9]])
    qkv = [x.detach() for x in random_qkv(0, 1, 9)]
    for backend in ("segments", "dense"):
        packed = attention(*qkv, positions, until, window=2, backend=backend)
        alone = [x[:, :, [0, 1, 2, 6, 7, 8]] for x in qkv]
        want = attention(*alone, torch.arange(6)[None], torch.full((1, 6), 6), window=2, backend=backend)
        torch.testing.assert_close(packed[:, :, 6:], want[:, :, 3:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["segments", "dense", "auto"])
def test_other_sequences_change_no_bit(backend: Backend) -> None:
    positions, until = forests(8, 2, 64)
    q, k, v = (x.detach().float() for x in random_qkv(8, 2, 64))
    before = attention(q, k, v, positions, until, backend=backend)
    poked = 20
    reads = dense_mask(positions, until)[0, :, poked]
    for x in (q, k, v):
        x[0, :, poked] = 100.0
    after = attention(q, k, v, positions, until, backend=backend)
    assert torch.equal(before[0, :, ~reads], after[0, :, ~reads])
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0, :, reads], after[0, :, reads])


def test_segments_compute_about_the_scores_that_are_read() -> None:
    # 16 sequences of 128 in one row of 2048: 16 * 128 * 128 scores, one 16th of a dense mask's
    until = (torch.arange(2048) // 128 * 128 + 128)[None]
    positions = torch.arange(2048)[None] % 128
    assert plan_segments(positions, until).cost == 16 * 128 * 128
    # a window of 64 over one sequence of 2048: blocks of 64 read at most 128 keys
    whole = plan_segments(torch.arange(2048)[None], torch.full((1, 2048), 2048), window=64)
    assert whole.cost <= 2048 * 128
    # a prompt of 1024 and 8 responses of 128: the first is one stretch with the prompt, each other one reads
    # the prompt and itself
    until = torch.cat([torch.full((1024,), 2048), torch.arange(8).repeat_interleave(128) * 128 + 1152])[None]
    positions = torch.cat([torch.arange(1024), 1024 + torch.arange(1024) % 128])[None]
    assert plan_segments(positions, until).cost == 1152 * 1152 + 7 * 128 * 1152


def test_padding_costs_no_score() -> None:
    plan = plan_segments(torch.zeros(1, 50, dtype=torch.int64), torch.arange(1, 51)[None])
    assert plan.cost == 0
    assert plan.num_alone == 50


def test_the_plan_is_made_once_per_tensor_and_dies_with_it(monkeypatch) -> None:
    made = []

    def count(*args, **kwargs):
        made.append(args)
        return plan_segments(*args, **kwargs)

    monkeypatch.setattr(attention_module, "plan_segments", count)
    positions, until = forests(1, 2, 30)
    qkv = random_qkv(1, 2, 30)
    for _ in range(3):
        attention(*qkv, positions, until)
    assert len(made) == 1
    first = attention(*qkv, positions, until)
    until.copy_(torch.full_like(until, 30))  # changed in place: another plan
    assert not torch.allclose(first, attention(*qkv, positions, until))
    assert len(made) == 2
    attention(*qkv, positions, until.clone())
    assert len(made) == 3
    made.clear()
    gone = weakref.ref(until)
    del until
    assert gone() is None


def test_inference_tensors_work_and_are_not_remembered() -> None:
    with torch.inference_mode():
        positions, until = forests(1, 2, 30)
        qkv = [x.detach() for x in random_qkv(1, 2, 30)]
        first = attention(*qkv, positions, until)
        until.fill_(30)
        assert not torch.allclose(first, attention(*qkv, positions, until))
        assert plans_of(positions, until) == {}


def test_wrong_input_is_refused() -> None:
    positions, until = forests(1, 2, 30)
    q, k, v = random_qkv(1, 2, 30)
    with pytest.raises(ValueError, match="no multiple"):
        attention(q[:, :3], k, v, positions, until)
    with pytest.raises(ValueError, match="differ in rows"):
        attention(q, k, v[:, :1], positions, until)
    with pytest.raises(ValueError, match=r"must be \[R, L\]"):
        attention(q, k, v, positions, until[:, :-1])
    with pytest.raises(ValueError, match="no multiple of 0 key-value heads"):
        attention(q, k[:, :0], v[:, :0], positions, until)
    for window in (0, 2.5, True):
        with pytest.raises(ValueError, match=r"window must be at least 1.*a whole number"):
            attention(q, k, v, positions, until, window=window)  # pyright: ignore
    for softcap in (0.0, -2.0, float("nan"), float("inf"), True):
        with pytest.raises(ValueError, match="softcap must be positive and finite"):
            attention(q, k, v, positions, until, softcap=softcap)
    with pytest.raises(ValueError, match="scale must be finite"):
        attention(q, k, v, positions, until, scale=float("nan"))
    with pytest.raises(ValueError, match="backend must be one of"):
        attention(q, k, v, positions, until, backend="fast")  # pyright: ignore
    with pytest.raises(ValueError, match="row's end"):
        attention(q, k, v, positions, until + 1)
    with pytest.raises(ValueError, match="every token reads itself"):
        check_visibility(positions, torch.zeros_like(until))
    with pytest.raises(ValueError, match="int64"):
        check_visibility(positions.int(), until)
