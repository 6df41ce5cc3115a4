"""What a mean in each microbatch does to the gradient of an optimizer step, beside weights fixed first.

    python benchmarks/accumulation.py [--synthetic] [--size 4] [--seed 0]

The trajectories are those that the supervised base plays on the training tasks, 8 a task, in groups with
signal; with --synthetic, random tokens under a random model.
"""

import argparse
import copy
import platform
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import agentrl as arl
from agentrl.models.tiny import TinyAgent, TinyConfig
from results import commit


@dataclass(frozen=True)
class Plan:
    """One rank's microbatches."""

    ranks: list[list[list[int]]]


def played(seed: int) -> tuple[TinyAgent, list[arl.Trajectory]]:
    """The supervised base and episodes of groups with signal."""
    tok = arl.build_tokenizer(arl.make_tasks("all"))
    model, cfg = arl.make_rl_base(tok), arl.RLConfig(seed=seed, prompts_per_step=20)
    generator = torch.Generator().manual_seed(seed)
    kept, _ = arl.sample_step(model, lambda: arl.make_env(cfg), arl.make_tasks("train"), tok, cfg, generator)
    return model, kept


def synthetic(seed: int) -> tuple[TinyAgent, list[arl.Trajectory]]:
    """A random model and 64 trajectories of it with lognormal numbers of action tokens."""
    generator = torch.Generator().manual_seed(seed)
    model = TinyAgent(TinyConfig(vocab_size=97))
    trajs: list[arl.Trajectory] = []
    for i in range(64):
        count = int((24 * torch.exp(0.9 * torch.randn((), generator=generator))).clamp(2, 200))
        ids = torch.randint(1, 97, (16 + count,), generator=generator)
        mask = (torch.arange(len(ids) - 1) >= 15).float()
        with torch.no_grad():
            logp = arl.sequence_log_probs(model, ids[None])[0] * mask
        reward = float(torch.rand((), generator=generator) < 0.5)
        trajs.append(arl.Trajectory(ids, mask, logp, reward, group=str(i // 8)))
    return model, trajs


def gradient(
    model: TinyAgent,
    trajs: Sequence[arl.Trajectory],
    advantages: Tensor,
    slots: list[list[int]],
    weights: list[Tensor],
    cfg: arl.RLConfig,
) -> Tensor:
    """The gradient [P], float64, of microbatches with the given token weights."""
    model = copy.deepcopy(model)
    arl.accumulate(model, trajs, advantages.to(model.head().weight), cfg, Plan([slots]), weights=weights)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


def local_weights(trajs: Sequence[arl.Trajectory], slots: list[list[int]]) -> list[Tensor]:
    """Weights of the bug: the mean over each microbatch's tokens, then the mean of those."""
    weights: list[Tensor] = [torch.zeros(0)] * len(trajs)
    for slot in slots:
        for i, weight in zip(slot, arl.token_weights([trajs[i] for i in slot]), strict=True):
            weights[i] = weight / len(slots)
    return weights


def table(model: TinyAgent, trajs: list[arl.Trajectory], size: int, seed: int) -> Table:
    """Error of the gradient under local means and fixed weights, for splits and layouts."""
    trajs = [t for t in trajs if t.num_actions]
    count = len(trajs)
    advantages = arl.compute_advantages(arl.collate(trajs, pad_id=0), arl.RLConfig())
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    by_length = sorted(range(count), key=lambda i: trajs[i].num_actions)
    splits = {
        f"{name} {size}s": [indices[i : i + size] for i in range(0, count, size)]
        for name, indices in (("length-sorted", by_length), ("random", order))
    }
    fixed = arl.token_weights(trajs)
    whole = [list(range(count))]
    plain = arl.RLConfig(packing="padded")
    models = {"float32": model, "float64": copy.deepcopy(model).double()}
    exact = {name: gradient(m, trajs, advantages, whole, fixed, plain) for name, m in models.items()}
    result = Table("weights", "split", "rows", "dtype", "largest factor", "relative error", "cosine")
    result.title = f"{count} trajectories, {sum(t.num_actions for t in trajs):,} action tokens"

    def row(split: str, slots: list[list[int]], packing: str, dtype: str, weights: list[Tensor], name: str):
        cfg = arl.RLConfig(packing=packing)  # type: ignore[arg-type]
        found, want = gradient(models[dtype], trajs, advantages, slots, weights, cfg), exact[dtype]
        factors = torch.cat([w[f > 0] / f[f > 0] for w, f in zip(weights, fixed, strict=True)])
        error = float((found - want).norm() / want.norm())
        cosine = float(torch.nn.functional.cosine_similarity(found, want, dim=0))
        result.add_row(
            name, split, packing, dtype, f"{float(factors.max()):.2f}", f"{error:.1e}", f"{cosine:.4f}"
        )

    for split, slots in splits.items():
        local = local_weights(trajs, slots)
        row(split, slots, "packed", "float32", local, "mean of each microbatch")
    for split, slots in ({"one batch": whole} | splits).items():
        for packing in ("padded", "packed", "tree"):
            for dtype in models:
                row(split, slots, packing, dtype, fixed, "fixed before the split")
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--synthetic", action="store_true")
    parser.add_argument("--size", type=int, default=4, help="trajectories a microbatch")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model, trajs = (synthetic if args.synthetic else played)(args.seed)
    machine = f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    console = Console(width=110)
    console.print(f"commit {commit()}; {machine}; seed {args.seed}")
    console.print(table(model, trajs, args.size, args.seed))


if __name__ == "__main__":
    main()
