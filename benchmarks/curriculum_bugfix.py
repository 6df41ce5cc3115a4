"""Curricula on the BugFix gym: what each spends, what it wastes, and how well the policy plays in the end.

Every arm trains the supervised base for the same number of steps; arms of one seed start from the same
model and are evaluated on the held-out tasks with the same random numbers. Finished runs are appended to a
file, one JSON line each, and never run again: stop it, start it again, or only print what is there.

    python benchmarks/curriculum_bugfix.py                           # 6 arms, 8 seeds, 60 steps
    python benchmarks/curriculum_bugfix.py --arms uniform default    # some of them
    python benchmarks/curriculum_bugfix.py --report                  # the tables, from what is there
    python benchmarks/curriculum_bugfix.py --seeds 2 --steps 3 --base.num-steps 300    # does it run?
"""

import json
import multiprocessing
import os
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

import agentrl as arl
from agentrl.curriculum.pass_rate import WindowMean
from agentrl.train.base import BaseConfig
from agentrl.train.curriculum import SampledTasks
from agentrl.train.loop import bugfix_trainer
from results import append, commit, read_records

NUM_BOOTSTRAP = 10_000

# arm -> what it is
ARMS = {
    "uniform": "all tasks",
    "band": "band (0, 1), last group: the textbook",
    "band-window": "band (0, 1), mean of the last 3 groups",
    "proportional": "p(1-p)-proportional",
    "default": "the default: top",
    "default-band": "the default inside (.11, .89), not filled up",
}

