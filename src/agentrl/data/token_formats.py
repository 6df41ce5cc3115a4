"""Readers of files that hold the sampler's token ids: verifiers traces, NeMo-RL, prime-rl, slime."""

from typing import Any

import msgspec

from agentrl.data.chat import Message, parse_messages
from agentrl.data.formats import Label, Source, short_hash, trajectory_from_text, trajectory_from_tokens
from agentrl.data.records import RecordError, convert_record
from agentrl.data.trajectory import Trajectory


def prompt_name(ids: list[int], mask: list[int]) -> str:
    """A name for the tokens before the first action, which the attempts of one group share."""
    end = mask.index(1) if 1 in mask else len(ids)
    return short_hash(",".join(map(str, ids[:end])))


class TraceNode(msgspec.Struct):
    """One message of a verifiers trace and the tokens that it adds to its path."""

    message: dict[str, Any]
    parent: int | None = None
    sampled: bool = False
    token_ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []


class TraceRecord(msgspec.Struct):
    """One line of verifiers' traces.jsonl (version 1)."""

    nodes: list[TraceNode]
    rewards: dict[str, Any]
    task: Any = None
    id: str = ""


def read_verifiers_trace(value: dict[str, Any], source: Source) -> list[Trajectory]:
    """One trajectory for every path from a root to a leaf of the message graph, all of one episode."""
    record = convert_record(value, TraceRecord)
    label = Label(
        "verifiers traces", _trace_reward(record.rewards), _trace_task(record.task), episode=record.id
    )
    return [_trace_path(path, label, source) for path in _paths(record.nodes)]


def _paths(nodes: list[TraceNode]) -> list[list[TraceNode]]:
    parents = {node.parent for node in nodes}
    paths: list[list[TraceNode]] = []
    for leaf in range(len(nodes)):
        if leaf in parents:
            continue
        path: list[TraceNode] = []
        at: int | None = leaf
        while at is not None:
            if not 0 <= at < len(nodes) or len(path) > len(nodes):
                raise RecordError(f"nodes[{leaf}].parent", f"no path to a root: {nodes[leaf].parent}")
            path.append(nodes[at])
            at = nodes[at].parent
        paths.append(path[::-1])
    if not paths:
        raise RecordError("nodes", "no path from a root to a leaf")
    return paths


def _trace_path(path: list[TraceNode], label: Label, source: Source) -> Trajectory:
    ids: list[int] = []
    mask: list[int] = []
    logp: list[float | None] = []
    for i, node in enumerate(path):
        if len(node.mask) != len(node.token_ids):
            raise RecordError(
                f"nodes[{i}].mask", f"{len(node.mask)} entries, wanted {len(node.token_ids)}, one a token"
            )
        num_sampled = sum(node.mask)
        if node.logprobs and len(node.logprobs) != num_sampled:
            raise RecordError(
                f"nodes[{i}].logprobs",
                f"{len(node.logprobs)} entries, wanted {num_sampled}, one a sampled token",
            )
        sampled = iter(node.logprobs or [None] * num_sampled)
        ids += node.token_ids
        mask += map(int, node.mask)
        logp += [next(sampled) if is_action else 0.0 for is_action in node.mask]
    if ids:
        return trajectory_from_tokens(ids, mask, logp, label, source)
    messages: list[Message] = [
        msgspec.structs.replace(message, sampled=node.sampled)
        for node in path
        for message in parse_messages([node.message], "nodes.message")
    ]
    return trajectory_from_text(messages, label, source)


def _trace_reward(rewards: dict[str, Any]) -> float | None:
    """The weighted sum of the rewards that were scored; None if none was."""
    values: list[float] = []
    for name, reward in rewards.items():
        if reward is None:
            continue
        score = reward.get("score") if isinstance(reward, dict) else reward
        weight = reward.get("weight", 1.0) if isinstance(reward, dict) else 1.0
        if not isinstance(score, int | float) or not isinstance(weight, int | float):
            raise RecordError(f"rewards.{name}", f"wanted a score and a weight, got {reward!r:.60}")
        values.append(score * weight)
    return sum(values) if values else None


def _trace_task(task: Any) -> str:
    if not isinstance(task, dict):
        return str(task)
    data = task.get("data")
    for holder in (task, data if isinstance(data, dict) else {}):
        for key in ("key", "hash", "task_id", "idx", "id", "name"):
            if isinstance(holder.get(key), str | int):
                return str(holder[key])
    return short_hash(repr(task))


