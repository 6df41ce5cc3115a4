"""Readers of files that hold messages or text: tau-bench, SWE-agent, ATIF, verifiers, verl, TRL, OpenAI.

Each checks one record against its schema and gives its trajectories. Where a record also holds the sampler's
token ids (ATIF, verifiers), those are kept and the text is not tokenized.
"""

import uuid
from dataclasses import replace
from typing import Any

import msgspec

from agentrl.data.chat import Message, Segment, content_text, parse_messages
from agentrl.data.formats import (
    Call,
    Label,
    Source,
    as_float,
    merge_calls,
    short_hash,
    trajectory_from_text,
    trajectory_from_tokens,
)
from agentrl.data.records import RecordError, convert_record
from agentrl.data.trajectory import Trajectory


class TauRecord(msgspec.Struct):
    """One episode of a tau-bench result file."""

    task_id: int | str
    traj: list[Any]
    reward: float | bool
    trial: int = 0


def read_tau(value: dict[str, Any], source: Source) -> list[Trajectory]:
    """The episode's conversation; attempts at one task are a group.

    Every domain counts its tasks from 0, and the system prompt, its policy, tells them apart.
    """
    record = convert_record(value, TauRecord)
    messages = parse_messages(record.traj, "traj")
    system = "".join(message.content for message in messages if message.role == "system")
    group = f"{short_hash(system)}/{record.task_id}" if system else ""
    label = Label("tau-bench", record.reward, f"{record.task_id}", group, info={"trial": record.trial})
    return [trajectory_from_text(messages, label, source)]


def read_swe_agent(value: dict[str, Any], source: Source) -> list[Trajectory]:
    """The history that the model saw; its group is the file, and its reward is in another file."""
    info = value.get("info")
    status = info.get("exit_status") if isinstance(info, dict) else None
    extra = {"exit_status": status} if isinstance(status, str) else {}
    label = Label("SWE-agent", None, source.name, info=extra)
    return [trajectory_from_text(parse_messages(value.get("history"), "history"), label, source)]


class AtifMetrics(msgspec.Struct):
    """Token ids of one model call, where the harness recorded them (ATIF 1.4)."""

    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None


class AtifToolCall(msgspec.Struct):
    """A tool call of an agent step."""

    function_name: str
    arguments: dict[str, Any] = {}
    tool_call_id: str = ""


class AtifObservation(msgspec.Struct):
    """What the tools gave back."""

    results: list[dict[str, Any]] = []


class AtifStep(msgspec.Struct):
    """One step: a system or user message, or an agent turn with its observation."""

    source: str
    message: Any = None
    reasoning_content: str | None = None
    tool_calls: list[AtifToolCall] | None = None
    observation: AtifObservation | None = None
    metrics: AtifMetrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None

    @property
    def sampled(self) -> bool:
        """Whether a model wrote it here, rather than in an earlier context or by a rule."""
        return self.source == "agent" and not self.is_copied_context and self.llm_call_count != 0


class AtifRecord(msgspec.Struct):
    """An ATIF trajectory (Harbor, rfcs/0001-trajectory-format, to 1.7)."""

    steps: list[AtifStep]
    session_id: str | None = None
    trajectory_id: str | None = None
    subagent_trajectories: list["AtifRecord"] | None = None


def read_atif(value: dict[str, Any], source: Source) -> list[Trajectory]:
    """The trajectory and its subagents', all of one episode. Harbor keeps the reward in another file."""
    record = convert_record(value, AtifRecord)
    episode = record.session_id or record.trajectory_id or uuid.uuid4().hex
    label = Label("ATIF", None, source.name, episode=episode)
    return _atif_trajectories(record, label, source)


def _atif_trajectories(record: AtifRecord, label: Label, source: Source) -> list[Trajectory]:
    found = _atif_own(record, label, source)
    for subagent in record.subagent_trajectories or []:
        marked = replace(label, info={"subagent": subagent.trajectory_id or ""})
        found += _atif_trajectories(subagent, marked, source)
    return found


def _atif_own(record: AtifRecord, label: Label, source: Source) -> list[Trajectory]:
    """Token ids where every agent step has them, else the text."""
    agent = [step for step in record.steps if step.sampled]
    calls: list[Call] = []
    for step in agent:
        metrics = step.metrics
        if metrics is None or not metrics.prompt_token_ids or metrics.completion_token_ids is None:
            return [trajectory_from_text(_atif_messages(record.steps), label, source)]
        completion = metrics.completion_token_ids
        calls.append((metrics.prompt_token_ids, completion, [1] * len(completion), metrics.logprobs))
    if not calls:
        return [trajectory_from_text(_atif_messages(record.steps), label, source)]
    return [
        trajectory_from_tokens(*merged, label, source, "steps.metrics.logprobs")
        for merged in merge_calls(calls)
    ]


def _atif_messages(steps: list[AtifStep]) -> list[Message]:
    messages: list[Message] = []
    for i, step in enumerate(steps):
        calls = [
            {"id": c.tool_call_id, "function": {"name": c.function_name, "arguments": c.arguments}}
            for c in step.tool_calls or []
        ]
        messages.append(
            Message(
                role="assistant" if step.source == "agent" else step.source,
                content=content_text(step.message, f"steps[{i}].message"),
                tool_calls=calls,
                sampled=step.sampled,
                reasoning=step.reasoning_content or "",
            )
        )
        for j, result in enumerate(step.observation.results if step.observation else []):
            where = f"steps[{i}].observation.results[{j}].content"
            messages.append(Message("tool", content_text(result.get("content"), where), [], False))
    if not messages:
        raise RecordError("steps", "empty")
    return messages


