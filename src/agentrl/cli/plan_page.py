"""The page that `agentrl plan --html` writes."""

from agentrl.cli.plan_output import (
    GB,
    Answer,
    amount,
    hours_table,
    rate_rows,
    saving_rows,
    shown,
    uncertainty_rows,
)
from agentrl.report.figures import Figure, Part, stacked_bars
from agentrl.report.html import Section, Table, render_page


def as_html(answer: Answer) -> str:
    """The answer as one self-contained page."""
    columns, *rows = hours_table(answer)
    rate_columns, *rates = rate_rows(answer)
    assumptions = tuple((a.flag, shown(a.value), a.unit, a.meaning, a.origin) for a in answer.assumptions)
    cost = Table(tuple(columns), tuple(map(tuple, rows)), frozenset(range(1, len(columns))))
    speeds = Table(rate_columns, tuple(rates), frozenset({1, 2}))
    saves = Table(
        ("change, alone", "flags", "saves over the run"), tuple(saving_rows(answer)), frozenset({2})
    )
    moves = Table(
        ("assumption", "with less or more of it", "GPU-hours of the run"),
        tuple(uncertainty_rows(answer)),
        frozenset({2}),
    )
    largest = f"Largest microbatch that fits: {answer.largest_microbatch:,} tokens, the token budget to set."
    now = f"The estimate is {amount(answer.chosen.run_gpu_hours)} GPU-hours for the run."
    sections = [
        Section(
            heading="Cost",
            paragraphs=tuple(answer.notes),
            tables=(cost, speeds),
            figures=(_hours_figure(answer),),
        ),
        Section(heading="Memory", paragraphs=(largest,), figures=(_memory_figure(answer),)),
        Section(heading="What would save most", tables=(saves,)),
        Section(heading="What moves the answer most", paragraphs=(now,), tables=(moves,)),
        Section(
            heading="Assumptions",
            tables=(Table(("flag", "value", "unit", "meaning", "origin"), assumptions, frozenset({1})),),
        ),
    ]
    return render_page("What the run will cost", sections, lead=answer.headline())


def _hours_figure(answer: Answer) -> Figure:
    parts = [
        Part("train", "c1"),
        Part("old log-probs", "c2"),
        Part("reference", "c4"),
        Part("prefill", "c3"),
        Part("decode", "c6"),
        Part("waiting", "padding"),
    ]
    estimates = [(f"calibrated, {e.schedule}", e.step_hours) for e in answer.estimates]
    return stacked_bars(
        "GPU-hours of one step",
        parts,
        [
            (name, [v for _, v in hours.items()])
            for name, hours in [("first order", answer.first_order), *estimates]
        ],
        unit="GPU-hours",
        digits=2,
        caption="In the first order, idle time is inside decode, which is divided by the share --busy.",
    )


def _memory_figure(answer: Answer) -> Figure:
    parts = [
        Part("parameters", "c1"),
        Part("gathered", "c2"),
        Part("gradients", "c3"),
        Part("optimizer", "c4"),
        Part("reference", "c7"),
        Part("activations", "c5"),
        Part("logits", "c6"),
    ]
    tokens = answer.plan.training.microbatch_tokens
    return stacked_bars(
        f"Memory of a training GPU ({answer.chosen.train_gpus} of them), {tokens:,} tokens a microbatch",
        parts,
        [(v.name, [size / GB for _, size in v.memory.items()]) for v in answer.memory_variants()],
        unit="GB",
        limit=("what training may fill", answer.memory_limit_bytes / GB),
        caption="Logits full: all of them and their gradient; chunked: plain backward keeps every chunk; "
        "recomputed: one chunk at a time in both directions; actions: at the sampled tokens only.",
    )
