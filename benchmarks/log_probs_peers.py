"""The log-prob head beside those of other libraries: seconds, peak memory and errors, as markdown.

    python benchmarks/log_probs_peers.py                       # 20 runs of a minute or two
    python benchmarks/log_probs_peers.py --rivals verl Liger   # these alone
    python benchmarks/log_probs_peers.py --report              # the table, from what is there
    python benchmarks/log_probs_peers.py --quick               # small sizes, a few minutes

It runs in an environment of its own, with the extra `peers`: docs/benchmarks.md has the commands. A rival
that is not installed or does not run here is left out, and the table says why. Rivals are called by their
public functions, with their own defaults, and give a log-prob for every token under a non-uniform upstream
gradient; `torch, sum` alone takes none: its gradient is that of the plain sum.

A run alternates full logits, this library's head and one rival; log_probs.py tells how it is measured and
kept. Beforehand, which is also when compiled code is compiled, the gradients of 600 tokens (more than one
chunk of verl's) are held against float64. The figure is the larger relative error (2-norm) of the two
gradients; one above a tenth is no rounding, and is called wrong.

Leave bfloat16 out (--dtypes float32) where the processor has no instructions for it: it takes
minutes a turn.
"""

# N action tokens, V vocabulary, D width

import argparse
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from log_probs import HEADS, Case, Head, Size, measure, read, settings
from results import append

PACKAGES = ("cut-cross-entropy", "liger-kernel", "verl", "triton")
WRONG = 0.1
UNIFORM, IGNORING = "torch, sum", "cut-cross-entropy, ignoring"
IGNORED = -100  # the target of a token that PyTorch's losses, and those after their model, skip


def torch_nll(case: Case, reduction: str) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()  # asks for the chunked form
    return functional.linear_cross_entropy(
        case.hidden, case.weight, case.targets, reduction=reduction, options=options
    )


def load_torch() -> dict[str, Head]:
    """PyTorch's own chunked head, and its form for a sum, which computes gradients in forward."""
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise ImportError(f"torch {torch.__version__} has no chunked linear_cross_entropy")

    def step_sum(case: Case) -> tuple[Tensor, ...]:
        return torch.autograd.grad(torch_nll(case, "sum"), case.leaves())

    plain = Head.plain(lambda case: -torch_nll(case, "none"))
    return {"torch": plain, UNIFORM: Head(plain.score, step_sum)}


def load_verl() -> dict[str, Head]:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    head = FusedLinearForPPO()
    return {"verl": Head.plain(lambda case: head(case.hidden, case.weight, case.targets)[0])}


def load_liger() -> dict[str, Head]:
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

    def score(case: Case) -> Tensor:
        return LigerFusedLinearPPOBase.chunk_forward(case.hidden[None], case.weight, case.targets[None])[0]

    return {"Liger": Head.plain(score)}


def load_cut_cross_entropy() -> dict[str, Head]:
    """Its torch.compile form (the other is a CUDA kernel), also told by targets which tokens to skip."""
    from cut_cross_entropy import linear_cross_entropy

    def log_probs(case: Case, targets: Tensor) -> Tensor:
        return -linear_cross_entropy(
            case.hidden, case.weight, targets, reduction="none", impl="torch_compile"
        )

    def score(case: Case) -> Tensor:
        return log_probs(case, case.targets)

    def step_ignoring(case: Case) -> tuple[Tensor, ...]:
        return case.backward(log_probs(case, case.targets.where(case.upstream != 0, IGNORED)))

    return {
        "cut-cross-entropy": Head.plain(score, is_compiled=True),
        IGNORING: Head(score, step_ignoring, is_compiled=True),
    }


LOADERS: dict[str, Callable[[], dict[str, Head]]] = {
    "torch": load_torch,
    "verl": load_verl,
    "Liger": load_liger,
    "cut-cross-entropy": load_cut_cross_entropy,
}


def load(loaders: dict[str, Callable[[], dict[str, Head]]]) -> tuple[dict[str, Any], dict[str, str]]:
    """The heads of each rival that runs here, and of each other one why it does not."""
    rivals: dict[str, dict[str, Head]] = {}
    left_out: dict[str, str] = {}
    for rival, loader in loaders.items():
        try:
            heads = loader()
            for head in heads.values():
                head.step(Case.draw(8, 64, 16, torch.float32, "cpu"))
        except (ImportError, RuntimeError) as error:  # RuntimeError: no compiler, no driver
            left_out[rival] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        else:
            rivals[rival] = heads
    return rivals, left_out


def exact_gradients(case: Case, upstream: Tensor) -> list[Tensor]:
    """The gradients of hidden and weight in float64, dz = upstream * (1_target - p), 256 tokens at a time."""
    weight = case.weight.detach().double()
    dweight, dhidden = torch.zeros_like(weight), []
    parts = (part.split(256) for part in (case.hidden.detach().double(), case.targets, upstream.double()))
    for hidden, targets, slope in zip(*parts, strict=True):
        dz = (hidden @ weight.T).softmax(1).mul_(-slope[:, None])
        dz[torch.arange(len(slope)), targets] += slope
        dhidden.append(dz @ weight)
        dweight.addmm_(dz.T, hidden)
    return [torch.cat(dhidden), dweight]


