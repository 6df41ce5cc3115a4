"""How a chat template frames what an environment says, so that a model reads turns as it was trained to."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

_SPACES = r"\s*"
_PROMPT, _ACTION, _OBSERVATION = (
    "agentrl prompt",
    "agentrl action",
    "agentrl observation",
)  # told apart in text


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around a text: ids up to the special token nearest to it, and text from there."""

    before: tuple[int, ...]
    left: str
    right: str
    after: tuple[int, ...]
    strips: bool  # the template strips the text's white space

    def ids(self, text: str, encode_plain: Callable[[str], list[int]]) -> list[int]:
        """Ids of a text in its frame. Special tokens that the text spells stay text."""
        text = text.strip() if self.strips else text
        return [*self.before, *encode_plain(f"{self.left}{text}{self.right}"), *self.after]


@dataclass(frozen=True, slots=True)
class Turns:
    """The frames of a chat template: of an episode's prompt, and of an observation after an action.

    The template's own end of an assistant's turn, `end_id`, is what the policy samples to end an action, so
    an observation's frame begins behind it. Both frames end where the policy has to speak.
    """

    prompt: Frame
    observation: Frame
    end_id: int


class _Template:
    """A tokenizer's chat template, rendered and encoded."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        specials = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
        specials.sort(key=lambda token: -len(token.content))  # the longest that fits, as tokenizers do
        spelled = [
            _SPACES * token.lstrip + re.escape(token.content) + _SPACES * token.rstrip for token in specials
        ]
        self.special = re.compile("|".join(spelled) or r"(?!)")

    def refusal(self, what: str) -> ValueError:
        name = self.tokenizer.name_or_path or type(self.tokenizer).__name__
        return ValueError(
            f"the chat template of {name} {what}; leave it out: --no-chat-template, or chat_template=False"
        )

    def render(self, contents: Sequence[str], asks: bool = True) -> str:
        """The conversation whose user and assistant say these in turns; `asks` for the assistant's next."""
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise self.refusal(f"refuses a conversation of {len(messages)} messages ({error})") from error

    def encode(self, text: str) -> list[int]:
        """Ids of a text in which special tokens are written out."""
        return list(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=False))

    def frame(self, before: str, after: str, strips: bool) -> Frame:
        """The frame that these two texts make."""
        ends = [match.end() for match in self.special.finditer(before)]
        first = self.special.search(after)
        start, end = ends[-1] if ends else 0, first.start() if first else len(after)
        return Frame(
            before=tuple(self.encode(before[:start])),
            left=before[start:],
            right=after[:end],
            after=tuple(self.encode(after[end:])),
            strips=strips,
        )


def chat_turns(tokenizer: Any, encode_plain: Callable[[str], list[int]]) -> Turns:
    """The frames of a tokenizer's chat template, found by rendering a conversation and cutting it.

    Raises ValueError where the template refuses a user's and an assistant's turns, does not show each message
    once and in order, ends the assistant's turn with no special token, or cannot be encoded in pieces.
    """
    template = _Template(tokenizer)
    contents = (_PROMPT, _ACTION, _OBSERVATION)
    opening, later = template.render(contents[:1]), template.render(contents)
    cut = re.fullmatch("(.*)".join(["", *contents, ""]), later, re.DOTALL)
    if cut is None or any(later.count(content) != 1 for content in contents) or opening.count(_PROMPT) != 1:
        raise template.refusal("does not show every message once and in order")
    _, _, between, tail = cut.groups()
    closing = template.special.match(between.lstrip())
    end = [] if closing is None else template.encode(closing[0].strip())
    asking = opening.removeprefix(template.render(contents[:1], asks=False))
    if closing is None or len(end) != 1 or closing[0].strip() in asking:  # there, it begins turns
        raise template.refusal(f"ends the assistant's turn with no special token but {between!r}")
    strips = _strips(template, later)
    between = between.lstrip()[closing.end() :]
    head, _, prompt_tail = opening.partition(_PROMPT)
    turns = Turns(
        prompt=template.frame(head, prompt_tail, strips),
        observation=template.frame(between, tail, strips),
        end_id=end[0],
    )
    whole = template.encode(f"{closing[0]}{between}{_OBSERVATION}{tail}")
    pieces = [turns.end_id, *turns.observation.ids(_OBSERVATION, encode_plain)]
    if template.encode(opening) != turns.prompt.ids(_PROMPT, encode_plain) or whole != pieces:
        raise template.refusal("has other tokens as a whole than in pieces, as with a space put before each")
    return turns


def _strips(template: _Template, later: str) -> bool:
    """Whether the template strips what the user says, or shows it as it is."""
    padded = [f" \n{content}\n " for content in (_PROMPT, _OBSERVATION)]
    shown = template.render([padded[0], _ACTION, padded[1]])
    if shown == later:
        return True
    if shown != later.replace(_PROMPT, padded[0]).replace(_OBSERVATION, padded[1]):
        raise template.refusal("changes the white space of messages")
    return False