# Rows of the first table for orientation, from the book chapter that the textbook's rule is taken from.
CHAPTER = (
    "| the chapter: all tasks | | 3,840 | last: 0.61 to 0.68 | 43% | 0.76 to 0.82 |",
    "| the chapter: textbook | | 2,088 to 2,184 | last: 0.38 to 0.47 | 27% | 0.73 to 0.77 |",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to run. Runs with other settings in the same file are left out of the report."""

    arms: tuple[str, ...] = tuple(ARMS)
    """Arms to run, of those that the file lists."""
    seeds: int = 8
    """Seeds an arm, from 0."""
    steps: int = 60
    """Training steps."""
    eval_every: int = 6
    """Steps between held-out evaluations."""
    eval_samples: int = 16
    """Episodes a held-out task in each."""
    final_samples: int = 64
    """Episodes a held-out task after the last step."""
    rl: arl.RLConfig = field(default_factory=arl.RLConfig)
    """Learning; its seed is set by the run."""
    base: BaseConfig = field(default_factory=BaseConfig)
    """The supervised start, made once and cached."""
    results: Path = Path("curriculum_bugfix.jsonl")
    """One JSON line a finished run."""
    workers: int = 2
    """Processes, one thread each."""
    report: bool = False
    """Run nothing; print the tables from what is there."""

    def settings(self) -> dict[str, Any]:
        """What two runs must share to be compared."""
        rl = {name: value for name, value in asdict(self.rl).items() if name != "seed"}
        names = ("steps", "eval_every", "eval_samples", "final_samples")
        shared = {name: getattr(self, name) for name in names} | {"rl": rl, "base": asdict(self.base)}
        return json.loads(json.dumps(shared))


def make_sampler(arm: str, names: list[str], seed: int) -> arl.TaskSampler:
    if arm == "uniform":
        return arl.TaskSampler(names, select="uniform", seed=seed)
    if arm == "band":
        return arl.TaskSampler.textbook(names, seed=seed)
    if arm == "band-window":
        return arl.TaskSampler(names, WindowMean(3), "band", revisit=1, seed=seed, fill=False)
    if arm == "proportional":
        return arl.TaskSampler(names, select="proportional", seed=seed)
    if arm == "default":
        return arl.TaskSampler(names, seed=seed)
    assert arm == "default-band"
    return arl.TaskSampler(names, low=0.11, high=0.89, seed=seed, fill=False)


def play(arm: str, seed: int, config: Config) -> dict[str, Any]:
    """One run: its record for the results file."""
    torch.set_num_threads(1)
    begin = time.perf_counter()
    tok, cfg = arl.build_tokenizer(arl.make_tasks("all")), replace(config.rl, seed=seed)
    tasks, heldout = arl.make_tasks("train"), arl.make_tasks("heldout")
    model = arl.make_rl_base(tok, config.base)
    sampler = make_sampler(arm, [task.name for task in tasks], seed)
    curriculum = SampledTasks(tasks, sampler, cfg.prompts_per_step, arm)
    trainer = bugfix_trainer(model, tasks, tok, cfg, curriculum)
    num_episodes = 0
    episodes: list[int] = []
    zero_adv: list[float] = []
    evaluations: list[tuple[int, float]] = []  # (episodes so far, held-out pass rate)
    for step in range(config.steps + 1):
        if step > 0:
            record = trainer.step()
            num_episodes += record["episodes"]
            episodes.append(record["episodes"])
            zero_adv.append(record["zero_adv_frac"])
        if step % config.eval_every == 0 or step == config.steps:
            num_samples = config.final_samples if step == config.steps else config.eval_samples
            figures = arl.evaluate(model, heldout, tok, num_samples, cfg=cfg)
            evaluations.append((num_episodes, figures["pass_rate"]))
    return {
        "arm": arm,
        "seed": seed,
        "settings": config.settings(),
        "episodes": episodes,
        "zero_adv_frac": zero_adv,
        "evaluations": evaluations,
        "seconds": round(time.perf_counter() - begin, 1),
        "commit": commit(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
    }


def read(config: Config) -> dict[tuple[str, int], dict[str, Any]]:
    """Finished runs of these settings by (arm, seed)."""
    runs: dict[tuple[str, int], dict[str, Any]] = {}
    settings, num_other = config.settings(), 0
    for run in read_records(config.results):
        if run["settings"] == settings:
            runs[run["arm"], run["seed"]] = run
        else:
            num_other += 1
    if num_other:
        print(f"{config.results}: {num_other} runs with other settings left out", file=sys.stderr)
    return runs


def run_missing(config: Config) -> None:
    done = read(config)
    missing = [
        (arm, seed) for seed in range(config.seeds) for arm in config.arms if (arm, seed) not in done
    ]  # seed by seed, so that a stopped benchmark compares all arms on the seeds that it has
    if not missing:
        return
    arl.make_rl_base(arl.build_tokenizer(arl.make_tasks("all")), config.base)  # once, for the workers to read
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(config.workers, mp_context=context) as pool:
        waiting = [pool.submit(play, arm, seed, config) for arm, seed in missing]
        for number, future in enumerate(as_completed(waiting), start=1):
            try:
                run = future.result()
            except BaseException:  # also Ctrl-C: do not play what would not be written down
                pool.shutdown(cancel_futures=True)
                raise
            append(config.results, run)
            print(
                f"{number}/{len(missing)}  {run['arm']}, seed {run['seed']}: {sum(run['episodes']):,} "
                f"episodes, held-out {run['evaluations'][-1][1]:.3f}, {run['seconds']:.0f} s",
                flush=True,
            )


# The report. Every interval resamples seeds: percentile bootstrap of 95%, which holds the mean of 8 normal
# values 89 times in 100.


def thirds(run: dict[str, Any]) -> list[float]:
    """Share of the episodes without gradient in each third of the steps."""
    parts = zip(np.array_split(run["zero_adv_frac"], 3), np.array_split(run["episodes"], 3), strict=True)
    return [float((share * count).sum() / max(count.sum(), 1)) for share, count in parts]


def wasted(run: dict[str, Any]) -> float:
    return float(np.dot(run["zero_adv_frac"], run["episodes"]))


def final(run: dict[str, Any]) -> float:
    return run["evaluations"][-1][1]


def rising(rates: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The nearest curve that never falls (isotonic regression by pooling adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []  # (mean, weight, length)
    for rate, weight in zip(rates, weights, strict=True):
        mean, total, length = float(rate), float(weight), 1
        while blocks and blocks[-1][0] >= mean:
            before, other, count = blocks.pop()
            mean = (mean * total + before * other) / (total + other)
            total, length = total + other, length + count
        blocks.append((mean, total, length))
    return np.repeat([mean for mean, _, _ in blocks], [length for _, _, length in blocks])


def episodes_to(level: float, curves: np.ndarray, weights: np.ndarray) -> float:
    """Episodes at which the mean over seeds of curves [seeds, evaluations, 2] reaches `level`.

    The mean's rates are first made to rise (`rising`, weights: episodes an evaluation), since a noisy curve
    first touches a level too early. Linear between evaluations; infinite where it never does.
    """
    episodes, noisy = curves.mean(0).T
    rates = rising(noisy, weights)
    above = np.flatnonzero(rates >= level - 1e-9)  # an arm reaches its own end, however it is summed
    if not above.size:
        return float("inf")
    i = int(above[0])
    if i == 0:
        return float(episodes[0])
    share = min((level - rates[i - 1]) / (rates[i] - rates[i - 1]), 1.0)
    return float(episodes[i - 1] + share * (episodes[i] - episodes[i - 1]))


def rate_at(num_episodes: float, curves: np.ndarray) -> np.ndarray:
    """Held-out pass rate of each seed after num_episodes, linear between evaluations; at most its last."""
    return np.array([np.interp(num_episodes, curve[:, 0], curve[:, 1]) for curve in curves])


def interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975], method="inverted_cdf")
    return float(low), float(high)


def resampled(count: int) -> np.ndarray:
    """Indices [NUM_BOOTSTRAP, count] of resampled seeds, the same at every call."""
    return np.random.default_rng(0).integers(count, size=(NUM_BOOTSTRAP, count))


def count_text(value: float) -> str:
    return f"{value:,.0f}" if value < float("inf") else "never"


def report(config: Config) -> None:
    by_arm: dict[str, list[dict[str, Any]]] = {}
    runs = read(config)
    for arm, seed in sorted(runs, key=lambda key: (list(ARMS).index(key[0]), key[1])):
        by_arm.setdefault(arm, []).append(runs[arm, seed])
    if not by_arm:
        print(f"{config.results} holds no run of these settings")
        return
    print("\n| arm | seeds | episodes | zero-advantage by third | wasted | held-out pass rate |")
    print("|---|---|---|---|---|---|")
    for arm, each in by_arm.items():
        counts = [sum(run["episodes"]) for run in each]
        by_third = np.mean([thirds(run) for run in each], axis=0)
        shares = sum(map(wasted, each)) / sum(counts)
        rates = np.array([final(run) for run in each])
        low, high = interval(rates[resampled(len(each))].mean(1))
        print(
            f"| {ARMS[arm]} | {len(each)} | {np.mean(counts):,.0f} ({min(counts):,} to {max(counts):,}) "
            f"| {', '.join(f'{share:.2f}' for share in by_third)} | {shares:.0%} "
            f"| {rates.mean():.3f} [{low:.3f}, {high:.3f}] |"
        )
    print("\n".join(CHAPTER))
    if "uniform" in by_arm:
        compare(by_arm, config)
    if {"band", "band-window"} <= by_arm.keys():
        compare_windows(by_arm)
    first = next(iter(runs.values()))
    seconds = sum(run["seconds"] for run in runs.values())
    print(
        f"\n{config.steps} steps, groups of {config.rl.group_size}, {config.rl.prompts_per_step} tasks a "
        f"step; held-out: {config.final_samples} episodes a task; intervals: percentile "
        f"bootstrap over seeds, 95% in name (8 seeds: 89%); "
        f"commits {', '.join(sorted({run['commit'] for run in runs.values()}))}; torch {first['torch']}; "
        f"{first['machine']}; {seconds:,.0f} process seconds"
    )


def paired(by_arm: dict[str, list[dict[str, Any]]], arm: str, other: str) -> tuple[np.ndarray, np.ndarray]:
    """Curves [seeds, evaluations, 2] of two arms, on the seeds that both have."""
    theirs = {run["seed"]: run for run in by_arm[other]}
    pairs = [(run, theirs[run["seed"]]) for run in by_arm[arm] if run["seed"] in theirs]
    ours, others = ([run[i]["evaluations"] for run in pairs] for i in (0, 1))
    return np.array(ours), np.array(others)


def difference_text(difference: np.ndarray, error: float) -> str:
    """Mean over seeds with its interval, and in units of a standard error, where there is one."""
    low, high = interval(difference[resampled(len(difference))].mean(1))
    text = f"{difference.mean():+.3f} [{low:+.3f}, {high:+.3f}]"
    return f"{text} ({difference.mean() / error:+.1f} SE)" if error > 0 else text


def compare(by_arm: dict[str, list[dict[str, Any]]], config: Config) -> None:
    """Each arm against the uniform one, on the seeds that both have."""
    columns = ("arm", "seeds", "held-out, minus all tasks", "the same, at half of the episodes of all tasks")
    columns += ("episodes to what all tasks end at", "of the episodes of all tasks")
    print(f"\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for arm in by_arm:
        ours, theirs = paired(by_arm, arm, "uniform")
        if not len(ours):
            continue
        draws, ends = resampled(len(ours)), theirs[:, -1, 1]
        weights = np.full(ours.shape[1], config.eval_samples)
        weights[-1] = config.final_samples
        error = float(ends.std(ddof=1)) / len(ends) ** 0.5 if len(ends) > 1 else 0.0
        needed = episodes_to(ends.mean(), ours, weights)
        least, most = interval(
            np.array([episodes_to(ends[draw].mean(), ours[draw], weights) for draw in draws])
        )
        spent = theirs[:, -1, 0].mean()
        share = f"{needed / spent:.0%}" if needed < float("inf") else "-"
        print(
            f"| {ARMS[arm]} | {len(ours)} | {difference_text(ours[:, -1, 1] - ends, error)} "
            f"| {difference_text(rate_at(spent / 2, ours) - ends, error)} "
            f"| {count_text(needed)} [{count_text(least)}, {count_text(most)}] | {share} |"
        )
    print(
        "\nSE: of the mean of all tasks. The aim: the default at most half an SE below at half of the "
        "episodes. Episodes to a level: on the mean curve, made to rise by isotonic regression."
    )


def compare_windows(by_arm: dict[str, list[dict[str, Any]]]) -> None:
    """What the band gains from the mean of three groups, and what that costs."""
    ours, theirs = paired(by_arm, "band-window", "band")
    if len(ours):
        more = ours[:, -1, 0].mean() / theirs[:, -1, 0].mean() - 1
        print(
            f"\nThe band with the mean of the last 3 groups, minus the textbook's: held-out "
            f"{difference_text(ours[:, -1, 1] - theirs[:, -1, 1], 0.0)}, {more:+.0%} episodes."
        )


def main(config: Config) -> None:
    unknown = set(config.arms) - ARMS.keys()
    if unknown:
        raise ValueError(f"no arm {', '.join(sorted(unknown))}; arms are {', '.join(ARMS)}")
    if not config.report:
        run_missing(config)
    report(config)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
