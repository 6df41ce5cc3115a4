"""The log-prob head against full logits: seconds, exact peak memory, error and matrix products, as markdown.

    python benchmarks/log_probs.py --quick            under a minute
    python benchmarks/log_probs.py                    about 8 minutes on two quiet cores
    python benchmarks/log_probs.py --device cuda --full-size    16k tokens of Qwen3-0.6B's head

Contenders of a case run in turn in one process, and the tables give medians. The peak counts PyTorch's own
allocator events on CPU (every allocation, also inside operators), its counters on CUDA, over what was held
before. The error is the largest of 64 tokens' log-probs against float64.
"""

# N action tokens, V vocabulary, D width

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import agentrl as arl

PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_")


class ProductCount(TorchDispatchMode):
    """Counts the floating-point operations of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in PRODUCTS:
            lhs, rhs = [arg for arg in args if isinstance(arg, Tensor)][-2:]
            self.operations += 2 * lhs.shape[0] * lhs.shape[1] * rhs.shape[1]
        return func(*args, **(kwargs or {}))


def peak_bytes(step: Callable[[], Any], device: str = "cpu") -> int:
    """The most bytes that `step` holds at once, over what was held before."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        held = step()  # results stay alive until the profile ends
        del held
    results = found.profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in results.events() if event.name() == "[memory]"]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events)
    total = highest = 0
    for _, change in changes:
        total += change
        highest = max(highest, total)
    return highest


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One size of the head, with a non-uniform upstream gradient, zero for a share of the tokens."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    targets: Tensor  # [N]
    upstream: Tensor  # [N]

    @staticmethod
    def draw(n: int, v: int, d: int, dtype: torch.dtype, device: str, active: float = 1.0) -> "Case":
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(n, d, generator=generator).to(device, dtype).requires_grad_()
        # logits of unit variance times 3: a peaked softmax, as a language model's is
        weight = (torch.randn(v, d, generator=generator) * (3 / d**0.5)).to(device, dtype).requires_grad_()
        targets = torch.randint(v, (n,), generator=generator).to(device)
        upstream = torch.randn(n, generator=generator) * (torch.rand(n, generator=generator) < active)
        return Case(hidden, weight, targets, upstream.to(device))

    def backward(self, log_probs: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [t for t in (self.hidden, self.weight) if t.requires_grad]
        return torch.autograd.grad(log_probs, wanted, self.upstream)


def score_full(case: Case) -> Tensor:
    return arl.selected_log_probs(case.hidden @ case.weight.T, case.targets)


def score_chunked(case: Case) -> Tensor:
    return arl.chunked_log_probs(case.hidden[None], case.weight, case.targets[None])[0]


def score_checkpointed(case: Case) -> Tensor:
    return arl.checkpointed_log_probs(case.hidden[None], case.weight, case.targets[None], chunk_size=256)[0]


def score_tiled(case: Case) -> Tensor:
    return arl.action_log_probs(case.hidden, case.weight, case.targets)


def score_tiled_input(case: Case) -> Tensor:
    return arl.action_log_probs(case.hidden, case.weight, case.targets, logits="input")


def step_fused(case: Case, stash_bytes: int = 4 << 20, active: Tensor | None = None) -> Any:
    result = arl.fused_policy_loss(
        case.hidden,
        case.weight,
        case.targets,
        lambda log_probs, entropy, index: case.upstream[index] * log_probs,
        stash_bytes=stash_bytes,
        active=active,
    )
    wanted = [t for t in (case.hidden, case.weight) if t.requires_grad]
    return torch.autograd.grad(result.loss, wanted)


SCORES: dict[str, Callable[[Case], Tensor]] = {
    "full": score_full,
    "chunked": score_chunked,
    "recomputed (256)": score_checkpointed,
    "tiled": score_tiled,
    "tiled, input": score_tiled_input,
}


def step_of(name: str, case: Case) -> Callable[[], Any]:
    if name == "fused":
        return lambda: step_fused(case)
    if name == "fused, active=":
        return lambda: step_fused(case, active=case.upstream != 0)
    return lambda: case.backward(SCORES[name](case))


def log_prob_error(name: str, case: Case) -> float:
    """The largest error of 64 tokens' log-probs against float64."""
    few = Case(case.hidden[:64].detach(), case.weight.detach(), case.targets[:64], case.upstream[:64])
    hidden = few.hidden.double()
    logits = torch.cat([hidden @ part.double().T for part in few.weight.split(8192)], 1)
    exact = arl.selected_log_probs(logits, few.targets)
    with torch.no_grad():
        ours = SCORES["tiled" if name.startswith("fused") else name](few)
    return float((ours.double() - exact).abs().max())


def matmul_peak(dtype: torch.dtype, device: str) -> float:
    """Operations a second of the best of ten square products."""
    side = 1024 if device == "cpu" else 8192
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        best = min(best, seconds(lambda: a @ b, device))
    return 2 * side**3 / best


def seconds(step: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(case: Case, names: list[str], runs: int, device: str, peaks: bool = True) -> list[str]:
    """Markdown rows: contender, seconds, ratio to the first, peak over gradients, error, products, rate."""
    n, d = case.hidden.shape
    v = case.weight.shape[0]
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(runs):
        for name in names:
            times[name].append(seconds(step_of(name, case), device))
    gradients = sum(t.numel() * t.element_size() for t in (case.hidden, case.weight) if t.requires_grad)
    best = matmul_peak(case.hidden.dtype, device)
    rows = []
    for name in names:
        median = statistics.median(times[name])
        with ProductCount() as counted:
            step_of(name, case)()
        ratio = median / statistics.median(times[names[0]])
        peak = peak_bytes(step_of(name, case), device) if peaks else float("nan")
        over = f"{(peak - gradients) / 1e6:,.1f}"
        products = counted.operations / (2 * n * v * d)
        rows.append(
            f"| {n:,} x {v:,} x {d:,} | {name} | {median:.3f} | {ratio:.2f} | {over} "
            f"| {log_prob_error(name, case):.1e} | {products:.2f} "
            f"| {counted.operations / median / best:.0%} |"
        )
        progress(rows[-1])
    return rows


HEADER = (
    "| N x V x D | head | seconds | of full | peak - grads, MB | error, nats | products | of peak rate |\n"
    "|---|---|---|---|---|---|---|---|"
)


def progress(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def table(title: str, rows: list[str]) -> None:
    print(f"\n### {title}\n\n{HEADER}", *rows, sep="\n", flush=True)


def sizes(quick: bool) -> list[tuple[int, int, int]]:
    if quick:
        return [(256, 8000, 256), (256, 8000, 512)]
    return [(n, v, d) for n in (1024, 4096) for v in (32_000, 151_936) for d in (256, 1024)]


def compare(quick: bool, device: str) -> None:
    """Every size, in float32 and bf16."""
    for dtype, names in (
        (torch.float32, ["full", "tiled", "fused"]),
        (torch.bfloat16, ["full", "tiled", "tiled, input", "fused"]),
    ):
        rows = []
        for n, v, d in sizes(quick):
            huge = n * v * d > 2e11
            case = Case.draw(n, v, d, dtype, device)
            some = names[:3] if huge and dtype == torch.bfloat16 else names[:2] if huge else names
            rows += measure(case, some, 1 if huge else 3, device, peaks=not huge)
        table(f"{dtype}, forward and backward, both gradients".replace("torch.", ""), rows)


def special_cases(quick: bool, device: str) -> None:
    """What active rows and a frozen weight save, the chapter's shape, and memory at many tokens."""
    n, v, d = (256, 8000, 256) if quick else (2048, 32_000, 1024)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        rows += measure(
            Case.draw(n, v, d, dtype, device, active=0.25), ["full", "tiled", "tiled, input"], 3, device
        )
    table("a quarter of the tokens carry a gradient (float32, then bf16)", rows)
    case = Case.draw(n, v, d, torch.float32, device)
    case.weight.requires_grad_(False)
    table("frozen weight, float32", measure(case, ["full", "tiled", "fused"], 3, device))
    chapter = Case.draw(*((512, 8000, 64) if quick else (2048, 32_000, 256)), torch.float32, device)
    names = ["full", "chunked", "recomputed (256)", "tiled", "fused"]
    table("the chapter's table at a scaled size, float32", measure(chapter, names, 3, device))
    many = Case.draw(*((2048, 2000, 64) if quick else (16_384, 32_000, 256)), torch.float32, device)
    table("many tokens, float32", measure(many, ["tiled", "fused"], 1, device))


def full_size(device: str) -> None:
    """16k tokens of Qwen3-0.6B (vocabulary 151,936, width 1,024), bf16: the chapter's table itself."""
    case = Case.draw(16_384, 151_936, 1024, torch.bfloat16, device)
    names = ["full", "chunked", "recomputed (256)", "tiled", "tiled, input", "fused"]
    table("16k tokens of Qwen3-0.6B's head, bf16", measure(case, names, 3, device))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, under a minute")
    parser.add_argument("--full-size", action="store_true", help="16k tokens of Qwen3-0.6B's head alone")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    print(f"commit {commit.stdout.strip()}, torch {torch.__version__}, {options.device}, seed 0, "
          f"{torch.get_num_threads()} threads, `{' '.join(['python', *sys.argv])}`; matmul peak "
          + ", ".join(f"{matmul_peak(dtype, options.device) / 1e9:,.0f} GFLOP/s in {str(dtype)[6:]}"
                      for dtype in (torch.float32, torch.bfloat16)))  # fmt: skip
    if options.full_size:
        full_size(options.device)
        return
    compare(options.quick, options.device)
    special_cases(options.quick, options.device)


if __name__ == "__main__":
    main()