class NemoRecord(msgspec.Struct):
    """One line of NeMo-RL's train_data_step*.jsonl, taken out of its batches of one."""

    token_ids: list[int]
    token_loss_mask: list[float]
    rewards: float
    input_lengths: int
    generation_logprobs: list[float] | None = None
    prev_logprobs: list[float] | None = None


def read_nemo(value: dict[str, Any], source: Source) -> list[Trajectory]:
    """The first input_lengths tokens of a padded row; log-probs are the generation's and the trainer's."""
    flat = {key: v[0] if isinstance(v, list) and len(v) == 1 else v for key, v in value.items()}
    if "token_ids" not in flat:
        raise RecordError("token_ids", "missing: this NeMo-RL logged no token ids, so the text has no mask")
    record = convert_record(flat, NemoRecord)
    n = record.input_lengths
    if not 0 < n <= len(record.token_ids):
        raise RecordError("input_lengths", f"{n}, but token_ids has {len(record.token_ids)}")
    if not set(record.token_loss_mask) <= {0, 1}:
        raise RecordError("token_loss_mask", "must hold only 0 and 1")
    ids, mask = record.token_ids[:n], [int(entry) for entry in record.token_loss_mask[:n]]
    name = prompt_name(ids, mask)
    label = Label("NeMo-RL", record.rewards, name)
    generation = None if record.generation_logprobs is None else list(record.generation_logprobs[:n])
    trainer = None if record.prev_logprobs is None else list(record.prev_logprobs[:n])
    return [trajectory_from_tokens(ids, mask, generation, label, source, trainer_logp=trainer)]  # pyright: ignore


class PrimeExport(msgspec.Struct):
    """One line of prime-rl's token export (schema version 1)."""

    token_ids: list[int]
    loss_mask: list[bool]
    inference_logprobs: list[float | None] | None = None
    trainer_logprobs: list[float | None] | None = None
    rewards: list[float | None] | None = None
    env_name: str | None = None
    export_step: int = 0


def read_prime(value: dict[str, Any], source: Source) -> list[Trajectory]:
    """The sequence that the trainer saw; sequences of one step with the same prompt are a group."""
    record = convert_record(value, PrimeExport)
    mask = [int(entry) for entry in record.loss_mask]
    name = prompt_name(record.token_ids, mask)
    reward = next((r for r in record.rewards or [] if r is not None), None)
    task = f"{record.env_name or 'env'}/{name}"
    label = Label("prime-rl token export", reward, task, f"{record.export_step}/{task}")
    return [
        trajectory_from_tokens(
            record.token_ids,
            mask,
            record.inference_logprobs,
            label,
            source,
            trainer_logp=record.trainer_logprobs,
        )
    ]


class SlimeSample(msgspec.Struct):
    """One sample of a slime debug rollout dump (Sample.to_dict)."""

    tokens: list[int]
    response_length: int
    reward: float | dict[str, float] | None = None
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    group_index: int | None = None
    status: str = ""


def read_slime(value: dict[str, Any], source: Source) -> list[Trajectory]:
    """A sample's tokens; its mask and log-probs cover the response, the last response_length of them."""
    plain = {key: v.tolist() if hasattr(v, "tolist") else v for key, v in value.items()}
    record = convert_record(plain, SlimeSample)
    n, response = len(record.tokens), record.response_length
    if not 0 <= response <= n:
        raise RecordError("response_length", f"{response}, but there are {n} tokens")
    mask = record.loss_mask if record.loss_mask is not None else [1] * response
    logp = record.rollout_log_probs
    for field, values in (("loss_mask", mask), ("rollout_log_probs", logp)):
        if values is not None and len(values) != response:
            raise RecordError(field, f"{len(values)} entries, wanted {response}, one a response token")
    reward = record.reward
    if isinstance(reward, dict):
        if len(reward) != 1 and "reward" not in reward:
            raise RecordError("reward", f"several rewards {sorted(reward)}; keep one before saving")
        reward = reward["reward"] if "reward" in reward else next(iter(reward.values()))
    prompt = [0] * (n - response)
    name = prompt_name(record.tokens, prompt + [1] * response)
    group = name if record.group_index is None else str(record.group_index)
    label = Label("slime", reward, name, group, info={"status": record.status})
    padded: list[float | None] | None = None if logp is None else [*prompt, *logp]
    return [trajectory_from_tokens(record.tokens, prompt + mask, padded, label, source)]
