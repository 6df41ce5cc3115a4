"""The head's ways on CUDA: on a GPU (`pytest -m gpu`), and on CPU with the decisions it makes for one."""

# N action tokens, V vocabulary, D width

from typing import Any

import pytest
import torch
from tests.ops.conftest import draw_same_signed, imitate_cuda, relative_error
from torch import Tensor

from agentrl.ops.fused_loss import fused_policy_loss
from agentrl.ops.log_probs import action_log_probs


@pytest.fixture(params=["imitated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the tensors are."""
    if request.param == "imitated":
        imitate_cuda(monkeypatch)
        return "cpu"
    return "cuda"


class Problem:
    """Hidden, weight, bias and temperatures of a head with a soft-cap, a third of whose tokens are idle."""

    def __init__(self, dtype: torch.dtype, device: str, n: int = 70, v: int = 301, d: int = 24) -> None:
        generator = torch.Generator().manual_seed(0)
        hidden, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((n, d), (v, d), (v,)))
        temperatures = torch.rand(n, generator=generator) + 0.5
        rows = hidden.to(dtype), weight.to(dtype), bias, temperatures
        self.leaves = [leaf.to(device).requires_grad_() for leaf in rows]
        self.targets = torch.randint(v, (n,), generator=generator).to(device)
        upstream = torch.randn(2, n, generator=generator) * (torch.rand(n, generator=generator) < 0.7)
        self.upstream = upstream.to(device)

    def full(self, leaves: list[Tensor], softcap: float | None) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of full logits in the leaves' dtype."""
        hidden, weight, bias, temperatures = leaves
        logits = (hidden @ weight.T).to(bias.dtype) + bias
        logits = logits if softcap is None else softcap * (logits / softcap).tanh()
        every = torch.log_softmax(logits / temperatures[:, None], -1)
        return every.gather(1, self.targets[:, None]).squeeze(1), -(every.exp() * every).sum(1)

    def exact(self) -> list[Tensor]:
        return [leaf.detach().double().requires_grad_() for leaf in self.leaves]


@pytest.mark.parametrize(
    ("dtype", "logits"),
    [
        (torch.float32, "float32"),
        (torch.bfloat16, "float32"),
        (torch.bfloat16, "input"),
        (torch.float16, "float32"),
        (torch.float16, "input"),
    ],
)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("trained", ["all", "head", "hidden"])
@pytest.mark.parametrize(("n", "v"), [(70, 301), (301, 70)])
def test_errors_are_within_twice_those_of_full_logits(
    dtype: torch.dtype,
    logits: Any,
    softcap: float | None,
    with_entropy: bool,
    trained: str,
    n: int,
    v: int,
    device: str,
) -> None:
    problem = Problem(dtype, device, n, v)
    hidden, weight, bias, temperatures = problem.leaves
    wanted = {"all": [0, 1, 2, 3], "head": [1, 2], "hidden": [0]}[trained]
    for index, leaf in enumerate(problem.leaves):
        leaf.requires_grad_(index in wanted)

    def differentiate(scores: Any, leaves: list[Tensor]) -> list[Tensor]:
        parts = scores[: 1 + with_entropy]
        loss = sum((part * row).sum() for part, row in zip(parts, problem.upstream, strict=False))
        gradients = torch.autograd.grad(loss, [leaves[index] for index in wanted])
        return [part.detach() for part in (*parts, *gradients)]

    exact_leaves = problem.exact()
    exact = differentiate(problem.full(exact_leaves, softcap), exact_leaves)
    plain = differentiate(problem.full(problem.leaves, softcap), problem.leaves)
    for tile_bytes in (1000, 1 << 14):  # sums in lent memory, and in their own
        keywords: Any = {
            "bias": bias, "temperature": temperatures, "softcap": softcap, "logits": logits,
            "tile_bytes": tile_bytes,
        }  # fmt: skip
        scores = action_log_probs(hidden, weight, problem.targets, return_entropy=with_entropy, **keywords)
        general = differentiate(scores if with_entropy else (scores,), problem.leaves)

        def loss(logp: Tensor, entropy: Tensor | None, index: Tensor) -> Tensor:
            of_entropy = 0.0 if entropy is None else entropy * problem.upstream[1, index]
            return logp * problem.upstream[0, index] + of_entropy

        fused = fused_policy_loss(
            hidden, weight, problem.targets, loss, with_entropy=with_entropy, **keywords
        )
        gradients = torch.autograd.grad(fused.loss, [problem.leaves[index] for index in wanted])
        values = [fused.log_probs, *([] if fused.entropy is None else [fused.entropy])]
        for ours in (general, [*values, *gradients]):
            for mine, theirs, true in zip(ours, plain, exact, strict=True):
                assert mine.isfinite().all()
                assert relative_error(mine, true) <= 2 * relative_error(theirs, true) + 1e-3
        if logits == "float32":
            # one rounding of a logit to bfloat16 is 4e-3
            assert relative_error(general[0], exact[0]) <= 1e-6


@pytest.mark.parametrize("with_hidden", [False, True])
@pytest.mark.parametrize("tile_bytes", [1 << 12, 1 << 16, None])
@pytest.mark.parametrize(("v", "d"), [(12, 8), (40, 64)])
def test_a_weight_gradient_over_many_same_signed_tokens(
    v: int, d: int, tile_bytes: int | None, with_hidden: bool, device: str
) -> None:
    """Products are added in float32 whatever the tile; all that is rounded to bfloat16 is dz and the sum."""
    hidden, weight, targets, upstream = (part.detach().to(device) for part in draw_same_signed(v, d))
    weight.requires_grad_()
    double = weight.detach().double().requires_grad_()
    exact_score = (hidden.double() @ double.T).log_softmax(-1)[:, 0]
    (exact,) = torch.autograd.grad(exact_score, double, upstream.double())
    score = action_log_probs(hidden.requires_grad_(with_hidden), weight, targets, tile_bytes=tile_bytes)
    (found,) = torch.autograd.grad(score, weight, upstream)
    assert float(((found.double() - exact).abs() / exact.abs()).max()) <= 4e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("upstream", [0.0, 1.0])
def test_nan_stays_in_its_row(dtype: torch.dtype, frozen: bool, upstream: float, device: str) -> None:
    problem = Problem(dtype, device)
    hidden, weight = (leaf.detach() for leaf in problem.leaves[:2])
    dirty = hidden.clone()
    dirty[3, 1] = torch.nan
    factors = torch.ones(len(hidden), device=device)
    factors[3] = upstream
    found = []
    for rows in (hidden, dirty):
        rows.requires_grad_()
        score = action_log_probs(rows, weight.requires_grad_(not frozen), problem.targets, tile_bytes=1000)
        found.append((score.detach(), torch.autograd.grad(score, rows, factors)[0]))
    (clean_score, clean), (score, gradient) = found
    others = torch.arange(len(hidden), device=device) != 3
    assert bool(score[3].isnan())
    assert bool(gradient[3].isnan().any()) == (upstream != 0)
    assert torch.equal(score[others], clean_score[others])
    torch.testing.assert_close(gradient[others], clean[others])


@pytest.mark.gpu
def test_a_gpu_notes_the_likeliest_id_as_a_cpu_does() -> None:
    """Float32 log-probs are within two roundings of the exact ones: the largest term was replaced."""
    problem = Problem(torch.float32, "cuda", 64, 20_000, 512)
    hidden, weight = (leaf.detach() for leaf in problem.leaves[:2])
    weight = weight * (3 / 512**0.5)
    exact = (
        (hidden.double() @ weight.double().T).log_softmax(-1).gather(1, problem.targets[:, None]).squeeze(1)
    )
    found = action_log_probs(hidden, weight, problem.targets)
    assert (found.double() - exact).abs().max() <= 2 * (exact.float().double() - exact).abs().max()
