"""The shape of the episodes in a trajectory file, for `agentrl plan --trajectories`."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.plan.inputs import flag_of, ranges_of
from agentrl.plan.workload import Lengths, Workload, measured_lengths

if TYPE_CHECKING:
    from agentrl.data.records import BadRecord
    from agentrl.data.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """A workload with what a file says of its episodes, their lengths, and what the reader must know."""

    workload: Workload
    lengths: Lengths | None = None  # relative, after the prompt; None: the workload's spread holds
    measured: frozenset[str] = frozenset()  # fields of the workload that the file gave
    notes: tuple[str, ...] = ()


def episodes_of(path: Path, workload: Workload, given: set[str], skip_bad: bool = False) -> Episodes:
    """The workload with the shape of the trajectories in a file, where no flag gives it.

    Tokens, sampled tokens, prompt (before the first action) and turns (runs of action tokens) are means over
    the trajectories. The share without signal is that of the episodes in groups of two or more whose rewards
    are all equal; without such a group it stays as it is. The lengths are measured unless --length-cv is
    given.

    Raises ValueError, naming the file, where it holds no trajectory, no sampled token or no signal at all.
    """
    import agentrl

    skipped: list[BadRecord] = []
    trajectories = list(agentrl.import_trajectories(path, skipped=skipped if skip_bad else None))
    if not trajectories:
        raise ValueError(f"{path} holds no trajectories" + (" that can be read" if skipped else ""))
    count = len(trajectories)
    tokens = sum(t.num_tokens for t in trajectories) / count
    sampled = sum(t.num_actions for t in trajectories) / count
    if sampled < 1 and "--sampled" not in given:
        raise ValueError(
            f"{path}: its {count} trajectories have {sampled:g} sampled tokens on average, and a plan needs "
            "at least 1; mark them in action_mask, or give --sampled"
        )
    prompts = [_prompt_tokens(t) for t in trajectories]
    after_prompt = [max(1, t.num_tokens - prompt) for t, prompt in zip(trajectories, prompts, strict=True)]
    lengths = measured_lengths(after_prompt, 64)
    measured: dict[str, Any] = {
        "tokens": tokens,
        "sampled": sampled,
        "prompt": min(sum(prompts) / count, tokens - sampled),
        "turns": max(1, round(sum(t.num_runs for t in trajectories) / count)),
        "length_cv": math.sqrt(max(0.0, lengths.squared_mean - 1)),
    }
    silent, compared = _silent_episodes(trajectories)
    notes = _notes(path, trajectories, skipped, compared)
    if compared:
        measured["zero_advantage"] = silent / compared
        most = ranges_of(Workload)["zero_advantage"].most
        if silent / compared > most and "--zero-advantage" not in given:
            raise ValueError(
                f"{path}: the rewards of each of its groups are all equal, so no episode carries signal; "
                "give --zero-advantage to plan all the same"
            )
    kept = {name: value for name, value in measured.items() if flag_of(name) not in given}
    return Episodes(
        workload=replace(workload, **kept),
        lengths=None if "--length-cv" in given else lengths,
        measured=frozenset(kept),
        notes=notes,
    )


def _prompt_tokens(trajectory: "Trajectory") -> int:
    # tokens before the first action
    return 1 + int(trajectory.action_mask.argmax()) if trajectory.num_actions else trajectory.num_tokens


def _silent_episodes(trajectories: "list[Trajectory]") -> tuple[int, int]:
    # episodes in groups whose rewards are all equal, and in all groups of two or more
    from agentrl.data.advantages import rewards_differ

    groups: dict[str, dict[str, float]] = {}
    for t in trajectories:
        if t.group and t.info.get("reward_recorded", True):
            groups.setdefault(t.group, {})[t.episode] = t.reward
    compared = [list(rewards.values()) for rewards in groups.values() if len(rewards) > 1]
    silent = [rewards for rewards in compared if not rewards_differ(rewards)]
    return sum(map(len, silent)), sum(map(len, compared))


def _notes(
    path: Path, trajectories: "list[Trajectory]", skipped: "list[BadRecord]", compared: int
) -> tuple[str, ...]:
    found: list[str] = []
    if skipped:
        found.append(f"Skipped {len(skipped):,} bad records of {path}; the first: {skipped[0]}")
    num_episodes = len({t.episode for t in trajectories})
    if num_episodes < len(trajectories):
        found.append(
            f"{path} holds {len(trajectories):,} trajectories of {num_episodes:,} episodes; each trajectory "
            "is priced as an episode."
        )
    if not compared:
        found.append(
            f"No group of {path} has two episodes with rewards, so the share without signal stays assumed "
            "(--zero-advantage)."
        )
    return tuple(found)
