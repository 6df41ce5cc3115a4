"""Bug-like rewrites of a line of code: how a bug comes into a program, and how a repair is looked for.

The rules come in pairs that undo each other, so the repair of a bug is a rewrite of the buggy line.
"""

import functools
import keyword
import re
from collections.abc import Sequence

from agentrl.gym.tokenizer import Spacing

Tokens = Sequence[str]
Rewrite = tuple[str, str]  # (family of bugs, the line after the rewrite)

_PAIRS: tuple[tuple[str, str, str], ...] = (
    ("comparison", "<", "<="),
    ("comparison", ">", ">="),
    ("comparison", "<", ">"),
    ("negation", "==", "!="),
    ("operator", "+", "-"),
    ("operator", "*", "+"),
    ("update", "+=", "-="),
    ("logic", "and", "or"),
    ("builtin", "min", "max"),
)
_SWAP: dict[str, list[tuple[str, str]]] = {}
for _family, _a, _b in _PAIRS:
    _SWAP.setdefault(_a, []).append((_family, _b))
    _SWAP.setdefault(_b, []).append((_family, _a))

_PIECES = re.compile(r"[A-Za-z_]+|\d+|//=|\*\*|//|[=!<>+\-*%]=|\S")


@functools.lru_cache(maxsize=1 << 16)
def pieces(line: str) -> tuple[str, ...]:
    """The lexical tokens of a line of code."""
    return tuple(_PIECES.findall(line))


def joined(tokens: Tokens) -> str:
    """A line of code from its tokens, formatted as a code formatter would.

    >>> joined(pieces("return max(x,-1)-items[0]"))
    'return max(x, -1) - items[0]'
    """
    spacing = Spacing()
    parts: list[str] = []
    for token in tokens:
        parts.append(f" {token}" if spacing.expects_space(token) else token)
        spacing.feed(token)
    return "".join(parts)


@functools.lru_cache(maxsize=4096)
def is_variable(token: str) -> bool:
    """Whether a token is a name: an identifier, not a keyword."""
    return token.isidentifier() and not keyword.iskeyword(token)


def _is_operand(token: str) -> bool:
    return is_variable(token) or token.isdigit() or token in (")", "]")


@functools.lru_cache(maxsize=1 << 16)
def rewrites(line: str, names: tuple[str, ...]) -> tuple[Rewrite, ...]:
    """The bug-like one-step rewrites of a line, as (family, line); `names` are the variables in scope."""
    tokens = list(pieces(line))
    found: list[tuple[str, Tokens]] = []
    for i, token in enumerate(tokens):
        before, after = tokens[:i], tokens[i + 1 :]
        last = before[-1] if before else ""
        binary = token not in ("+", "-", "*") or _is_operand(last)
        if token == "-" and binary:
            found.extend(_swapped_operands(tokens, i))
        if token in _SWAP and binary:
            found.extend((family, [*before, other, *after]) for family, other in _SWAP[token])
        if token == "not":
            found.append(("negation", [*before, *after]))
        if token == "in" and last != "not" and tokens[0] != "for":
            found.append(("negation", [*before, "not", *tokens[i:]]))
        if token in ("0", "1") and tokens[1:2] == ["="] and len(tokens) == 3:
            found.append(("initial", [*before, "10"[int(token)], *after]))
        if token in ("0", "1") and last in ("==", "!="):
            found.append(("constant", [*before, "10"[int(token)], *after]))
        if token in names and last in ("+", "-", "*") and not after and len(tokens) > 3:
            others = [name for name in names if name not in (token, before[-2], tokens[0])]
            found.extend(("variable", [*before, name]) for name in others[:3])
        if token == ")" and "range" in before and last not in ("1", ")"):
            found.append(("off_by_one", [*before, "+", "1", *tokens[i:]]))
        if token == "+" and "range" in before and after[:1] == ["1"]:
            found.append(("off_by_one", [*before, *after[1:]]))
    if tokens[:2] == ["return", "len"]:
        found.append(("off_by_one", [*tokens, "-", "1"] if tokens[-1] == ")" else tokens[:-2]))
    if tokens[0] == "return" and tokens[-1] == "]" and len(tokens) == 6:
        found.append(("swapped", [*tokens[:2], tokens[4], ",", tokens[2], "]"]))
    if tokens[0] == "return" and len(tokens) == 2 and tokens[1] in names:
        found.extend(("return", ["return", name]) for name in names if name != tokens[1])
    seen: set[str] = {joined(tokens)}
    unique: list[Rewrite] = []
    for family, rewritten in found:
        text = joined(rewritten)
        if text not in seen:
            seen.add(text)
            unique.append((family, text))
    return tuple(unique)


def _swapped_operands(tokens: Tokens, i: int) -> list[tuple[str, Tokens]]:
    left, right = tokens[i - 1], tokens[i + 1]
    alone = i + 2 == len(tokens) and i >= 2 and tokens[i - 2] in ("return", "=")
    if not alone or left == right or not (_is_operand(left) and _is_operand(right)):
        return []
    return [("swapped", [*tokens[: i - 1], right, tokens[i], left])]


def all_rewrites(source: str, variables: Sequence[str]) -> list[tuple[str, int, str]]:
    """Every bug-like rewrite of a function's body: (family, line, text)."""
    names = tuple(variables)
    return [
        (family, number, text)
        for number, line in enumerate(source.split("\n"), start=1)
        if number > 1
        for family, text in rewrites(line.strip(), names)
    ]
