"""Muon: singular values near one, directions kept, and the library's update without its rounding."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from agentrl.train.muon import Muon, orthogonalized


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 4, 4), (2, 5, 31), (2, 31, 5), (1, 1, 7)])
def test_singular_values_come_near_one_and_directions_stay(shape: tuple[int, int, int]) -> None:
    count, n, m = shape
    generator = torch.Generator().manual_seed(0)
    rank = min(n, m)
    u, _ = torch.linalg.qr(torch.randn(count, n, rank, generator=generator, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(count, m, rank, generator=generator, dtype=torch.float64))
    scales = torch.linspace(0.3, 5.0, rank, dtype=torch.float64)
    found = u.mT @ orthogonalized(u * scales @ v.mT) @ v
    values = found.diagonal(dim1=1, dim2=2)
    assert ((values > 0.5) & (values < 1.5)).all()
    torch.testing.assert_close(found, torch.diag_embed(values), rtol=0, atol=1e-10)


def test_zeros_stay_zeros() -> None:
    assert torch.equal(orthogonalized(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


def test_it_is_the_librarys_up_to_the_rounding_of_bfloat16() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 8), (24, 8), (8, 32), (32, 8), (8, 8)]
    ours = [torch.randn(shape, generator=generator) for shape in shapes]
    theirs = [matrix.clone().requires_grad_() for matrix in ours]
    muon = Muon(ours, weight_decay=0.1)
    library = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        start = [matrix.clone() for matrix in ours]
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        muon.step(0.01)
        library.step()
        for a, b, before in zip(ours, theirs, start, strict=True):
            update = a - before
            assert (a - b).norm() < 0.05 * update.norm()
            b.data.copy_(a)  # so that rounding does not add up


def test_groups_may_be_updated_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(16, 8), (8, 16), (16, 8), (8, 8)]
    ours = [torch.randn(shape, generator=generator) for shape in shapes]
    theirs = [matrix.clone() for matrix in ours]
    muon, other = Muon(ours), Muon(theirs)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            for a, b in zip(ours, theirs, strict=True):
                a.grad = torch.randn(a.shape, generator=generator)
                b.grad = a.grad.clone()
            muon.step(0.01)
            other.step(0.01, pool.map)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def test_what_is_no_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Muon updates matrices; got a parameter of shape \(3,\)"):
        Muon([torch.zeros(3)])
