"""The bfloat16 product with a float32 result: exact terms, any layout, nothing that other threads see."""

# M, N sides of the result; K the depth

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.ops.conftest import BOTH_WAYS, choose, needs_gemm
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import log_probs
from agentrl.ops import tiled_head
from agentrl.ops.bfloat16_product import mm_float32_
from agentrl.ops.log_probs import action_log_probs


def draw(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda a: a,
    "columns": lambda a: a.T.contiguous().T,
    "a slice": lambda a: torch.cat([a, a + 1], 1)[:, : a.shape[1]],
    "a slice, columns": lambda a: torch.cat([a, a + 1], 0).T.contiguous().T[: a.shape[0]],
    "every other": lambda a: torch.stack([a, a + 1], 2)[:, :, 0],
    "one row, expanded": lambda a: a[:1].expand_as(a),
    "off alignment": lambda a: torch.cat([a.new_zeros(1), a.flatten()])[1:].view_as(a),
}


def slack(lhs: Tensor, rhs: Tensor) -> float:
    """Of float32 sums of exact terms: K roundings at most, of what the terms' magnitudes add up to."""
    magnitude = (lhs.double().abs() @ rhs.double().abs()).max()
    return lhs.shape[1] * torch.finfo(torch.float32).eps * float(magnitude)


@needs_gemm
@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (3, 5, 7), (1, 9, 4), (9, 1, 4), (33, 70, 65)])
def test_every_layout(left: str, right: str, m: int, n: int, k: int) -> None:
    lhs, rhs = LAYOUTS[left](draw(m, k, 1)), LAYOUTS[right](draw(k, n, 2))
    out = torch.full((m, n), torch.nan)
    assert mm_float32_(out, lhs, rhs) is out
    plain, exact = lhs.float() @ rhs.float(), lhs.double() @ rhs.double()
    assert float((out.double() - exact).abs().max()) <= slack(lhs, rhs)
    assert float((out - plain).abs().max()) <= 2 * slack(lhs, rhs)
    before = torch.linspace(-1e3, 1e3, m * n).view(m, n)
    sums = before.clone()
    assert mm_float32_(sums, lhs, rhs, accumulate=True) is sums
    torch.testing.assert_close(sums, before + out, rtol=1e-6, atol=slack(lhs, rhs))


@needs_gemm
@pytest.mark.parametrize("stride", [2**31, 2**32, 2**40])
def test_a_single_row_or_column_whatever_its_stride(stride: int) -> None:
    """MKL would read a leading dimension's lower 32 bits."""
    line, other = draw(1, 9, 1), draw(9, 5, 2)
    row, column = line.as_strided((1, 9), (stride, 1)), line.as_strided((9, 1), (1, stride))
    wanted = line.float() @ other.float()
    torch.testing.assert_close(mm_float32_(torch.empty(1, 5), row, other), wanted)
    torch.testing.assert_close(mm_float32_(torch.empty(5, 1), other.T, column), wanted.T)


@needs_gemm
def test_a_side_beyond_32_bits_is_refused() -> None:
    one = torch.ones(1, 1).bfloat16()
    for m, n, k in ((1, 1, 2**31), (0, 1, 2**31), (2**31, 0, 1)):
        with pytest.raises(ValueError, match="sides end at 2,147,483,647"):
            mm_float32_(torch.empty(m, n), one.expand(m, k), one.expand(k, n))


@needs_gemm
@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_an_empty_side(m: int, n: int, k: int) -> None:
    out = torch.full((m, n), torch.nan)
    assert torch.equal(mm_float32_(out, draw(m, k, 1), draw(k, n, 2)), torch.zeros(m, n))
    assert torch.equal(mm_float32_(out + 1, draw(m, k, 1), draw(k, n, 2), accumulate=True), torch.ones(m, n))


