"""The benchmark of rival heads tells a right gradient from a wrong one, and says what it leaves out."""

import pytest
import torch
from torch import Tensor

import log_probs_peers as bench
from log_probs import HEADS, Case, Head, Size


def drawn(active: float = 1.0) -> Case:
    return Case.draw(700, 90, 12, torch.float64, "cpu", active)


@pytest.mark.parametrize("active", [1.0, 0.25])
def test_exact_gradients_are_those_of_full_logits(active: float) -> None:
    case = drawn(active)
    for got, want in zip(bench.exact_gradients(case, case.upstream), HEADS["full"].step(case), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_a_head_that_takes_one_tokens_upstream_gradient_for_all_is_called_wrong() -> None:
    case = drawn()

    def step(case: Case) -> tuple[Tensor, ...]:
        log_probs = HEADS["full"].score(case)
        return torch.autograd.grad(log_probs, case.leaves(), case.upstream[:1].expand(len(log_probs)))

    errors = bench.gradient_errors({"full": HEADS["full"], "planted": Head(HEADS["full"].score, step)}, case)
    assert errors["full"] < 1e-12
    assert errors["planted"] > bench.WRONG
    figures = {"seconds": 1.0, "ratio": 1.0, "turns": 1, "over_bytes": 0, "error": 0.0}
    size = Size("", 700, 90, 12, "float64", ("full", "planted"))
    rows = bench.rows_of(size, {name: figures | {"gradient_error": e} for name, e in errors.items()})
    assert ["wrong" in row for row in rows] == [False, True]


def test_a_gradient_that_is_not_a_number_is_called_wrong() -> None:
    figures = {"seconds": 1.0, "ratio": 1.0, "turns": 1, "over_bytes": 0, "error": 0.0}
    size = Size("", 1, 1, 1, "float64", ("full",))
    assert "wrong" in bench.rows_of(size, {"full": figures | {"gradient_error": float("nan")}})[0]


def test_a_rival_that_does_not_run_here_is_left_out_with_its_reason() -> None:
    def missing() -> dict[str, Head]:
        raise ModuleNotFoundError("No module named 'rival'")

    def broken(case: Case) -> tuple[Tensor, ...]:
        raise RuntimeError("no compiler\nand a long trace")

    rivals, left_out = bench.load(
        {
            "right": lambda: {"full": HEADS["full"]},
            "missing": missing,
            "broken": lambda: {"broken": Head(HEADS["full"].score, broken)},
        }
    )
    assert list(rivals) == ["right"]
    assert left_out == {
        "missing": "ModuleNotFoundError: No module named 'rival'",
        "broken": "RuntimeError: no compiler",
    }


@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="torch has no chunked head")
def test_torchs_own_head_is_measured_without_any_package() -> None:
    rivals, left_out = bench.load({"torch": bench.load_torch})
    assert not left_out
    case = Case.draw(70, 90, 12, torch.float32, "cpu")
    errors = bench.gradient_errors(rivals["torch"], case)
    assert errors.keys() == {"torch", "torch, sum"}
    assert max(errors.values()) < 1e-5  # of the plain sum for the second


def test_every_run_has_full_logits_first_then_ours_then_a_rival() -> None:
    rivals = {
        "one": {"one": HEADS["chunked"]},
        "torch": {"torch": HEADS["chunked"], bench.UNIFORM: HEADS["full"]},
    }
    for size, heads in bench.sizes_of(rivals, quick=False).items():
        assert size.names == tuple(heads)
        assert size.names[0] == "full"
        assert size.names[1] == ("tiled" if size.active == 1 else "fused, active=")
        assert size.table in size.names
        assert (bench.UNIFORM in size.names) == (size.table == "torch" and size.active == 1)
