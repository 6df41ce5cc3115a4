"""How a run learned: curves over steps and over episodes, and beside other runs."""

from collections.abc import Sequence

from agentrl.report.figures import Color, Figure, Line, line_chart
from agentrl.report.html import Section, Table
from agentrl.report.run import Run

_WINDOW = 5  # steps of a running mean
_RUN_COLORS: tuple[Color, ...] = ("c1", "c6", "c3", "c4", "c5")
MOST_RUNS = len(_RUN_COLORS)


def learning_section(run: Run) -> Section:
    """Pass rates, episodes, groups without signal and entropy of one run."""
    if not run.records:
        return Section(heading="Learning", paragraphs=("No step is done yet.",))
    figures = [_learning_curve(run), _pass_rate_over_episodes(run), _zero_advantage(run)]
    steps = [record.step for record in run.records]
    pool = tuple(record.pool for record in run.records)
    if any(size is not None for size in pool):
        line = Line("tasks in the pool", pool, "c3")
        figures.append(
            line_chart("Pool of tasks", steps, [line], x_label="step", y_label="tasks", span=(0, 1))
        )
    entropy = {record.step: record.entropy for record in run.records if record.entropy is not None}
    if entropy:
        line = Line("of steps with an update", tuple(entropy.values()), "c4", tuple(map(float, entropy)))
        caption = "Of the policy at the action tokens. Near zero it no longer explores."
        figures.append(
            line_chart("Entropy", (), [line], x_label="step", y_label="nats", span=(0, 0.1), caption=caption)
        )
    return Section(heading="Learning", figures=tuple(figures))


def filter_section(runs: Sequence[Run]) -> Section:
    """What choosing tasks saves, of up to five runs: held-out pass rate over episodes, and episodes a step.

    Raises ValueError for more runs than there are colours.
    """
    if len(runs) > MOST_RUNS:
        raise ValueError(f"at most {MOST_RUNS} runs can be told apart, got {len(runs)}")
    names = _names(runs)
    heldout: list[Line] = []
    episodes: list[Line] = []
    for run, name, color in zip(runs, names, _RUN_COLORS, strict=False):
        if points := run.heldout():
            rates = tuple(rate for _, _, rate in points)
            counts = tuple(float(count) for _, count, _ in points)
            heldout.append(Line(name, rates, color, counts, dots=True))
        if run.records:
            steps = tuple(float(record.step) for record in run.records)
            episodes.append(Line(name, tuple(float(r.episodes) for r in run.records), color, steps))
    figures: list[Figure] = []
    if heldout:
        figures.append(
            line_chart(
                "Held-out pass rate over episodes",
                (),
                heldout,
                x_label="episodes",
                y_label="held-out pass rate",
                span=(0, 1),
                caption="Higher at the same number of episodes: a rollout was worth more.",
            )
        )
    if episodes:
        figures.append(
            line_chart(
                "Episodes a step",
                (),
                episodes,
                x_label="step",
                y_label="episodes",
                span=(0, 1),
                caption="Tasks whose outcome is certain are not rolled out.",
            )
        )
    columns = ("run", "episodes", "in groups without signal", "held-out pass rate")
    rows = tuple(_figures_of(run, name) for run, name in zip(runs, names, strict=True))
    return Section(
        heading="Choosing tasks", tables=(Table(columns, rows, frozenset({1, 2, 3})),), figures=tuple(figures)
    )


def tasks_section(run: Run) -> Section | None:
    """Pass rate of every held-out task, before and after; None before the first evaluation."""
    before, after = run.summary.before, run.summary.after
    if before is None or not before.per_task:
        return None
    rows = tuple(
        (task, f"{rate:.2f}", f"{after.per_task[task]:.2f}" if after and task in after.per_task else "")
        for task, rate in before.per_task.items()
    )
    return Section(
        heading="Held-out tasks", tables=(Table(("task", "before", "after"), rows, frozenset({1, 2})),)
    )


def running_mean(values: Sequence[float | None], window: int = _WINDOW) -> tuple[float | None, ...]:
    """The mean of each value and up to window - 1 before it; None where none of them is known.

    >>> running_mean([1.0, 3.0, None, 5.0], 2)
    (1.0, 2.0, 3.0, 5.0)
    """
    means: list[float | None] = []
    for end in range(1, len(values) + 1):
        known = [value for value in values[max(0, end - window) : end] if value is not None]
        means.append(sum(known) / len(known) if known else None)
    return tuple(means)


def _learning_curve(run: Run) -> Figure:
    steps = [float(record.step) for record in run.records]
    rates = tuple(record.pass_rate for record in run.records)
    lines = [
        Line("a step's training tasks", rates, "c7"),
        Line(f"their mean over {_WINDOW} steps", running_mean(rates), "c1"),
    ]
    points = run.heldout()
    if points:
        places = tuple(float(step) for step, _, _ in points)
        lines.append(Line("held-out tasks", tuple(rate for _, _, rate in points), "c6", places, dots=True))
    return line_chart(
        "Learning curve", steps, lines, x_label="step", y_label="mean reward, 1 for a pass", span=(0, 1)
    )


def _pass_rate_over_episodes(run: Run) -> Figure:
    rates = running_mean([record.pass_rate for record in run.records])
    lines = [Line(f"training tasks, mean over {_WINDOW} steps", rates, "c1")]
    if points := run.heldout():
        places = tuple(float(count) for _, count, _ in points)
        lines.append(Line("held-out tasks", tuple(rate for _, _, rate in points), "c6", places, dots=True))
    return line_chart(
        "Pass rate over episodes",
        [float(count) for count in run.episodes_until()],
        lines,
        x_label="episodes",
        y_label="mean reward, 1 for a pass",
        span=(0, 1),
    )


def _zero_advantage(run: Run) -> Figure:
    shares = tuple(record.zero_adv_frac for record in run.records)
    lines = [Line("a step", shares, "c7"), Line(f"mean over {_WINDOW} steps", running_mean(shares), "c6")]
    if all(share is None for share in shares):
        lines = [Line("not recorded", (0.0,) * len(shares), "c7")]
    return line_chart(
        "Share of episodes without signal",
        [float(record.step) for record in run.records],
        lines,
        x_label="step",
        y_label="share in groups that all passed or all failed",
        span=(0, 1),
        caption="Their advantages are zero: they were sampled and teach nothing.",
    )


def _names(runs: Sequence[Run]) -> list[str]:
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else str(run.path) for name, run in zip(names, runs, strict=True)]


def _figures_of(run: Run, name: str) -> tuple[str, str, str, str]:
    episodes = sum(record.episodes for record in run.records)
    wasted = sum(record.episodes * (record.zero_adv_frac or 0.0) for record in run.records)
    points = run.heldout()
    return (
        name,
        f"{episodes:,}",
        f"{wasted / episodes:.0%}" if episodes else "",
        f"{points[0][2]:.2f} to {points[-1][2]:.2f}" if points else "",
    )
