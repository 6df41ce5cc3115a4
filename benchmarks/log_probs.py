"""The log-prob head against full logits: seconds, exact peak memory, error and matrix products, as markdown.

    python benchmarks/log_probs.py                    # about 30 minutes on two quiet cores
    python benchmarks/log_probs.py --report           # the tables, from what is there
    python benchmarks/log_probs.py --dtypes float32   # where the processor has no instructions for bfloat16
    python benchmarks/log_probs.py --quick            # small sizes, under a minute
    python benchmarks/log_probs.py --device cuda --full-size    # 16k tokens of Qwen3-0.6B's head

A finished size is appended to a file, one JSON line, and not measured again by the same commit and settings:
stop it, start it again, or only print what is there.

Contenders of a size run in turn in one process. Their first turn is traced: it counts matrix products and
records the peak, by PyTorch's own allocator events on CPU (every allocation, also inside operators), by its
counters on CUDA, over what was held before. Three timed turns follow, and up to five while `--seconds` of
the size last; the tables give medians. The error is the largest of 64 tokens' log-probs against float64.
"""

# N action tokens, V vocabulary, D width

import argparse
import json
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import agentrl as arl
from agentrl.ops.peak_memory import peak_bytes
from results import append, commit, read_records

PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "agentrl::mm_float32_")
FEWEST_TURNS, MOST_TURNS = 3, 5


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

    def leaves(self) -> list[Tensor]:
        """What wants a gradient."""
        return [t for t in (self.hidden, self.weight) if t.requires_grad]

    def backward(self, log_probs: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(log_probs, self.leaves(), self.upstream)


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


def step_fused(case: Case, **keywords: Any) -> tuple[Tensor, ...]:
    result = arl.fused_policy_loss(
        case.hidden,
        case.weight,
        case.targets,
        lambda log_probs, entropy, index: case.upstream[index] * log_probs,
        **keywords,
    )
    return torch.autograd.grad(result.loss, case.leaves())


@dataclass(frozen=True, slots=True)
class Head:
    """A way from hidden states to log-probs."""

    score: Callable[[Case], Tensor]  # log-probs [N]
    step: Callable[[Case], tuple[Tensor, ...]]  # forward and backward: the gradients of the case's leaves
    is_compiled: bool = False  # the dispatcher does not see the products of compiled code

    @staticmethod
    def plain(score: Callable[[Case], Tensor], **keywords: Any) -> "Head":
        return Head(score, lambda case: case.backward(score(case)), **keywords)


HEADS = {
    "full": Head.plain(score_full),
    "chunked": Head.plain(score_chunked),
    "recomputed (256)": Head.plain(score_checkpointed),
    "tiled": Head.plain(score_tiled),
    "tiled, input": Head.plain(score_tiled_input),
    "fused": Head(score_tiled, step_fused),
    "fused, active=": Head(score_tiled, lambda case: step_fused(case, active=case.upstream != 0)),
    "fused, active=, input": Head(
        score_tiled_input, lambda case: step_fused(case, active=case.upstream != 0, logits="input")
    ),
}


def log_prob_errors(heads: dict[str, Head], case: Case) -> tuple[dict[str, float], float]:
    """The largest error of 64 tokens' log-probs against float64, a contender, and of those in float32."""
    few = Case(case.hidden[:64].detach(), case.weight.detach(), case.targets[:64], case.upstream[:64])
    hidden = few.hidden.double()
    logits = torch.cat([hidden @ part.double().T for part in few.weight.split(8192)], 1)
    exact = arl.selected_log_probs(logits, few.targets)
    with torch.no_grad():
        scores = {name: head.score(few) for name, head in heads.items()}
    errors = {name: float((score.double() - exact).abs().max()) for name, score in scores.items()}
    return errors, float((exact.float().double() - exact).abs().max())


def matmul_peak(dtype: torch.dtype, device: str, clock: Callable[[], float] = time.perf_counter) -> float:
    """Operations a second of the best of ten square products."""
    side = 1024 if device == "cpu" else 8192
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / min(seconds(lambda: a @ b, device, clock) for _ in range(10))


def seconds(step: Callable[[], Any], device: str, clock: Callable[[], float] = time.perf_counter) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


@dataclass(frozen=True, slots=True)
class Size:
    """One block of rows of a table: contenders at one size, the first of which is what others compare to."""

    table: str
    n: int
    v: int
    d: int
    dtype: str
    names: tuple[str, ...]
    active: float = 1.0
    frozen: bool = False

    def key(self) -> str:
        return json.dumps(asdict(self))

    def draw(self, device: str) -> Case:
        case = Case.draw(self.n, self.v, self.d, getattr(torch, self.dtype), device, self.active)
        case.weight.requires_grad_(not self.frozen)
        return case


@dataclass(slots=True)
class Turns:
    """What was measured of one contender."""

    seconds: list[float]  # of the timed ones
    peak: int  # bytes, over what was held before
    operations: int  # of matrix products; 0 where they are not seen

    @staticmethod
    def traced(head: Head, case: Case, device: str) -> "Turns":
        found = Turns([], 0, 0)

        def counted() -> Any:
            if head.is_compiled:
                return head.step(case)
            with ProductCount() as count:
                result = head.step(case)
            found.operations = count.operations
            return result

        found.peak = peak_bytes(counted, device)
        return found

    def median(self) -> float:
        return statistics.median(self.seconds)


def measure(
    size: Size,
    heads: dict[str, Head],
    device: str,
    budget: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """The record of a size: figures by contender. `budget` seconds bound the turns after the first three."""
    case, heads = size.draw(device), {name: heads[name] for name in size.names}
    begin = time.perf_counter()
    turns = {name: Turns.traced(head, case, device) for name, head in heads.items()}
    round_seconds = time.perf_counter() - begin
    for turn in range(MOST_TURNS):
        if turn >= FEWEST_TURNS and time.perf_counter() - begin + round_seconds / 2 > budget:
            break
        for name, head in heads.items():
            turns[name].seconds.append(seconds(lambda head=head: head.step(case), device, clock))
    gradients = sum(t.numel() * t.element_size() for t in case.leaves())
    peak_rate = matmul_peak(case.hidden.dtype, device, clock)
    errors, rounding = log_prob_errors(heads, case)
    plain = turns[size.names[0]].median()
    return {
        name: {
            "seconds": t.median(),
            "ratio": t.median() / plain,
            "turns": len(t.seconds),
            "over_bytes": t.peak - gradients,
            "error": errors[name],
            "rounding": rounding,  # the least error of a float32 log-prob
            "products": t.operations / (2 * size.n * size.v * size.d),
            "rate": t.operations / t.median() / peak_rate,
        }
        for name, t in turns.items()
    }


def grid(quick: bool) -> list[Size]:
    """Every size in float32 and bfloat16."""
    full = [(n, v, d) for n in (1024, 4096) for v in (32_000, 151_936) for d in (256, 1024)]
    small = [(256, 8000, 256), (256, 8000, 512)]
    found = []
    for n, v, d in small if quick else full:
        for dtype, more in (("float32", ()), ("bfloat16", ("tiled, input",))):
            table = f"{dtype}, forward and backward, both gradients"
            found.append(Size(table, n, v, d, dtype, ("full", "tiled", *more, "fused")))
    return found


def special(quick: bool) -> list[Size]:
    """What active rows and a frozen weight save, the chapter's shape, many tokens."""
    n, v, d = (256, 8000, 256) if quick else (2048, 32_000, 1024)
    few = "a quarter of the tokens carry a gradient"
    found = []
    for dtype, names in (
        ("float32", ("full", "tiled", "fused, active=")),
        ("bfloat16", ("full", "tiled", "fused, active=", "fused, active=, input")),
    ):
        found.append(Size(few, n, v, d, dtype, names, active=0.25))
        found.append(Size("frozen weight", n, v, d, dtype, ("full", "tiled", "fused"), frozen=True))
    chapter = (512, 8000, 64) if quick else (2048, 32_000, 256)
    names = ("full", "chunked", "recomputed (256)", "tiled", "fused")
    found.append(Size("the chapter's table at a scaled size", *chapter, "float32", names))
    for n in (1024, 2048) if quick else (4096, 16_384):
        many = (n, *((2000, 64) if quick else (32_000, 256)))
        found.append(Size("memory does not grow with tokens", *many, "float32", ("tiled", "fused")))
    return found


def full_size() -> list[Size]:
    """16k tokens of Qwen3-0.6B (vocabulary 151,936, width 1,024), bf16: the chapter's table itself."""
    names = ("full", "chunked", "recomputed (256)", "tiled", "tiled, input", "fused")
    return [Size("16k tokens of Qwen3-0.6B's head", 16_384, 151_936, 1024, "bfloat16", names)]


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What records must share to stand in one table."""
    return {
        "commit": commit(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {options.device}",
        "threads": options.threads,
        "seconds": options.seconds,
    }


def read(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Figures of these settings by size."""
    records = (record for record in read_records(path) if record["settings"] == wanted)
    return {record["size"]: record["figures"] for record in records}


HEADER = (
    "| N x V x D | dtype | head | seconds | of the first | turns | peak - grads, MB | error, nats | products "
    "| of peak rate |\n|---|---|---|---|---|---|---|---|---|---|"
)


def rows_of(size: Size, figures: dict[str, Any]) -> list[str]:
    rows = []
    for name, f in figures.items():
        rows.append(
            f"| {size.n:,} x {size.v:,} x {size.d:,} | {size.dtype} | {name} | {f['seconds']:.3f} "
            f"| {f['ratio']:.2f} | {f['turns']} | {f['over_bytes'] / 1e6:,.1f} | {f['error']:.1e} "
            f"| {f['products']:.2f} | {f['rate']:.0%} |"
        )
    return rows


def targets(found: dict[Size, dict[str, Any]]) -> list[str]:
    """Each target of the head against the worst of the grid, and against that of a quarter of the rows."""
    rows = ["| dtype | head | figure | asked | worst | sizes that miss |", "|---|---|---|---|---|---|"]

    def judge(dtype: str, name: str, title: str, asked: float, figure: Callable[[Size, Any], float]) -> None:
        values = [figure(s, f) for s, f in found.items() if s.dtype == dtype and name in f]
        if values:
            missed = sum(value > asked for value in values)
            rows.append(
                f"| {dtype} | {name} | {title} | {asked:g} | {max(values):.2f} | {missed} of {len(values)} |"
            )

    for dtype, name, asked in (
        ("float32", "tiled", 1.0),
        ("float32", "fused", 1.0),
        ("bfloat16", "tiled", 2.0),
        ("bfloat16", "tiled, input", 1.15),
        ("bfloat16", "fused", 2.0),
    ):
        judge(dtype, name, "time, of full", asked, lambda s, f, name=name: f[name]["ratio"])
        judge(dtype, name, "peak - grads, MiB", 16, lambda s, f, name=name: f[name]["over_bytes"] / 2**20)
        judge(dtype, name, "error, of full", 1 if dtype == "bfloat16" else 0.2,
              lambda s, f, name=name: f[name]["error"] / f["full"]["error"])  # fmt: skip
        if name == "tiled" and dtype == "float32":
            judge(dtype, name, "error of exact ones in float32, of full", 0.2,
                  lambda s, f: f["full"]["rounding"] / f["full"]["error"])  # fmt: skip
    for dtype in ("float32", "bfloat16"):
        for name in ("fused, active=", "fused, active=, input"):
            judge(dtype, name, "time, of full", 1 / 3, lambda s, f, name=name: f[name]["ratio"])
    return rows


def report(sizes: list[Size], found: dict[str, Any], shared: dict[str, Any]) -> None:
    """The tables as markdown."""
    rates = ", ".join(
        f"{matmul_peak(dtype, shared['machine'].split(', ')[-1]) / 1e9:,.0f} GFLOP/s in {str(dtype)[6:]}"
        for dtype in (torch.float32, torch.bfloat16)
        if any(size.dtype == str(dtype)[6:] for size in sizes)
    )
    print(
        f"commit {shared['commit']}, torch {shared['torch']}, {shared['machine']}, "
        f"{shared['threads']} threads, {shared['clock']}, seed 0, "
        f"`{' '.join(['python', *sys.argv])}`; matmul peak {rates}"
    )
    measured = {size: found[size.key()] for size in sizes if size.key() in found}
    for table in dict.fromkeys(size.table for size in measured):
        print(f"\n### {table}\n\n{HEADER}")
        for size, figures in measured.items():
            if size.table == table:
                print(*rows_of(size, figures), sep="\n")
    judged = {size: f for size, f in measured.items() if "both gradients" in size.table or size.active < 1}
    print("\n### asked and measured\n", *targets(judged), sep="\n")
    if len(measured) < len(sizes):
        print(f"\n{len(sizes) - len(measured)} of {len(sizes)} sizes are still to be measured.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, under a minute")
    parser.add_argument("--full-size", action="store_true", help="16k tokens of Qwen3-0.6B's head alone")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=15.0, help="of turns, a size")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="one thread's CPU seconds, to which other processes add little",
    )
    parser.add_argument("--idle-thread", action="store_true", help="another Python thread waits beside it")
    parser.add_argument("--results", type=Path, default=Path("log_probs.jsonl"), help="a line a size")
    parser.add_argument("--report", action="store_true", help="measure nothing; print what is there")
    options = parser.parse_args()
    options.threads = 1 if options.cpu_time else options.threads
    torch.set_num_threads(options.threads)
    if options.idle_thread:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    clock = time.process_time if options.cpu_time else time.perf_counter
    shared = settings(options) | {"clock": clock.__name__, "idle_thread": options.idle_thread}
    sizes = full_size() if options.full_size else grid(options.quick) + special(options.quick)
    sizes = [size for size in sizes if size.dtype in options.dtypes]
    found = read(options.results, shared)
    # smallest first: a run that is stopped has some of each table
    for size in sorted(sizes, key=lambda size: size.n * size.v * size.d * len(size.names)):
        if options.report or size.key() in found:
            continue
        figures = found[size.key()] = measure(size, HEADS, options.device, options.seconds, clock)
        append(options.results, {"settings": shared, "size": size.key(), "figures": figures})
        now = time.strftime("%H:%M:%S")
        print(*(f"[{now}] {row}" for row in rows_of(size, figures)), sep="\n", file=sys.stderr, flush=True)
    report(sizes, found, shared)


if __name__ == "__main__":
    main()