def gradient_errors(heads: dict[str, Head], case: Case) -> dict[str, float]:
    """The larger relative error of the two gradients of 600 tokens, a head."""
    hidden = case.hidden.detach()[:600].requires_grad_()
    few = Case(hidden, case.weight, case.targets[:600], case.upstream[:600])
    exact = exact_gradients(few, few.upstream)
    errors = {}
    for name, head in heads.items():
        wanted = exact_gradients(few, -torch.ones_like(few.upstream)) if name == UNIFORM else exact
        pairs = zip(head.step(few), wanted, strict=True)
        errors[name] = max(float((got.double() - want).norm() / want.norm()) for got, want in pairs)
    return errors


def sizes_of(rivals: dict[str, dict[str, Head]], quick: bool) -> dict[Size, dict[str, Head]]:
    """The runs of the table: at each size one a rival, with the heads that alternate in it."""
    wide = (256, 8000, 64) if quick else (1024, 151_936, 256)
    deep = (256, 8000, 256) if quick else (2048, 32_000, 1024)
    found = {}
    for shape, dtype, active in (
        (wide, "float32", 1.0),
        (deep, "float32", 1.0),
        (deep, "float32", 0.25),
        (deep, "bfloat16", 1.0),
        (deep, "bfloat16", 0.25),
    ):
        ours = ("full", "tiled") if active == 1 else ("full", "fused, active=")
        if active == 1 and dtype == "bfloat16":
            ours += ("tiled, input",)
        for rival, loaded in rivals.items():
            more = {
                name: head for name, head in loaded.items() if name != (UNIFORM if active < 1 else IGNORING)
            }
            size = Size(rival, *shape, dtype, (*ours, *more), active)
            found[size] = {name: (HEADS | more)[name] for name in size.names}
    return found


def rows_of(size: Size, figures: dict[str, Any]) -> list[str]:
    rows = []
    for name, f in figures.items():
        wrong = " **wrong**" if not f["gradient_error"] <= WRONG else ""
        rows.append(
            f"| {size.n:,} x {size.v:,} x {size.d:,} | {size.dtype} | {size.active:g} | {name} "
            f"| {f['seconds']:.3f} | {f['ratio']:.2f} | {f['turns']} | {f['over_bytes'] / 1e6:,.1f} "
            f"| {f['error']:.1e} | {f['gradient_error']:.1e}{wrong} |"
        )
    return rows


HEADER = (
    "| N x V x D | dtype | active | head | seconds | of full | turns | peak - grads, MB | error, nats "
    "| error of gradients |\n|---|---|---|---|---|---|---|---|---|---|"
)


def report(
    sizes: list[Size], found: dict[str, Any], shared: dict[str, Any], left_out: dict[str, str]
) -> None:
    packages = ", ".join(f"{package} {installed}" for package, installed in shared["packages"].items())
    print(
        f"commit {shared['commit']}, torch {shared['torch']}, {shared['machine']}, "
        f"{shared['threads']} threads, seed 0, `{' '.join(['python', *sys.argv])}`; {packages}\n\n{HEADER}"
    )
    for size in sizes:
        for row in rows_of(size, found.get(size.key(), {})):
            print(row)
    for rival, reason in left_out.items():
        print(f"\n{rival} is left out: {reason}")
    missing = sum(size.key() not in found for size in sizes)
    if missing:
        print(f"\n{missing} of {len(sizes)} runs are still to be made.")


def installed_versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, a few minutes")
    parser.add_argument("--rivals", nargs="+", default=list(LOADERS), choices=list(LOADERS))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--at-most", type=int, help="runs now; the next call makes the next")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="one thread's CPU seconds, to which other processes add little",
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=45.0, help="of turns, a run")
    parser.add_argument("--results", type=Path, default=Path("log_probs_peers.jsonl"), help="a line a run")
    parser.add_argument("--report", action="store_true", help="measure nothing; print what is there")
    options = parser.parse_args()
    options.device = "cpu"
    options.threads = 1 if options.cpu_time else options.threads
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.cpu_time else time.perf_counter
    shared = settings(options) | {"clock": clock.__name__, "packages": installed_versions()}
    rivals, left_out = load({rival: LOADERS[rival] for rival in options.rivals})
    runs = {s: heads for s, heads in sizes_of(rivals, options.quick).items() if s.dtype in options.dtypes}
    found = read(options.results, shared)
    to_make = [] if options.report else [size for size in runs if size.key() not in found]
    for size in to_make[: options.at_most]:
        heads = runs[size]
        errors = gradient_errors(heads, size.draw("cpu"))
        figures = measure(size, heads, "cpu", options.seconds, clock)
        found[size.key()] = {name: f | {"gradient_error": errors[name]} for name, f in figures.items()}
        append(options.results, {"settings": shared, "size": size.key(), "figures": found[size.key()]})
        now = time.strftime("%H:%M:%S")
        for row in rows_of(size, found[size.key()]):
            print(f"[{now}] {row}", file=sys.stderr, flush=True)
    report(list(runs), found, shared, left_out)


if __name__ == "__main__":
    main()
