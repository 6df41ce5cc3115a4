"""Plain data: the values that cross the sandbox's wall, as text that cannot run code when it is read."""

import json
from typing import Any, cast

MAX_DEPTH = 64  # nesting of containers; far below the recursion limit of any process that reads it
MAX_INT_BITS = 14_000  # below the 4,300 decimal digits that Python reads and writes by default

TOO_LARGE = "result too large"
TOO_DEEP = "result nested too deeply"

_to_json = json.JSONEncoder(separators=(",", ":")).encode


def encode(value: object, max_bytes: int = 1 << 20) -> str:
    """JSON text (ASCII) of plain data; exact types survive, so `decode(encode(x))` is x with x's types.

    None, bool, int, float, str and list are themselves; a tuple, set or dict is an object with the one key
    `t`, `s` or `d`. Raises ValueError for any other type (subclasses too: they could lie), for more than
    MAX_DEPTH levels (a structure that holds itself) and for text longer than `max_bytes`.

    >>> encode((1, [True, None], {"a": 1.0}))
    '{"t":[1,[true,null],{"d":[["a",1.0]]}]}'
    """
    text = _to_json(_tagged(value, 0, [max_bytes]))
    if len(text) > max_bytes:
        raise ValueError(TOO_LARGE)
    return text


def decode(text: str) -> object:
    """The plain data that `encode` wrote; ValueError for anything else, however hostile.

    >>> decode('{"t":[1,[true,null],{"d":[["a",1.0]]}]}')
    (1, [True, None], {'a': 1.0})
    """
    try:
        return _untagged(json.loads(text), 0)
    except (RecursionError, TypeError) as error:  # brackets without end; a list as a dict's key
        raise ValueError("not the text of plain data") from error


def same_value(got: object, wanted: object) -> bool:
    """Whether two pieces of plain data are equal in value and in every type; NaN equals NaN.

    True is not 1, 1 is not 1.0 and (1,) is not [1], at any depth; the order of sets and dicts does not count.
    Only exact built-in types are compared, so no `__eq__` of anybody else runs; ValueError for other types.

    >>> same_value([1, 2.0], [1, 2.0]), same_value(True, 1), same_value((1,), [1])
    (True, False, False)
    """
    return _canonical(got, 0) == _canonical(wanted, 0)


def _tagged(value: object, depth: int, budget: list[int]) -> object:
    budget[0] -= 1
    kind = type(value)
    if kind is str:
        budget[0] -= len(cast(str, value))
    if budget[0] < 0 or (kind is int and cast(int, value).bit_length() > MAX_INT_BITS):
        raise ValueError(TOO_LARGE)
    if value is None or kind in (bool, int, float, str):
        return value
    if depth >= MAX_DEPTH:
        raise ValueError(TOO_DEEP)
    if kind is list or kind is tuple or kind is set:
        items = [_tagged(item, depth + 1, budget) for item in cast("list[object]", value)]
        return items if kind is list else {"t" if kind is tuple else "s": items}
    if kind is dict:
        pairs = cast("dict[object, object]", value).items()
        return {"d": [[_tagged(k, depth + 1, budget), _tagged(v, depth + 1, budget)] for k, v in pairs]}
    raise ValueError(f"result is not plain data but {kind.__name__}")


def _untagged(value: Any, depth: int) -> object:
    if depth > MAX_DEPTH:
        raise ValueError("not the text of plain data: nested too deeply")
    if isinstance(value, list):
        return [_untagged(item, depth + 1) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    tagged = cast("dict[str, Any]", value)
    if len(tagged) == 1:
        tag, items = next(iter(tagged.items()))
        if tag in ("t", "s") and isinstance(items, list):
            values = [_untagged(item, depth + 1) for item in cast("list[Any]", items)]
            return tuple(values) if tag == "t" else set(values)
        if tag == "d" and isinstance(items, list):
            pairs = cast("list[Any]", items)
            return {_untagged(key, depth + 1): _untagged(item, depth + 1) for key, item in pairs}
    raise ValueError("not the text of plain data: unknown tag")


def _canonical(value: object, depth: int) -> str:
    """A text that stands for the value: equal texts are equal values.

    Not something to hash: an answer may be made of numbers whose hashes collide, and then a set of them takes
    time in the square of its size.
    """
    kind = type(value)
    if value is None or kind is bool:
        return str(value)
    if kind is int:
        return f"{cast(int, value):x}"
    if kind is float:
        return "nan" if value != value else repr(cast(float, value) + 0.0)  # -0.0 equals 0.0
    if kind is str:
        return f"{len(cast(str, value))}'{value}"
    if depth > MAX_DEPTH:
        raise ValueError("cannot compare values nested too deeply (a structure that holds itself?)")
    if kind is list or kind is tuple or kind is set:
        items = [_canonical(item, depth + 1) for item in cast("list[object]", value)]
        if kind is set:
            items.sort()
        return f"{kind.__name__}({','.join(items)})"
    if kind is dict:
        pairs = cast("dict[object, object]", value).items()
        items = [f"{_canonical(k, depth + 1)}:{_canonical(v, depth + 1)}" for k, v in pairs]
        return f"dict({','.join(sorted(items))})"
    raise ValueError(
        f"cannot compare {kind.__name__}: only plain data (None, bool, int, float, str, containers)"
    )