@needs_gemm
@pytest.mark.parametrize(("m", "n", "k"), [(17, 33, 65), (64, 64, 63), (300, 70, 1)])
def test_a_nan_stays_in_its_row_and_column(m: int, n: int, k: int) -> None:
    """Of the weight too, whose rows are the columns of its transpose."""
    lhs, rhs = draw(m, k, 1), draw(n, k, 2).T
    clean = mm_float32_(torch.empty(m, n), lhs, rhs)
    lhs[m // 2], rhs[:, n // 2] = torch.nan, torch.inf
    found = mm_float32_(torch.empty(m, n), lhs, rhs)
    assert bool(found[m // 2].isnan().all())
    rows, columns = torch.arange(m) != m // 2, torch.arange(n) != n // 2
    assert torch.equal(found[rows][:, columns], clean[rows][:, columns])
    sums = torch.zeros(m, n)
    sums[0] = torch.nan  # of an earlier product
    added = mm_float32_(sums, lhs, rhs, accumulate=True)
    assert bool(added[[0, m // 2]].isnan().all())
    assert torch.equal(added[1:][rows[1:]][:, columns], clean[1:][rows[1:]][:, columns])


@needs_gemm
@pytest.mark.parametrize("accumulate", [False, True])
def test_nothing_is_written_beside_the_result(accumulate: bool) -> None:
    flat = torch.full((3 * 5 + 2,), 7.0)
    mm_float32_(flat[1:-1].view(3, 5), draw(3, 4, 1), draw(5, 4, 2).T, accumulate=accumulate)
    assert (float(flat[0]), float(flat[-1])) == (7.0, 7.0)


@needs_gemm
def test_small_numbers() -> None:
    """Subnormal factors and products may count as zero; a subnormal sum is kept."""
    tiny, small, one = (torch.full((1, 1), value).bfloat16() for value in (1e-39, 1e-20, 1.0))
    assert float(mm_float32_(torch.empty(1, 1), tiny, one)) in (0.0, float(tiny))
    assert float(mm_float32_(torch.empty(1, 1), small, small)) <= 1.1e-40
    sums = torch.full((1, 1), 1e-40)
    assert float(mm_float32_(sums.clone(), one * 0, one, accumulate=True)) == float(sums)


@needs_gemm
def test_inference_mode_and_threads_at_once() -> None:
    lhs, rhs = draw(300, 500, 1), draw(500, 200, 2)
    wanted = torch.ones(300, 200) + lhs.float() @ rhs.float()

    def repeat() -> bool:
        with torch.inference_mode():
            found = [mm_float32_(torch.ones(300, 200), lhs, rhs, accumulate=True) for _ in range(10)]
        return all(bool((sums - wanted).abs().max() <= 2 * slack(lhs, rhs)) for sums in found)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(lambda _: repeat(), range(4)))


def test_tensors_without_memory_are_refused() -> None:
    meta = [torch.empty(3, 3, device="meta", dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    with pytest.raises(NotImplementedError, match="mm_float32_"):
        mm_float32_(meta[0], meta[1], meta[1])


def head_step() -> list[Tensor]:
    """Log-probs and gradients of 40 tokens over a few tiles, bfloat16."""
    hidden, weight = draw(40, 96, 1).requires_grad_(), (draw(500, 96, 2) / 4).requires_grad_()
    targets = torch.arange(40) * 7
    scores = action_log_probs(hidden, weight, targets, tile_bytes=16 * 128 * 4)
    return [scores.detach(), *torch.autograd.grad(scores, (hidden, weight), torch.linspace(-1, 2, 40))]


class Witness(TorchDispatchMode):
    """Before every matrix product of the head, multiplies float32 matrices in another thread."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        super().__init__()
        self.thread = thread
        generator = torch.Generator().manual_seed(3)
        self.lhs, self.rhs = (torch.randn(128, 128, generator=generator) for _ in range(2))
        self.expected = self.product()
        self.products: list[Tensor] = []

    def product(self) -> Tensor:
        """Of the thread; its number of OpenMP threads, and so the bits, are its own."""
        return self.thread.submit(lambda: self.lhs @ self.rhs).result()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in log_probs.PRODUCTS:
            self.products.append(self.product())
        return func(*args, **(kwargs or {}))

    def saw_a_change(self) -> bool:
        assert len(self.products) > 20
        return not all(torch.equal(found, self.expected) for found in self.products)


@contextmanager
def witness() -> Iterator[Witness]:
    with ThreadPoolExecutor(1) as thread, Witness(thread) as found:
        yield found


@pytest.mark.parametrize("native", BOTH_WAYS)
def test_another_thread_multiplies_as_ever(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, native)
    with witness() as found:
        head_step()
    assert not found.saw_a_change()


def test_a_setting_of_the_process_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: the setting under which PyTorch multiplies widened factors as bfloat16."""
    setting: Any = torch.backends.mkldnn.matmul

    def under_the_setting(lhs: Tensor, rhs: Tensor, out: Tensor) -> None:
        before, setting.fp32_precision = setting.fp32_precision, "bf16"
        try:
            torch.mm(lhs, rhs, out=out)
        finally:
            setting.fp32_precision = before

    choose(monkeypatch, native=False)
    monkeypatch.setattr(tiled_head, "wide_product", under_the_setting)
    lhs, rhs = draw(128, 128, 1).float() * 1.001, draw(128, 128, 2).float()
    rounded = torch.empty(128, 128)
    under_the_setting(lhs, rhs, rounded)
    if torch.allclose(rounded, lhs @ rhs, atol=1e-3):
        pytest.skip("without instructions for bfloat16 the setting changes nothing")
    with witness() as found:
        head_step()
    assert found.saw_a_change()


@pytest.mark.parametrize("native", BOTH_WAYS)
def test_results_do_not_depend_on_other_threads(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same operators, and the same bits, alone and beside a thread that waits."""
    choose(monkeypatch, native)

    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Names() as alone:
        expected = head_step()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with Names() as beside:
            found = head_step()
    finally:
        stop.set()
        thread.join()
    assert beside.seen == alone.seen
    assert ("agentrl::mm_float32_" in alone.seen) == native
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
