"""What the readers of foreign files share: where records come from, and how they become trajectories."""

# n tokens of one trajectory

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from agentrl.data.chat import (
    RETOKENIZED,
    ChatTokenizer,
    Message,
    Segment,
    tokenize_chat,
    tokenize_segments,
)
from agentrl.data.records import RecordError
from agentrl.data.storage import build_trajectory
from agentrl.data.trajectory import Trajectory

Call = tuple[list[int], list[int], list[int], list[float] | None]


@dataclass
class Source:
    """The file that records come from, and what its readers need."""

    name: str
    make_tokenizer: Callable[[], ChatTokenizer]  # called only if the file holds text
    vocab_size: int | None = None  # ids of files that hold tokens must be below it

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        return self.make_tokenizer()


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of file: what its records look like and how one becomes trajectories."""

    name: str
    matches: Callable[[dict[str, Any]], bool]
    read: Callable[[dict[str, Any], Source], list[Trajectory]]


@dataclass(frozen=True, slots=True)
class Label:
    """What a record says about its trajectories, apart from the tokens."""

    source: str  # the format's name
    reward: float | None  # None: not recorded
    task: str
    group: str = ""  # default the task
    episode: str = ""
    info: dict[str, Any] = field(default_factory=dict)

    def to_info(self, tokens: str) -> dict[str, Any]:
        recorded = {} if self.reward is not None else {"reward_recorded": False}
        return {"task": self.task, "source": self.source, "tokens": tokens, **recorded, **self.info}


def as_float(value: float, field: str) -> float:
    """The number as a float; RecordError for a whole number that none can hold."""
    try:
        return float(value)
    except OverflowError:
        raise RecordError(field, "a whole number too large for a float") from None


def short_hash(data: str | bytes) -> str:
    """A name for a prompt, where the file gives its groups none."""
    return hashlib.blake2b(data if isinstance(data, bytes) else data.encode(), digest_size=8).hexdigest()


def trajectory_from_text(pieces: list[Message] | list[Segment], label: Label, source: Source) -> Trajectory:
    """The trajectory of a conversation, or of text cut into segments, marked as retokenized."""
    tokenizer = source.tokenizer
    if pieces and isinstance(pieces[0], Segment):
        ids, mask = tokenize_segments(pieces, tokenizer)  # pyright: ignore[reportArgumentType]
    else:
        ids, mask = tokenize_chat(pieces, tokenizer)  # pyright: ignore[reportArgumentType]
    return build_trajectory(
        ids,
        mask,
        None,
        reward=label.reward or 0.0,
        info={**label.to_info(RETOKENIZED), "tokenizer": tokenizer.name},
        group=label.group,
        episode=label.episode,
    )


def trajectory_from_tokens(
    ids: list[int],
    mask: list[int],
    logp: list[float | None] | None,
    label: Label,
    source: Source,
    field: str = "",
    trainer_logp: list[float | None] | None = None,
) -> Trajectory:
    """The trajectory of recorded tokens; mask and logp [n] are aligned with the tokens themselves.

    `trainer_logp` goes into info['trainer_logp'] [n-1], for the mismatch that the file's own trainer saw.
    """
    for name, values in (("mask", mask), ("log-probs", logp), ("trainer log-probs", trainer_logp)):
        if values is not None and len(values) != len(ids):
            raise RecordError(field or name, f"{len(values)} {name}, wanted {len(ids)}, one for every token")
    info = label.to_info("recorded")
    trainer = masked_logp(trainer_logp, mask)
    if trainer is not None:
        info["trainer_logp"] = trainer
    return build_trajectory(
        ids,
        mask[1:],
        masked_logp(logp, mask),
        reward=label.reward if label.reward is not None else 0.0,
        info=info,
        group=label.group,
        episode=label.episode,
        vocab_size=source.vocab_size,
    )


def masked_logp(logp: list[float | None] | None, mask: list[int]) -> list[float] | None:
    """Log-probs [n-1] of the tokens behind the first, 0 off the actions; None if an action has none."""
    if logp is None:
        return None
    kept: list[float] = []
    for value, is_action in zip(logp[1:], mask[1:], strict=True):
        if is_action and value is None:
            return None
        kept.append(value if is_action and value is not None else 0.0)
    return kept


def merge_calls(
    calls: list[Call],
) -> list[tuple[list[int], list[int], list[float | None] | None]]:
    """Model calls (prompt ids, completion ids, mask, log-probs) joined to (ids, mask, log-probs) [n] each.

    A call whose prompt begins with everything so far extends it; any other (the context was rewritten) begins
    a new trajectory of the same episode.
    """
    merged: list[tuple[list[int], list[int], list[float | None] | None]] = []
    ids: list[int] = []
    mask: list[int] = []
    logp: list[float | None] | None = []
    for prompt, completion, completion_mask, completion_logp in calls:
        if ids and prompt[: len(ids)] != ids:
            merged.append((ids, mask, logp))
            ids, mask, logp = [], [], []
        num_read = len(prompt) - len(ids)
        ids = prompt + completion
        mask = mask + [0] * num_read + completion_mask
        known = logp is not None and completion_logp is not None
        logp = [*logp, *[0.0] * num_read, *completion_logp] if known else None  # pyright: ignore
    merged.append((ids, mask, logp))
    return merged
