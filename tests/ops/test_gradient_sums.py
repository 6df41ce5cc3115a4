"""16-bit gradients summed in float32 within their own memory: right for every shape, and no byte more."""

from typing import Any

import pytest
import torch
from tests.ops.conftest import BOTH_WAYS, choose, needs_gemm, relative_error
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import log_probs
from agentrl.ops.fused_loss import fused_policy_loss
from agentrl.ops.gradient_sums import GradientSums, Phase
from agentrl.ops.log_probs import action_log_probs
from agentrl.ops.peak_memory import peak_bytes
from agentrl.ops.tiles import Grid, Precision, default_tile_bytes


def problem(n: int, v: int, d: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    """Hidden, weight, bias and temperatures; targets; an upstream gradient, 0 for a third of the tokens."""
    generator = torch.Generator().manual_seed(n + v)
    hidden, weight, bias, upstream = (
        torch.randn(*shape, generator=generator) for shape in ((n, d), (v, d), (v,), (n,))
    )
    temperatures = torch.rand(n, generator=generator) + 0.5
    leaves = [hidden.to(dtype), weight.to(dtype), bias, temperatures]
    upstream *= torch.rand(n, generator=generator) < 0.7
    return [leaf.requires_grad_() for leaf in leaves], torch.randint(v, (n,), generator=generator), upstream


def full_gradients(leaves: list[Tensor], targets: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
    hidden, weight, bias, temperatures = leaves
    logits = (hidden @ weight.T + bias) / temperatures[:, None]
    log_probs = logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    return torch.autograd.grad(log_probs, leaves, upstream.to(log_probs.dtype))


# more vocabulary, more tokens, as many of both (odd and even), widths and sizes that nothing divides
SHAPES = [(40, 90, 8), (90, 40, 8), (33, 33, 5), (64, 64, 6), (41, 93, 7), (7, 100, 3)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "v", "d"), SHAPES)
@pytest.mark.parametrize("idle", [False, True])
def test_errors_stay_within_twice_the_plain_ones(
    n: int, v: int, d: int, dtype: torch.dtype, idle: bool
) -> None:
    leaves, targets, upstream = problem(n, v, d, dtype)
    upstream = upstream if idle else upstream + (upstream == 0)
    exact = full_gradients([t.detach().double().requires_grad_() for t in leaves], targets, upstream)
    plain = full_gradients(leaves, targets, upstream)
    hidden, weight, bias, temperatures = leaves
    for tile_bytes in (64, 300, 1000, 1 << 20):  # the last one leaves the sums memory of their own
        keywords: Any = {"bias": bias, "temperature": temperatures, "tile_bytes": tile_bytes}
        score = action_log_probs(hidden, weight, targets, **keywords)
        fused = fused_policy_loss(hidden, weight, targets, lambda p, _, i: upstream[i] * p, **keywords)
        for ours in (torch.autograd.grad(score, leaves, upstream), torch.autograd.grad(fused.loss, leaves)):
            for mine, theirs, true in zip(ours, plain, exact, strict=True):
                assert relative_error(mine, true) <= 2 * relative_error(theirs, true) + 1e-3


def test_rows_written_before_their_sums_are_read_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: the lent rows of the weight's gradient do not wait."""
    leaves, targets, upstream = problem(40, 90, 8, torch.bfloat16)
    borrow = GradientSums._borrow

    def impatient(self: Any, *arguments: Any) -> Any:
        held = borrow(self, *arguments)
        self.phases = [Phase(0, self.phases[-1].stop, inner=True, outer=True)]
        return held

    monkeypatch.setattr(GradientSums, "_borrow", impatient)
    exact = full_gradients([t.detach().double().requires_grad_() for t in leaves], targets, upstream)
    score = action_log_probs(*leaves[:2], targets, bias=leaves[2], temperature=leaves[3], tile_bytes=300)
    ours = torch.autograd.grad(score, leaves, upstream)
    assert relative_error(ours[0], exact[0]) > 0.1


def test_many_same_signed_tokens_stay_within_budget_in_lent_memory() -> None:
    """The weight's sums [12, 8] stand half in its own gradient, half in that of 16,384 tokens."""
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.rand(16_384, 8, generator=generator) + 0.5).bfloat16().requires_grad_()
    weight = (torch.randn(12, 8, generator=generator) * 0.1).bfloat16().requires_grad_()
    targets = torch.zeros(16_384, dtype=torch.int64)
    upstream = torch.rand(16_384, generator=generator) + 0.5
    leaves = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    exact_score = (leaves[0] @ leaves[1].T).log_softmax(-1)[:, 0]
    (exact,) = torch.autograd.grad(exact_score, leaves[1], upstream.double())
    score = action_log_probs(hidden, weight, targets, tile_bytes=380)
    _, found = torch.autograd.grad(score, (hidden, weight), upstream)
    assert float(((found.double() - exact).abs() / exact.abs()).max()) <= 4e-3


