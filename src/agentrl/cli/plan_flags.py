"""One clear line for an option that does not exist, or whose value is of another kind."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from agentrl.plan.inputs import flag_of, quoted


def given_flags(args: Sequence[str]) -> set[str]:
    """The options that the command line names, as they are listed: without a value, `--no-x` as `--x`."""
    return {_flag(arg).replace("--no-", "--", 1) for arg in args if arg.startswith("--")}


def check_flags(args: Sequence[str], owners: tuple[type, ...], file: str = "") -> None:
    """Raise ValueError for the first argument that the fields of `owners` do not explain.

    An unknown option, a value of another kind, a word that belongs to no option. `file` says what the one
    file is that a command takes besides its options, "" where it takes none.
    """
    kinds: dict[str, Any] = {}
    for owner in owners:
        hints = get_type_hints(owner)
        kinds |= {flag_of(entry.name): hints[entry.name] for entry in fields(owner)}
    words: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        flag = _flag(arg)
        if not flag.startswith("-"):
            words.append(arg)
        elif flag in ("-h", "--help"):
            return
        elif flag in kinds and kinds[flag] is not bool:
            value = arg.split("=", 1)[1] if "=" in arg else rest.pop(0) if rest else "--"
            _check_value(flag, kinds[flag], value)
        elif kinds.get(flag.replace("--no-", "--", 1)) is not bool:
            nearest = difflib.get_close_matches(flag, kinds, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else "--help lists them"
            raise ValueError(f"no option {flag}; {hint}")
    if file and not words:
        raise ValueError(f"name {file}")
    if len(words) > bool(file):
        raise ValueError(f"{quoted(words[bool(file)])} belongs to no option; --help lists them")


def _flag(arg: str) -> str:
    return arg.split("=", 1)[0].replace("_", "-")


def _check_value(flag: str, kind: Any, value: str) -> None:
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    types = set(get_args(kind)) - {NoneType} if not choices and get_args(kind) else {kind}
    optional = NoneType in get_args(kind)
    if value.startswith("--"):
        raise ValueError(f"{flag} needs a value")
    if not (choices or types <= {int, float}) or (optional and value == "None"):
        return
    if choices:
        if value not in map(str, choices):
            raise ValueError(f"{flag} must be one of {', '.join(map(str, choices))}, got {quoted(value)}")
        return
    try:
        number = float(value)
    except ValueError as error:
        raise ValueError(f"{flag} takes a number, got {quoted(value)}") from error
    if types == {int} and not re.fullmatch(r"[+-]?\d+(_\d+)*", value):
        hint = f"; write {number:.0f}" if number.is_integer() and abs(number) < 1e15 else ""
        raise ValueError(f"{flag} takes a whole number, got {quoted(value)}{hint}")
