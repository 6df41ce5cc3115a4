"""A word-level tokenizer for code and observations: short sequences, and every ASCII text comes back whole.

Spaces cost no token where they stand as a code formatter would put them: a rule on neighbouring tokens says
where a space is expected, and two tokens, a literal space and a glue of no width, state the exceptions. A
word outside the vocabulary is spelled letter by letter.
"""

import keyword
import re
import string
from collections.abc import Iterable, Sequence
from typing import Protocol

PAD, END, GLUE, SPACE = "<pad>", "<end>", "<glue>", " "
INDENTS = ("        ", "    ")  # deepest first

_OPERATORS = ("//=", "**", "//", "==", "!=", "<=", ">=", "+=", "-=", "*=", "%=", "->", "...")
_ERRORS = (
    *("AttributeError", "IndentationError", "IndexError", "NameError", "RecursionError", "SyntaxError"),
    *("TypeError", "UnboundLocalError", "ValueError", "ZeroDivisionError"),
)
_PROSE = (
    *("fix", "view", "run", "edit", "submit", "ok", "pass", "got", "wanted", "raised", "error", "use"),
    *("LINE", "TEXT", "no", "such", "line", "it", "has", "needs", "one", "of", "ASCII", "text"),
    *("timeout", "limit"),
)
_NAMES = (
    *("range", "len", "max", "min", "sum", "abs", "sorted", "append"),
    *("total", "count", "items", "best", "out", "lo", "hi"),
)
_CORE = re.compile("|".join([r"[A-Za-z_]+", *map(re.escape, _OPERATORS), r"[\n!-~]"]))
_PIECE = re.compile(f"( *)({_CORE.pattern}|$)")
_LETTERS = tuple(c for c in string.printable[:94])
# A digit that numbers a line is another token than the same digit in code: copying a line starts from it.
_NUMBERS = {digit: f"<line {digit}>" for digit in "123456789"}
_DIGITS = {token: digit for digit, token in _NUMBERS.items()}

_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")
_KEYWORDS = frozenset(keyword.kwlist) - {"True", "False", "None"}


class HasSource(Protocol):
    """A task, as far as the tokenizer is concerned."""

    @property
    def name(self) -> str: ...
    @property
    def fixed(self) -> str: ...


class Spacing:
    """Says, token by token, whether a formatter puts a space before the next one."""

    def __init__(self) -> None:
        self._last = "\n"
        self._tight = True  # nothing may stand between the last token and the next
        self._brackets = ""
        self._quote = ""

    def expects_space(self, token: str) -> bool:
        """Whether a space is expected between the tokens fed so far and this one."""
        last = self._last
        token = _DIGITS.get(token, token)
        if self._tight or self._quote or token in (SPACE, GLUE, "\n"):
            return False
        if token in ",:.;" or token in _CLOSING:
            return False
        if token in ("(", "["):
            return not (_is_name(last) or last in _CLOSING)
        if token.isdigit() and last.isdigit():
            return False
        return not ("/" in (token, last) and (token.isdigit() or last.isdigit()))

    def feed(self, token: str) -> None:
        """Take note of a token that was written."""
        last = self._last
        token = _DIGITS.get(token, token)
        self._tight = token in ("\n", SPACE, GLUE, *INDENTS, ".") or token in _OPENING
        if self._quote:
            self._quote = "" if token == self._quote else self._quote
        elif token in ("'", '"'):
            self._quote = token
        elif (token == ":" and self._brackets.endswith("[")) or (
            token in ("-", "~") and not _is_operand(last)  # a slice's colon; a unary operator
        ):
            self._tight = True
        elif token in _OPENING:
            self._brackets += token
        elif token in _CLOSING:
            self._brackets = self._brackets[:-1]
        if token == "\n":
            self._brackets = self._quote = ""
        if token not in (GLUE, SPACE):
            self._last = token


def _is_name(token: str) -> bool:
    return token.isidentifier() and token not in _KEYWORDS and token not in _PROSE


def _is_operand(token: str) -> bool:
    return _is_name(token) or token.isdigit() or token in _CLOSING


class Tokenizer:
    """Text to ids and back. Ids 0, 1 are padding and end-of-action, which text never contains.

    >>> tok = Tokenizer(["clamp"])
    >>> [tok.vocabulary[i] for i in tok.encode("edit 2 return clamp(x, -10)")]
    ['edit', '<line 2>', 'return', 'clamp', '(', 'x', ',', '-', '1', '0', ')']
    >>> tok.decode(tok.encode("odd  spacing (x ,y)"))
    'odd  spacing (x ,y)'
    """

    def __init__(self, words: Iterable[str]) -> None:
        known = {*words, *_NAMES, *_PROSE, *_ERRORS, *_OPERATORS, *keyword.kwlist}
        specials = (PAD, END, GLUE, SPACE, *INDENTS, "\n", *_DIGITS, *_LETTERS)
        self.vocabulary = (*specials, *sorted(known - set(specials)))
        self._id_of = {token: i for i, token in enumerate(self.vocabulary)}
        self.pad_id = self._id_of[PAD]
        self.end_id = self._id_of[END]

    def __len__(self) -> int:
        return len(self.vocabulary)

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Raises ValueError where the text holds a character outside printable ASCII."""
        return [self._id_of[token] for token in self.split(text)]

    def split(self, text: str) -> list[str]:
        """The tokens of a text, as strings."""
        tokens: list[str] = []
        spacing = Spacing()
        end = 0
        last = "\n"
        for match in _PIECE.finditer(text):
            if match.start() != end:
                break
            end = match.end()
            core = match[2]
            if last in ("\n", "edit") and core in _NUMBERS and not text[end : end + 1].isdigit():
                core = _NUMBERS[core]
            last = match[2]
            for i, token in enumerate([core] if core in self._id_of or not core else core):
                self._place(tokens, spacing, len(match[1]) if i == 0 else 0, token)
        if end != len(text):
            end += len(text[end:]) - len(text[end:].lstrip(" "))  # spaces before it are not to blame
            raise ValueError(
                f"cannot encode {text[end]!r} at position {end}: only printable ASCII and newlines"
            )
        return tokens

    def _place(self, tokens: list[str], spacing: Spacing, num_spaces: int, token: str) -> None:
        """Append a token that follows num_spaces spaces; an empty token stands for the end of the text."""
        pieces: list[str] = []
        rest = num_spaces
        for indent in INDENTS:
            count, rest = divmod(rest, len(indent))
            pieces += [indent] * count
        pieces += [token] * bool(token)
        expected = bool(pieces) and spacing.expects_space(pieces[0])
        gap = [] if rest == expected else [SPACE] * rest or [GLUE]
        for piece in [*gap, *pieces]:
            tokens.append(piece)
            spacing.feed(piece)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; padding and end-of-action are left out."""
        parts: list[str] = []
        spacing = Spacing()
        for i in ids:
            token = self.vocabulary[int(i)]
            if token in (PAD, END):
                continue
            if spacing.expects_space(token):
                parts.append(" ")
            if token != GLUE:
                parts.append(_DIGITS.get(token, token))
            spacing.feed(token)
        return "".join(parts)


def build_tokenizer(tasks: Iterable[HasSource]) -> Tokenizer:
    """The tokenizer of the BugFix gym: the tasks' names and words, those of observations, and letters.

    The order of the tasks does not matter, which tasks they are does: a model fits the tokenizer that it was
    trained with. Other words are spelled in letters; encoding raises ValueError beyond printable ASCII.
    """
    words: set[str] = set()
    for task in tasks:
        words.add(task.name)
        words.update(_CORE.findall(task.fixed))
    return Tokenizer(words)
