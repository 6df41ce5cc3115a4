"""One clear line for an option that does not exist, or whose value is of another kind."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from agentrl.plan.inputs import flag_of


def given_flags(args: Sequence[str]) -> set[str]:
    """The options that the command line names, as they are listed: without a value, `--no-x` as `--x`."""
    return {_flag(arg).replace("--no-", "--", 1) for arg in args if arg.startswith("--")}


def check_flags(args: Sequence[str], owners: tuple[type, ...]) -> None:
    """Raise ValueError for the first option that no field of `owners` has, or whose value is no such."""
    kinds: dict[str, Any] = {}
    for owner in owners:
        hints = get_type_hints(owner)
        kinds |= {flag_of(entry.name): hints[entry.name] for entry in fields(owner)}
    known = {"--help", *kinds}
    for i, arg in enumerate(args):
        flag = _flag(arg)
        if not flag.startswith("--"):
            continue
        if flag not in known and flag.replace("--no-", "--", 1) not in known:
            nearest = difflib.get_close_matches(flag, known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else "--help lists them"
            raise ValueError(f"no option {flag}; {hint}")
        if flag in kinds:
            after = args[i + 1] if i + 1 < len(args) else "--"
            _check_value(flag, kinds[flag], arg.split("=", 1)[1] if "=" in arg else after)


def _flag(arg: str) -> str:
    return arg.split("=", 1)[0].replace("_", "-")


def _check_value(flag: str, kind: Any, value: str) -> None:
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    types = set(get_args(kind)) - {NoneType} if not choices and get_args(kind) else {kind}
    optional = NoneType in get_args(kind)
    if not (choices or types <= {int, float}) or (optional and value == "None"):
        return
    if value.startswith("--"):
        raise ValueError(f"{flag} needs a value")
    if choices:
        if value not in map(str, choices):
            raise ValueError(f"{flag} must be one of {', '.join(map(str, choices))}, got {_short(value)}")
        return
    try:
        number = float(value)
    except ValueError as error:
        raise ValueError(f"{flag} takes a number, got {_short(value)}") from error
    if types == {int} and not re.fullmatch(r"[+-]?\d+(_\d+)*", value):
        hint = f"; write {number:.0f}" if number.is_integer() and abs(number) < 1e15 else ""
        raise ValueError(f"{flag} takes a whole number, got {_short(value)}{hint}")


def _short(value: str) -> str:
    return repr(value) if len(value) <= 24 else f"{value[:24]!r}..."
