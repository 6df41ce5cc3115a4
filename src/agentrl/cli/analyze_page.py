"""The page that `agentrl analyze --html` writes."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from agentrl.report.figures import Figure, Part, stacked_bars
from agentrl.report.html import Section, Table, render_page

if TYPE_CHECKING:
    from agentrl.data.records import BadRecord
    from agentrl.diagnose.analyze import Analysis

_M = 1e6


def as_html(names: Sequence[str], analysis: "Analysis", skipped: "Sequence[BadRecord]") -> str:
    """The analysis of the files of these names as one page that needs nothing else."""
    columns = ("figure", "measured", "what to do")
    sections = [
        Section(
            heading=heading,
            tables=(Table(columns, tuple((f.name, f.text, f.advice) for f in findings)),),
        )
        for heading, findings in analysis.sections.items()
    ]
    sections.insert(0, Section(heading="At a glance", figures=tuple(_figures(analysis))))
    if skipped:
        rows = tuple((bad.file, bad.place, bad.field, bad.problem) for bad in skipped)
        table = Table(("file", "place", "field", "problem"), rows)
        sections.append(Section(heading=f"Skipped records: {len(skipped):,}", tables=(table,)))
    lead = f"{analysis.num_trajectories:,} trajectories of {', '.join(names)}"
    return render_page("agentrl analyze", sections, lead)


def _figures(analysis: "Analysis") -> list[Figure]:
    found = [_positions(analysis), _lengths(analysis), _logits(analysis)]
    if "pass rates" in analysis:
        found.append(_pass_rates(analysis))
    return found


def _positions(analysis: "Analysis") -> Figure:
    tokens, share = analysis["tokens"], analysis["action share"]
    padded = tokens / (1 - analysis["padding to the longest"])
    packed = max(tokens, analysis["packed positions"])
    parts = [
        Part("actions", "action"),
        Part("prompt and tools", "prompt"),
        Part("padding", "padding"),
        Part("either, each prefix once", "tool"),
    ]
    bars = [
        (name, [share * tokens / _M, (1 - share) * tokens / _M, (positions - tokens) / _M, 0.0])
        for name, positions in (("padded", padded), ("packed", packed))
    ]
    bars += [
        (name, [0.0, 0.0, 0.0, analysis[name] * tokens / _M])
        for name in ("shared within groups", "shared over the file")
    ]
    return stacked_bars("Positions that a model would compute", parts, bars, unit="M positions", digits=2)


def _lengths(analysis: "Analysis") -> Figure:
    histogram = analysis["length histogram"]
    counts, edges = histogram["counts"], [round(edge) for edge in histogram["edges"]]
    bars = [
        (f"to {high:,} tokens", [float(count)])
        for count, (_, high) in zip(counts, pairwise(edges), strict=True)
    ]
    parts = [Part("trajectories", "c1")]
    return stacked_bars("Lengths of trajectories", parts, bars, unit="trajectories", digits=0)


def _logits(analysis: "Analysis") -> Figure:
    names = ("in full", "in chunks", "of action tokens only", "of action tokens, recomputed in chunks")
    bars = [(name, [analysis[f"logits {name}"]]) for name in names]
    return stacked_bars("Memory of a microbatch's logits", [Part("logits", "c6")], bars, unit="GB", digits=2)


def _pass_rates(analysis: "Analysis") -> Figure:
    rates = analysis["pass rates"]
    parts = [Part("with signal", "c1"), Part("without", "padding")]
    bars = [
        (name, [0.0, count] if name in ("0%", "100%") else [count, 0.0])
        for name, count in ((name, float(count)) for name, count in rates.items())
    ]
    return stacked_bars("Pass rates of groups", parts, bars, unit="groups", digits=0)
