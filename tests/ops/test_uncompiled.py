"""torch.compile around the head changes no bit: it runs as it is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.ops.fused_loss import fused_policy_loss
from agentrl.ops.log_probs import action_log_probs

Step = Callable[..., Any]
# the compiler reads .grad of what crosses from one graph to the next
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")


def general(hidden: Tensor, weight: Tensor, targets: Tensor, upstream: Tensor, **keywords: Any) -> Tensor:
    return (action_log_probs(hidden * 2, weight, targets, **keywords) * upstream).sum()


def fused(hidden: Tensor, weight: Tensor, targets: Tensor, upstream: Tensor, **keywords: Any) -> Tensor:
    return fused_policy_loss(
        hidden * 2, weight, targets, lambda log_probs, entropy, index: log_probs * upstream[index], **keywords
    ).loss


@pytest.fixture
def arguments() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 16, generator=generator).requires_grad_() for size in (300, 500))
    targets = torch.randint(500, (300,), generator=generator)
    return hidden, weight, targets, torch.randn(300, generator=generator)


@pytest.mark.parametrize("step", [general, fused])
@pytest.mark.parametrize("tile_bytes", [None, 1 << 14])
def test_compiled_callers_get_the_same_bits(
    step: Step, tile_bytes: int | None, arguments: tuple[Tensor, ...]
) -> None:
    wanted = step(*arguments, tile_bytes=tile_bytes)
    torch.compiler.reset()
    found = torch.compile(step, backend="aot_eager")(*arguments, tile_bytes=tile_bytes)
    assert torch.equal(found, wanted)
    leaves = arguments[:2]
    for ours, plain in zip(
        torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, leaves), strict=True
    ):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("step", [general, fused])
@pytest.mark.parametrize("frozen", [False, True])
def test_compiled_backwards_give_the_same_bits(
    step: Step, frozen: bool, arguments: tuple[Tensor, ...]
) -> None:
    arguments[1].requires_grad_(not frozen)
    trained = arguments[: 1 if frozen else 2]
    wanted = torch.autograd.grad(step(*arguments), trained)
    torch.compiler.reset()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda *given: step(*given).backward(), backend="aot_eager")(*arguments)
    for leaf, gradient in zip(trained, wanted, strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, gradient)


def test_one_graph_for_all_is_refused(arguments: tuple[Tensor, ...]) -> None:
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="disable"):
        torch.compile(general, backend="eager", fullgraph=True)(*arguments)
