"""Readers of files that hold the sampler's token ids: verifiers traces, NeMo-RL, prime-rl, slime."""

from dataclasses import replace
from typing import Any

import msgspec

from agentrl.data.chat import Message, parse_messages
from agentrl.data.formats import (
    Label,
    Source,
    as_float,
    short_hash,
    trajectory_from_text,
    trajectory_from_tokens,
)
from agentrl.data.records import RecordError, convert_record
from agentrl.data.trajectory import Trajectory


def prompt_name(ids: list[int], mask: list[int]) -> str:
    """A name for the tokens before the first action, which the attempts of one group share."""
    end = mask.index(1) if 1 in mask else len(ids)
    return short_hash(",".join(map(str, ids[:end])))


class TraceLink(msgspec.Struct):
    """A link of the semantic graph: the node that it comes from, and what kind it is."""

    node: int
    type: str


class TraceNode(msgspec.Struct):
    """One message of a verifiers trace and the tokens that it adds to its path."""

    message: dict[str, Any]
    parent: int | None = None
    sampled: bool = False
    token_ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    trainer_logprobs: list[float] | None = None
    semantic_parents: list[TraceLink] = []


class TraceAgent(msgspec.Struct, frozen=True):
    """Who acted: an agent that is not the policy, such as a simulated user, is not trainable."""

    trainable: bool = True


class TraceRecord(msgspec.Struct):
    """One line of verifiers' traces.jsonl (version 1)."""

    nodes: list[TraceNode]
    rewards: dict[str, Any]
    task: Any = None
    id: str = ""
    agent: TraceAgent = TraceAgent()


def read_verifiers_trace(value: dict[str, Any], source: Source) -> list[Trajectory]:
    """One trajectory for every path from a root to a leaf of the message graph, all of one episode.

    A path that verifiers does not train on is marked info['trainable'] False: one of another agent, or an
    attempt to compact the context that was not resumed from.
    """
    record = convert_record(value, TraceRecord)
    label = Label(
        "verifiers traces", _trace_reward(record.rewards), _trace_task(record.task), episode=record.id
    )
    resumed = {
        link.node for node in record.nodes for link in node.semantic_parents if link.type == "compaction"
    }
    found: list[Trajectory] = []
    for path in _paths(record.nodes):
        leaf = record.nodes[path[-1]]
        tried = any(link.type == "compaction_attempt" for link in leaf.semantic_parents)
        trains = record.agent.trainable and (not tried or path[-1] in resumed)
        marked = label if trains else replace(label, info={"trainable": False})
        found.append(_trace_path([record.nodes[i] for i in path], marked, source))
    return found


def _paths(nodes: list[TraceNode]) -> list[list[int]]:
    """The nodes of each path, root first."""
    parents = {node.parent for node in nodes}
    paths: list[list[int]] = []
    for leaf in range(len(nodes)):
        if leaf in parents:
            continue
        path: list[int] = []
        at: int | None = leaf
        while at is not None:
            if not 0 <= at < len(nodes) or len(path) > len(nodes):
                raise RecordError(f"nodes[{leaf}].parent", f"no path to a root: {nodes[leaf].parent}")
            path.append(at)
            at = nodes[at].parent
        paths.append(path[::-1])
    if not paths:
        raise RecordError("nodes", "no path from a root to a leaf")
    return paths


def _trace_path(path: list[TraceNode], label: Label, source: Source) -> Trajectory:
    ids: list[int] = []
    mask: list[int] = []
    logp: list[float | None] = []
    trainer: list[float | None] = []
    for i, node in enumerate(path):
        if len(node.mask) != len(node.token_ids):
            raise RecordError(
                f"nodes[{i}].mask", f"{len(node.mask)} entries, wanted {len(node.token_ids)}, one a token"
            )
        ids += node.token_ids
        mask += map(int, node.mask)
        logp += _spread(node.logprobs, node.mask, f"nodes[{i}].logprobs")
        trainer += _spread(node.trainer_logprobs or [], node.mask, f"nodes[{i}].trainer_logprobs")
    if ids:
        return trajectory_from_tokens(ids, mask, logp, label, source, trainer_logp=trainer)
    messages: list[Message] = [
        msgspec.structs.replace(message, sampled=node.sampled)
        for node in path
        for message in parse_messages([node.message], "nodes.message")
    ]
    return trajectory_from_text(messages, label, source)