class VerifiersTokens(msgspec.Struct):
    """Token ids of one model call in a verifiers trajectory."""

    prompt_ids: list[int]
    completion_ids: list[int]
    completion_mask: list[int]
    completion_logprobs: list[float]


class VerifiersStep(msgspec.Struct):
    """One model call; saved only where `trajectory` was among the state columns."""

    tokens: VerifiersTokens | None = None


class VerifiersResult(msgspec.Struct):
    """One line of verifiers' results.jsonl."""

    prompt: Any
    completion: Any
    reward: float | bool | None
    example_id: int | str | None = None
    task: Any = None
    trajectory: list[VerifiersStep] | None = None


def read_verifiers_results(value: dict[str, Any], source: Source) -> list[Trajectory]:
    """Token ids where the trajectory column was saved, else the messages. An example is a group."""
    record = convert_record(value, VerifiersResult)
    task = record.task if isinstance(record.task, str) else "example"
    prompt_name = short_hash(repr(record.prompt)) if record.example_id is None else str(record.example_id)
    label = Label("verifiers results", record.reward, f"{task}/{prompt_name}")
    tokens = [step.tokens for step in record.trajectory or []]
    if tokens and all(tokens):
        calls: list[Call] = [
            (t.prompt_ids, t.completion_ids, t.completion_mask, t.completion_logprobs) for t in tokens if t
        ]
        return [
            trajectory_from_tokens(*merged, label, source, "trajectory.tokens")
            for merged in merge_calls(calls)
        ]
    return [trajectory_from_text(prompt_and_completion(record.prompt, record.completion), label, source)]


def prompt_and_completion(prompt: Any, completion: Any) -> list[Message] | list[Segment]:
    """A prompt and what the model made of it, each text or messages. A prompt's own turns are no actions."""
    if isinstance(prompt, str) and isinstance(completion, str):
        return [Segment(prompt, False), Segment(completion, True)]
    if completion is None:
        raise RecordError("completion", "missing: the rollout failed before it ended")
    shown = [
        msgspec.structs.replace(message, sampled=False)
        for message in (
            [Message("user", prompt, [], False)]
            if isinstance(prompt, str)
            else parse_messages(prompt, "prompt")
        )
    ]
    if isinstance(completion, str):
        return [*shown, Message("assistant", completion, [], True)]
    return [*shown, *parse_messages(completion, "completion")]


class VerlDump(msgspec.Struct):
    """One line of verl's rollout dump (trainer.rollout_data_dir)."""

    input: str
    output: str
    score: float | bool
    step: int | None = None


def read_verl_dump(value: dict[str, Any], source: Source) -> list[Trajectory]:
    """The decoded prompt and response. Tool turns inside a response cannot be told from actions."""
    record = convert_record(value, VerlDump)
    prompt = short_hash(record.input)
    group = prompt if record.step is None else f"{record.step}/{prompt}"
    info = {"action_mask": "the whole response"}
    label = Label("verl dump", record.score, prompt, group, info=info)
    return [trajectory_from_text([Segment(record.input, False), Segment(record.output, True)], label, source)]


def read_verl_parquet(value: dict[str, Any], source: Source) -> list[Trajectory]:
    """Every response to a prompt in the Parquet that verl's generation writes; it records no reward."""
    responses = value.get("responses")
    if not isinstance(responses, list) or not responses:
        raise RecordError("responses", "missing or empty: a verl task file holds prompts, not trajectories")
    prompt = value.get("prompt")
    name = short_hash(repr(prompt))
    label = Label("verl parquet", None, name)
    return [
        trajectory_from_text(prompt_and_completion(prompt, answer), label, source) for answer in responses
    ]


def read_trl(value: dict[str, Any], source: Source) -> list[Trajectory]:
    """A row of TRL's logged completions. Its reward is `reward`, else the sum of the reward columns.

    The columns are those whose name holds "reward", else every number but `step` and `advantage`; NaN is a
    function that does not apply to the row.
    """
    prompt = value.get("prompt")
    numbers = {
        key: as_float(number, key)
        for key, number in value.items()
        if isinstance(number, int | float) and key not in ("step", "advantage")
    }
    named = {key: number for key, number in numbers.items() if "reward" in key}
    rewards = [value["reward"]] if "reward" in numbers else list((named or numbers).values())
    known = [number for number in rewards if number == number]  # not NaN
    if rewards and not known:
        raise RecordError("reward", "NaN in every reward column")
    name = short_hash(repr(prompt))
    group = f"{value.get('step')}/{name}"
    label = Label("TRL completions", sum(known) if known else None, name, group)
    pieces = prompt_and_completion(prompt, value.get("completion"))
    return [trajectory_from_text(pieces, label, source)]


def read_messages(value: dict[str, Any], source: Source) -> list[Trajectory]:
    """A conversation in the OpenAI style, with what else the record says about reward, task and group."""
    reward = next((value[key] for key in ("reward", "score") if value.get(key) is not None), None)
    if reward is not None and not isinstance(reward, int | float):
        raise RecordError("reward", f"wanted a number, got {reward!r:.40}")
    names = (value.get(key) for key in ("task", "task_id", "instance_id", "id"))
    messages = parse_messages(value.get("messages"), "messages")
    prompt = next((i for i, message in enumerate(messages) if message.sampled), len(messages))
    task = next((str(name) for name in names if isinstance(name, str | int)), "")
    task = task or short_hash(repr(messages[:prompt]))
    group = value.get("group")
    label = Label("messages", reward, task, str(group) if isinstance(group, str | int) else "")
    return [trajectory_from_text(messages, label, source)]
