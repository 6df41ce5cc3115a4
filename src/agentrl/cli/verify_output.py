"""A verification as a table and as JSON."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.data.records import BadRecord
    from agentrl.diagnose.checks import Statistic
    from agentrl.diagnose.verification import Verification


def _number(value: float, unit: str) -> str:
    if unit == "share":
        return f"{value:.1%}"
    return "0" if value == 0 else f"{value:.1e}"


def _cells(statistics: "tuple[Statistic, ...]") -> tuple[str, str]:
    """What was measured and what is allowed, a statistic a line."""
    measured, allowed = [], []
    for s in statistics:
        unit = " nats" if s.unit == "nats" else ""
        measured.append(f"{s.name} {_number(s.measured, s.unit)}{unit}")
        allowed.append("-" if s.allowed is None else f"{_number(s.allowed, s.unit)}{unit}")
    return "\n".join(measured), "\n".join(allowed)


def print_table(found: "Verification") -> None:
    """One table of all checks on standard output."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    dtype = str(found.dtype).removeprefix("torch.")
    console.print(
        f"{found.num_trajectories:,} trajectories, {found.num_tokens:,} tokens, {found.num_actions:,} action "
        f"tokens; prefix trees save {found.tree_share:.0%} of the positions",
        highlight=False,
        soft_wrap=True,
    )
    if found.simulated is not None:
        console.print(f"Simulated bug: {found.simulated}. The lines that FAIL show it.", highlight=False)
    table = Table(box=None, pad_edge=False, expand=True)
    table.add_column("", ratio=1, overflow="fold")
    table.add_column("measured", no_wrap=True)
    table.add_column(f"allowed for {dtype}", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("what it means", ratio=2, overflow="fold")
    for check in found.checks:
        verdict = Text("pass", "green") if check.passed else Text("FAIL", "bold red")
        table.add_row(check.name, *_cells(check.statistics), verdict, check.meaning)
    console.print(table, highlight=False)
    failed = found.failed
    verdict = f"{len(failed)} of {len(found.checks)} lines FAIL." if failed else "Every line passes."
    if found.simulated is not None and not failed:
        verdict += " The bug hides below this dtype's rounding: compare gradients, or take more trajectories."
    console.print(verdict, highlight=False)


def as_json(found: "Verification", skipped: "list[BadRecord]") -> dict[str, Any]:
    """The verification as plain values."""
    return {
        "passed": found.passed,
        "simulated": found.simulated,
        "dtype": str(found.dtype).removeprefix("torch."),
        "num_trajectories": found.num_trajectories,
        "num_tokens": found.num_tokens,
        "num_actions": found.num_actions,
        "tree_share": found.tree_share,
        "off_by_quarter": found.profile.off_by_quarter,
        "gap_by_quarter": found.profile.gap_by_quarter,
        "checks": [
            {
                "name": check.name,
                "passed": check.passed,
                "statistics": [
                    {"name": s.name, "measured": s.measured, "allowed": s.allowed, "unit": s.unit}
                    for s in check.statistics
                ],
                "meaning": check.meaning,
            }
            for check in found.checks
        ],
        "skipped": [str(bad) for bad in skipped],
    }
