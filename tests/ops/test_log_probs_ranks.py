"""Two ranks: vocabulary shards give what one gives; a weight sharded by FSDP2 is gathered and averaged."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from agentrl.ops.fused_loss import fused_policy_loss
from agentrl.ops.log_probs import action_log_probs
from log_probs import ProductCount

SIZES = (11, 23)  # rows of the vocabulary that each rank holds


def _drawn() -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(13, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(sum(SIZES), 5, generator=generator, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(sum(SIZES), generator=generator, dtype=torch.float64, requires_grad=True)
    temperature = (torch.rand(13, generator=generator, dtype=torch.float64) + 0.5).requires_grad_()
    targets = torch.randint(sum(SIZES), (13,), generator=generator)
    upstream = torch.randn(13, generator=generator, dtype=torch.float64).index_fill(
        0, torch.tensor([2, 5]), 0.0
    )
    return hidden, weight, bias, temperature, targets, upstream


def _shards(rank: int) -> None:
    hidden, weight, bias, temperature, targets, upstream = _drawn()
    rows = slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
    part, part_bias = (t.detach()[rows].clone().requires_grad_() for t in (weight, bias))
    group = dist.group.WORLD
    close = {"rtol": 1e-11, "atol": 1e-12}
    whole_leaves, part_leaves = [hidden, temperature, weight, bias], [hidden, temperature, part, part_bias]

    def check(whole: Any, shard: Any, upstream: Any) -> None:
        torch.testing.assert_close(shard, whole, **close)
        wanted = torch.autograd.grad(whole, whole_leaves, upstream)
        found = torch.autograd.grad(shard, part_leaves, upstream)
        torch.testing.assert_close(found, (*wanted[:2], wanted[2][rows], wanted[3][rows]), **close)

    more: dict[str, Any] = {"temperature": temperature, "softcap": 4.0, "tile_bytes": 300}
    whole = action_log_probs(hidden, weight, targets, bias=bias, return_entropy=True, **more)
    shard = action_log_probs(hidden, part, targets, bias=part_bias, return_entropy=True, group=group, **more)
    check(whole, shard, (upstream, upstream.flip(0)))
    whole = action_log_probs(hidden, weight, targets, bias=bias, **more)
    check(whole, action_log_probs(hidden, part, targets, bias=part_bias, group=group, **more), upstream)
    fused = [
        fused_policy_loss(hidden, w, targets, lambda p, _, i: upstream[i] * p, bias=b, group=g, **more).loss
        for w, b, g in ((weight, bias, None), (part, part_bias, group))
    ]
    check(fused[0], fused[1], torch.tensor(2.0, dtype=torch.float64))
    part, part_bias = part.detach(), part_bias.detach()
    more["temperature"] = temperature.detach()
    for name in ("general", "fused"):
        found = []
        for w, b, g in ((weight.detach(), bias.detach(), None), (part, part_bias, group)):
            with ProductCount() as counted:
                if name == "general":
                    score = action_log_probs(hidden, w, targets, bias=b, group=g, **more)
                else:
                    score = fused_policy_loss(
                        hidden, w, targets, lambda p, _, i: upstream[i] * p, bias=b, group=g, **more
                    ).loss
                (gradient,) = torch.autograd.grad(score, hidden, upstream if name == "general" else None)
            found.append((score, gradient))
            assert counted.operations == 2 * (2 * 13 * len(w) * 5), "two products"
        torch.testing.assert_close(found[1], found[0], **close)


def _float16_shards(rank: int) -> None:
    """Confident tokens, whose float16 gradients wait for a late factor in units of their rows."""
    hidden, weight, bias, _, targets, upstream = (part.detach() for part in _drawn())
    bias.zero_()[0] = 14.0
    targets.zero_()
    rows = slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
    group = dist.group.WORLD
    for frozen in (False, True):
        exact = [t.half().double().requires_grad_() for t in (hidden, weight)]
        log_probs = (exact[0] @ exact[1].T + bias).log_softmax(-1)[:, 0]
        wanted = torch.autograd.grad(log_probs, exact, upstream * 64)
        leaves = [hidden.half().requires_grad_(), weight[rows].half().requires_grad_(not frozen)]
        fused = fused_policy_loss(
            leaves[0],
            leaves[1],
            targets,
            lambda p, _, i: upstream[i] * p / 1024,
            bias=bias[rows],
            group=group,
        ).loss
        score = action_log_probs(leaves[0], leaves[1], targets, bias=bias[rows], group=group)
        for loss in (fused * 65536.0, (score * upstream.float() / 1024).sum() * 65536.0):
            found = torch.autograd.grad(loss, leaves[:1] if frozen else leaves)
            for mine, true in zip(found, (wanted[0], wanted[1][rows]), strict=False):
                assert (mine.double() - true).norm() <= 1e-3 * true.norm()


def _sharded_by_fsdp(rank: int, mesh_shape: tuple[int, ...]) -> None:
    """Each rank scores its own tokens; the weight's gradient is the mean over ranks, as FSDP2 has it.

    Of a mesh with two dimensions, the first holds replicas (HSDP).
    """
    hidden, weight, _, _, targets, upstream = _drawn()
    model = nn.Linear(5, sum(SIZES), bias=False, dtype=torch.float64)
    model.weight.data.copy_(weight.detach())
    names = ("replica", "shard")[-len(mesh_shape) :]
    fully_shard(model, mesh=init_device_mesh("cpu", mesh_shape, mesh_dim_names=names))
    mine = slice(rank * 6, rank * 6 + 6)
    action_log_probs(hidden[mine], model.weight, targets[mine]).backward(upstream[mine])
    plain = action_log_probs(hidden[:12], weight, targets[:12])
    (wanted,) = torch.autograd.grad(plain, weight, upstream[:12] / 2)
    gradient: Any = model.weight.grad
    torch.testing.assert_close(gradient.full_tensor(), wanted, rtol=1e-11, atol=1e-12)
    with pytest.raises(ValueError, match="hidden must be this rank's own tensor, got a DTensor"):
        action_log_probs(model.weight, weight, torch.arange(sum(SIZES)))
    with pytest.raises(ValueError, match=r"with group=, weight must be .* pass weight\.to_local\(\)"):
        action_log_probs(hidden, model.weight, targets, group=dist.group.WORLD)


def _start(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        _shards(rank)
        _float16_shards(rank)
        for mesh_shape in ((2,), (2, 1), (1, 2)):
            _sharded_by_fsdp(rank, mesh_shape)
    finally:
        dist.destroy_process_group()


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    """A failing comparison on either rank is raised here with its traceback."""
    mp.spawn(_start, (str(tmp_path / "store"),), nprocs=2)
