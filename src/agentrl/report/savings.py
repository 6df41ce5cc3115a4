"""Where a run's seconds and tokens went, what each saving was worth, and how one batch stands in rows."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from agentrl.report.figures import Figure, Part, stacked_bars
from agentrl.report.html import Section, Table
from agentrl.report.picture import PictureRow, packing_picture
from agentrl.report.run import Batch, Run, StepRecord

_TOKENS = (
    Part("action tokens", "action"),
    Part("prompt and tool tokens", "prompt"),
    Part("padding", "padding"),
)
_LAYOUTS = {"padded": "padded", "packed": "packed", "tree": "packed, shared prefixes once"}


def spent_section(run: Run) -> Section:
    """Where the seconds and the tokens went, in the whole run and in each third of its steps."""
    seconds = [
        (name, [sum(r.seconds_sampling for r in rs), sum(r.seconds_training for r in rs), evaluating])
        for name, rs, evaluating in _thirds(run)
    ]
    tokens = [(name, _token_split(rs)) for name, rs, _ in _thirds(run)]
    figures = (
        stacked_bars(
            "Seconds",
            (Part("sampling", "c6"), Part("training", "c1"), Part("evaluating", "c7")),
            seconds,
            unit="s",
        ),
        stacked_bars(
            "Sampled tokens",
            (
                Part("action tokens that were learned from", "action"),
                Part("their prompts and tool tokens", "prompt"),
                Part("in groups without signal", "padding"),
            ),
            tokens,
            unit="tokens",
            digits=0,
        ),
    )
    return Section(heading="Where the seconds and tokens went", figures=figures)


def savings_section(run: Run) -> Section | None:
    """What each saving was worth, in positions; None where the run did not record them."""
    records = [record for record in run.records if record.positions_packed is not None]
    if not records:
        return None

    def total(of: Callable[[StepRecord], float | None]) -> float:
        return sum(of(record) or 0 for record in records)

    tokens, actions = total(lambda r: r.tokens), total(lambda r: r.action_tokens)
    sampled_actions = total(lambda r: r.sampled_actions)
    all_padded = total(lambda r: r.positions_sampled_padded)
    padded, packed = total(lambda r: r.positions_padded), total(lambda r: r.positions_packed)
    tree, tree_actions = total(lambda r: r.positions_tree), total(lambda r: r.actions_tree)
    decoded, uncached = total(lambda r: r.positions_decoded), total(lambda r: r.positions_uncached)
    bars = [
        ("all that was sampled, padded", [sampled_actions, tokens - sampled_actions, all_padded - tokens]),
        ("groups with signal, padded", [actions, packed - actions, padded - packed]),
        ("packed", [actions, packed - actions, 0]),
        ("packed, shared prefixes once", [tree_actions, tree - tree_actions, 0]),
    ]
    figures = [
        _positions(
            "Positions that training computes",
            _TOKENS,
            [(name, [max(0.0, value) for value in values]) for name, values in bars],
            caption="Padded: to the longest trajectory of the step.",
        ),
        _positions(
            "Positions with logits",
            (Part("positions with logits", "c1"),),
            [
                ("every position, padded", [padded]),
                ("every position, packed", [packed]),
                ("action tokens only", [actions]),
            ],
        ),
    ]
    layout = run.setting("packing", "padded")
    used = {True: "in use", False: "not in use"}
    rows = [
        _saving("skip groups without signal", all_padded, padded, "in use"),
        _saving("pack instead of pad", padded, packed, used[layout != "padded"]),
        _saving("compute shared prefixes once", packed, tree, used[layout == "tree"]),
        _saving("logits at action tokens only", packed, actions, used[layout != "padded"]),
    ]
    if uncached:
        figures.append(
            _positions(
                "Positions that sampling computes",
                (Part("positions", "c6"),),
                [("every token reads its prefix anew", [uncached]), ("keys and values kept", [decoded])],
            )
        )
        rows.append(_saving("keep keys and values while sampling", uncached, decoded, "in use"))
    columns = ("saving", "positions without", "with", "fewer", "in this run")
    table = Table(columns, tuple(rows), frozenset({1, 2, 3}))
    return Section(heading="What each saving was worth", tables=(table,), figures=tuple(figures))


def batch_section(run: Run) -> Section | None:
    """The packing picture and the logits of one real batch; None where the run recorded none."""
    batch = run.batch
    if batch is None or not any(batch.layouts.values()):
        return None
    layouts = [
        (_LAYOUTS.get(name, name), [row.picture() for row in rows]) for name, rows in batch.layouts.items()
    ]
    which = f"Step {batch.step}: " + (
        f"the {batch.num_shown} trajectories that it learned from."
        if batch.num_shown == batch.num_trajectories
        else f"the first {batch.num_shown} of the {batch.num_trajectories} trajectories that it learned from."
    )
    picture = packing_picture(
        "One batch in rows",
        layouts,
        caption=f"{which} Packed rows hold {batch.row_tokens:,} tokens. No token reads another sequence.",
    )
    return Section(heading="One batch", figures=(picture, _logits_figure(batch, dict(layouts))))


def _logits_figure(batch: Batch, layouts: dict[str, Sequence[PictureRow]]) -> Figure:
    bars: list[tuple[str, list[float]]] = []
    for name, rows in layouts.items():
        if name == _LAYOUTS["padded"]:
            bars.append((f"{name}, every position", [sum(row.num_positions for row in rows)]))
        else:
            tokens = sum(length for row in rows for kind, length in row.runs if kind != "padding")
            bars.append((f"{name}, every token", [tokens]))
    first = next(iter(layouts.values()))
    bars.append(("action tokens only", [sum(n for row in first for kind, n in row.runs if kind == "action")]))
    each = 2 * 4 * batch.vocab_size  # bytes of a position's float32 logits and their gradient
    large = each * max(values[0] for _, values in bars) >= 1e9
    unit, size = ("GB", 1e9) if large else ("MB", 1e6)
    return stacked_bars(
        f"Memory of this batch's logits, a vocabulary of {batch.vocab_size:,}",
        (Part("logits and their gradient, float32", "c6"),),
        [(name, [each * values[0] / size]) for name, values in bars],
        unit=unit,
        digits=2,
        caption="Were the batch one microbatch.",
    )


def _positions(
    title: str, parts: Sequence[Part], bars: Sequence[tuple[str, Sequence[float]]], caption: str = ""
) -> Figure:
    if max(sum(values) for _, values in bars) < 1e6:
        return stacked_bars(title, parts, bars, unit="positions", digits=0, caption=caption)
    millions = [(name, [value / 1e6 for value in values]) for name, values in bars]
    return stacked_bars(title, parts, millions, unit="M positions", digits=2, caption=caption)


def _saving(name: str, without: float, with_it: float, used: str) -> tuple[str, str, str, str, str]:
    fewer = f"{1 - with_it / without:.0%}" if without else ""
    return name, f"{without:,.0f}", f"{with_it:,.0f}", fewer, used


def _thirds(run: Run) -> list[tuple[str, Sequence[StepRecord], float]]:
    # (name, records, seconds of evaluating); the evaluations before and after belong to the whole run only
    records = run.records
    during = sum(record.seconds_evaluating for record in records)
    whole = during + run.summary.seconds_before + run.summary.seconds_after
    parts: list[tuple[str, Sequence[StepRecord], float]] = [("whole run", records, whole)]
    if len(records) >= 3:
        edges = [round(i * len(records) / 3) for i in range(4)]
        for first, last in pairwise(edges):
            part = records[first:last]
            name = f"steps {part[0].step} to {part[-1].step}"
            parts.append((name, part, sum(record.seconds_evaluating for record in part)))
    return parts


def _token_split(records: Sequence[StepRecord]) -> list[float]:
    """Action tokens learned from, their context, and all tokens of groups without signal."""
    tokens = float(sum(record.tokens for record in records))
    actions = sum(record.action_tokens for record in records)
    # without a count, the share of episodes with signal stands for their share of the tokens
    kept = sum(
        (1 - (record.zero_adv_frac or 0.0)) * record.tokens
        if record.positions_packed is None
        else record.positions_packed
        for record in records
    )
    return [actions, max(0.0, kept - actions), max(0.0, tokens - max(kept, actions))]