class _WithoutProducts(TorchDispatchMode):
    """Leaves out the matrix products, which allocate nothing, so that large sizes take no time."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in log_probs.PRODUCTS:
            return kwargs["out"] if "out" in kwargs else args[0]
        return func(*args, **kwargs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("native", BOTH_WAYS)
@pytest.mark.parametrize("name", ["tiled", "tiled, input", "fused"])
@pytest.mark.parametrize(("n", "v", "d"), [(2048, 6000, 1024), (4096, 4000, 1024), (16_384, 1000, 512)])
def test_memory_in_16_bits_is_flat(
    name: str, n: int, v: int, d: int, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32 sums of one gradient beside it would take 8 and 16 MB; up to 14 MB are tiles."""
    choose(monkeypatch, native)
    assert bytes_over_gradients(name, log_probs.Case.draw(n, v, d, torch.bfloat16, "cpu")) <= 15_500_000


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("native", BOTH_WAYS)
@pytest.mark.parametrize("name", ["tiled", "fused"])
def test_memory_of_a_frozen_16_bit_weight(name: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden's slope waits beside its gradient (4 MB); nothing of that size is ever widened."""
    choose(monkeypatch, native)
    case = log_probs.Case.draw(2048, 6000, 1024, torch.bfloat16, "cpu")
    case.weight.requires_grad_(False)
    assert bytes_over_gradients(name, case) <= 15_500_000


def bytes_over_gradients(name: str, case: Any) -> int:
    """The peak of a step without its matrix products, less the gradients."""

    def measured() -> Any:
        with _WithoutProducts():
            return log_probs.HEADS[name].step(case)

    return peak_bytes(measured) - sum(leaf.numel() * leaf.element_size() for leaf in case.leaves())


RECOMPUTED = log_probs.Head.plain(
    lambda case: action_log_probs(case.hidden, case.weight, case.targets, recompute=True)
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("native", BOTH_WAYS)
@pytest.mark.parametrize(
    ("name", "dtype", "n", "v", "d"),
    [
        ("fused", torch.bfloat16, 4096, 6000, 1024),  # sums, tile and copied rows of 4 MB each
        ("tiled", torch.bfloat16, 2560, 4000, 2048),  # rows of tiles that wait
        ("recomputed", torch.float32, 3072, 4000, 2048),  # rows of one tile, as large as it
        ("tiled", torch.float32, 4096, 4000, 1024),  # tiles of two sizes, on either side of token 1,024
    ],
)
def test_memory_where_some_tokens_are_idle(
    name: str, dtype: torch.dtype, n: int, v: int, d: int, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others' rows of hidden are copied, and their number cuts tiles where none would be cut."""
    choose(monkeypatch, native)
    monkeypatch.setitem(log_probs.HEADS, "recomputed", RECOMPUTED)
    assert bytes_over_gradients(name, log_probs.Case.draw(n, v, d, dtype, "cpu", 0.9)) <= 15_500_000


def test_16_bit_tiles_have_shapes_that_use_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than columns in a bfloat16 product may leave one thread to do it all."""
    choose(monkeypatch, native=False)
    settings = Precision(torch.bfloat16, torch.device("cpu"), "float32")
    for num_tokens in (512, 1024, 4096, 16_384):
        tile_bytes = default_tile_bytes(settings, 1, 1024, stashed=True)
        grid = Grid.fit(num_tokens, 32_000, 1024, tile_bytes, settings)
        tiles = list(grid.walk(vocab_outermost=True))
        assert {tile.n1 - tile.n0 for tile in tiles} == {512}
        assert all(tile.v1 - tile.v0 > 512 for tile in tiles)


@needs_gemm
def test_native_tiles_are_square_at_a_wide_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 logits of native products hold no copies, so their tiles keep the size that is fast."""
    choose(monkeypatch, native=True)
    for logits, shape in (("float32", (1024, 1024)), ("input", (512, 896))):
        settings = Precision(torch.bfloat16, torch.device("cpu"), logits)
        tile_bytes = default_tile_bytes(settings, 1, 1024, stashed=True)
        grid = Grid.fit(4096, 1 << 20, 1024, tile_bytes, settings)
        assert (grid.tokens, grid.vocab) == shape


@pytest.mark.parametrize("native", BOTH_WAYS)
def test_tiles_wait_for_a_common_product_where_the_weight_is_wide(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four token tiles of one column: two products [v, D] of two each, not four, and none is lost."""
    choose(monkeypatch, native)
    product = "agentrl::mm_float32_" if native else "aten::mm"
    case = log_probs.Case.draw(64, 96, 32, torch.bfloat16, "cpu")
    seen: list[int] = []

    class Depths(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._schema.name == product:
                lhs, rhs = [arg for arg in args if isinstance(arg, Tensor)][-2:]
                if rhs.shape[1] == 32 and lhs.stride(0) == 1:
                    seen.append(lhs.shape[1])
            return func(*args, **(kwargs or {}))

    logits: Any = "float32" if native else "input"  # whose tiles are copied to 16 bits
    score = action_log_probs(case.hidden, case.weight, case.targets, tile_bytes=16 * 32 * 4, logits=logits)
    with Depths():
        case.backward(score)
    assert set(seen) == {32}


def test_what_lent_memory_costs() -> None:
    """The tiles of as many rows as the inner gradient has are computed twice."""
    case = log_probs.Case.draw(64, 512, 32, torch.bfloat16, "cpu")

    def products(tile_bytes: int) -> float:
        with log_probs.ProductCount() as counted:
            score = action_log_probs(case.hidden, case.weight, case.targets, tile_bytes=tile_bytes)
            case.backward(score)
        return counted.operations / (2 * 64 * 512 * 32)

    assert products(64 * 32 * 4) == 4.0, "their own"
    assert products(64 * 32 * 4 - 4) == pytest.approx(4 + 64 / 512, abs=0.13)
    assert products(64 * 32 * 4 - 4) > 4.0