def _spread(values: list[float], mask: list[bool], field: str) -> list[float | None]:
    """Values of a node's sampled tokens, one a token: 0 off the sampled ones, None where none is recorded."""
    num_sampled = sum(mask)
    if values and len(values) != num_sampled:
        raise RecordError(field, f"{len(values)} entries, wanted {num_sampled}, one a sampled token")
    sampled = iter(values or [None] * num_sampled)
    return [next(sampled) if is_action else 0.0 for is_action in mask]


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
        values.append(as_float(score, f"rewards.{name}.score") * as_float(weight, f"rewards.{name}.weight"))
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
    input_lengths: int
    rewards: float | None = None
    filtered_rewards: float | None = None
    generation_logprobs: list[float] | None = None
    prev_logprobs: list[float] | None = None


def read_nemo(value: dict[str, Any], source: Source) -> list[Trajectory]:
    """The first input_lengths tokens of a padded row; log-probs are the generation's and the trainer's.

    With dynamic sampling the rows are those of the kept prompts, and so are `filtered_rewards`; `rewards` are
    then of every prompt that was sampled, in another order.
    """
    flat = {key: v[0] if isinstance(v, list) and len(v) == 1 else v for key, v in value.items()}
    if "token_ids" not in flat:
        raise RecordError("token_ids", "missing: this NeMo-RL logged no token ids, so the text has no mask")
    record = convert_record(flat, NemoRecord)
    n = record.input_lengths
    if not 0 < n <= len(record.token_ids):
        raise RecordError("input_lengths", f"{n}, but token_ids has {len(record.token_ids)}")
    width = len(record.token_ids)
    for field in ("token_loss_mask", "generation_logprobs", "prev_logprobs"):
        if len(getattr(record, field) or [0] * width) != width:
            raise RecordError(field, f"{len(getattr(record, field))} entries, but token_ids has {width}")
    if not set(record.token_loss_mask) <= {0, 1}:
        raise RecordError("token_loss_mask", "must hold only 0 and 1")
    ids, mask = record.token_ids[:n], [int(entry) for entry in record.token_loss_mask[:n]]
    name = prompt_name(ids, mask)
    reward = record.rewards if record.filtered_rewards is None else record.filtered_rewards
    label = Label("NeMo-RL", reward, name)
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
    reward: float | dict[str, Any] | None = None
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
    reward = _slime_reward(record.reward)
    prompt = [0] * (n - response)
    name = prompt_name(record.tokens, prompt + [1] * response)
    group = name if record.group_index is None else str(record.group_index)
    label = Label("slime", reward, name, group, info={"status": record.status})
    padded: list[float | None] | None = None if logp is None else [*prompt, *logp]
    return [trajectory_from_tokens(record.tokens, prompt + mask, padded, label, source)]


def _slime_reward(reward: float | dict[str, Any] | None) -> float | None:
    """The reward itself, or of several named ones `reward`, else `score`, else the only one."""
    if not isinstance(reward, dict):
        return reward
    name = next((name for name in ("reward", "score") if name in reward), None)
    if name is None and len(reward) == 1:
        [name] = reward
    if name is None:
        raise RecordError("reward", f"several rewards {sorted(reward)}; keep one before saving")
    if not isinstance(reward[name], int | float):
        raise RecordError(f"reward.{name}", f"wanted a number, got {reward[name]!r:.40}")
    return reward[name]
