"""Muon, an optimizer for the matrices of a small model on a CPU."""

# B matrices of one shape [n, m], k the smaller of its sides

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

# Quintic that pulls singular values of (0, 1] to about one in few steps: Jordan et al., "Muon", 2024.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def orthogonalized(matrices: Tensor) -> Tensor:
    """matrices [B, n, m] with their singular values brought to between 0.5 and 1.5.

    Directions stay: U S V' becomes about U V', by Newton-Schulz iterations in the dtype of `matrices`. Values
    below a hundredth of the norm end lower, and zeros stay zeros.

    >>> orthogonalized(torch.diag(torch.tensor([1.0, 4.0]))[None]).round()
    tensor([[[1., 0.],
             [0., 1.]]])
    """
    a, b, c = _COEFFICIENTS
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    is_tall = x.shape[1] > x.shape[2]
    for _ in range(_ITERATIONS):
        gram = x.mT @ x if is_tall else x @ x.mT  # [B, k, k]
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, polynomial, beta=a) if is_tall else torch.baddbmm(x, polynomial, x, beta=a)
    return x


class Muon:
    """Updates matrices along their orthogonalized Nesterov momentum.

    An update has the root mean square of one of AdamW, 0.2 times the learning rate (Liu et al., "Muon is
    scalable for LLM training", 2025), so both optimizers can share a learning rate. `torch.optim.Muon` gives
    the same up to the rounding of its bfloat16 products, which a CPU without instructions for them emulates
    at a hundredth of the speed; here matrices of one shape share a call, in their own dtype.
    """

    def __init__(
        self, matrices: Sequence[Tensor], *, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        self.momentum, self.weight_decay = momentum, weight_decay
        self.groups: dict[tuple[int, int], list[Tensor]] = {}
        for matrix in matrices:
            if matrix.ndim != 2:
                raise ValueError(f"Muon updates matrices; got a parameter of shape {tuple(matrix.shape)}")
            n, m = matrix.shape
            self.groups.setdefault((n, m), []).append(matrix)
        self.moments = {shape: torch.stack(group).zero_() for shape, group in self.groups.items()}

    def step(self, lr: float, each: Callable[..., Iterable[None]] = map) -> None:
        """One update from the matrices' `.grad`; `each` applies a function to the groups, as `map` does.

        Groups do not touch each other: a thread pool's `map` may take them at once, with the same result.
        """
        for _ in each(functools.partial(self._update, lr), self.groups):
            pass

    @torch.no_grad()
    def _update(self, lr: float, shape: tuple[int, int]) -> None:
        group = self.groups[shape]
        gradients = torch.stack([_gradient(matrix) for matrix in group])
        moment = self.moments[shape].lerp_(gradients, 1 - self.momentum)
        update = orthogonalized(gradients.lerp_(moment, self.momentum)).mul_(lr * 0.2 * max(shape) ** 0.5)
        for matrix, change in zip(group, update, strict=True):
            matrix.mul_(1 - lr * self.weight_decay).sub_(change)


def _gradient(matrix: Tensor) -> Tensor:
    assert matrix.grad is not None
    return matrix.grad
