"""A job, as a confined child does it: load a source, call its function on each case, send what it returns.

Nothing that happens here is relied upon outside: from the moment that the source is loaded, the messages are
whatever it likes.
"""

import json
import os
import re
import struct
from typing import Any

from agentrl.gym.plain import decode, encode

RESULT_FD, JOB_FD = 3, 4
HEADER = struct.Struct(">cI")  # of a frame that a child sends: kind, size of the text that follows
CONFINED, READY, VALUE, ERROR = b"C", b"R", b"V", b"E"
JOB_HEADER = struct.Struct(">QIQ")  # size of the job's text, its first cases to skip, bytes of a result
MAX_ERROR = 200  # characters

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


def one_line(text: str) -> str:
    """At most MAX_ERROR printable characters on one line, without addresses."""
    text = _ADDRESS.sub("0x...", text[: 4 * MAX_ERROR])
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= MAX_ERROR else text[: MAX_ERROR - 3] + "..."


def describe(error: BaseException) -> str:
    """`Type: message` on one line; survives exceptions that cannot be printed."""
    name = ""
    try:
        if isinstance(error, MemoryError):
            return "memory limit"
        name = one_line(str(type(error).__name__))
        is_syntax = isinstance(error, SyntaxError)
        message = f"{error.msg} (line {error.lineno})" if is_syntax else str(error)
        return one_line(f"{name}: {message}" if message else name)
    except BaseException:  # it is code of the source that says what an error's name and message are
        return f"{name or 'exception'}: (no message)"


def frame(kind: bytes, text: str) -> bytes:
    """A text with its kind and its size in front."""
    data = text.encode("ascii", "backslashreplace")
    return HEADER.pack(kind, len(data)) + data


def send(kind: bytes, text: str) -> None:
    """Send one frame to whoever watches."""
    write_all(RESULT_FD, frame(kind, text))


def read_exactly(fd: int, size: int) -> bytearray:
    """So many bytes from a pipe; none where it ends before."""
    data = bytearray(size)
    num_read = 0
    while num_read < size:
        num_new = os.readv(fd, [memoryview(data)[num_read:]])
        if not num_new:
            return bytearray()
        num_read += num_new
    return data


def write_all(fd: int, data: bytes) -> None:
    """Write all of the data to a pipe; BrokenPipeError when nobody reads."""
    written = os.write(fd, data)
    while written < len(data):
        written += os.write(fd, memoryview(data)[written:])


def rehearse() -> None:
    """Take the steps of a job, so that this process has its own copies of the memory that they write to."""
    source, function, cases = json.loads('["def f(x): return x", "f", ["{\\"t\\":[1]}"]]')
    namespace: dict[str, Any] = {"__name__": "submission"}
    exec(compile(source, "<submission>", "exec"), namespace)
    args = decode(cases[0])
    assert isinstance(args, tuple)
    HEADER.pack(VALUE, len(encode(namespace[function](*args))))


def work() -> None:
    """Wait for a job and do it; back at once when the pipe that would bring it ends."""
    send(CONFINED, "")
    header = read_exactly(JOB_FD, JOB_HEADER.size)
    if not header:
        return
    size, num_skipped, max_bytes = JOB_HEADER.unpack(header)
    source, function, cases = json.loads(read_exactly(JOB_FD, size))
    os.close(JOB_FD)  # the source finds no descriptor but 0 to 3
    run(source, function, cases[num_skipped:], max_bytes)


def run(source: str, function: str, cases: list[str], max_bytes: int) -> None:
    """Load the source, then answer each case: a frame that it is loaded, a frame for each case."""
    namespace: dict[str, Any] = {"__name__": "submission"}
    try:
        exec(compile(source, "<submission>", "exec"), namespace)
        if not callable(namespace.get(function)):
            raise NameError(f"the source defines no function {function!r}")
    except BaseException as error:
        send(ERROR, describe(error))
        return
    send(READY, "")
    for text in cases:
        try:
            args = decode(text)
            assert isinstance(args, tuple)
            result = namespace[function](*args)
        except BaseException as error:
            send(ERROR, describe(error))
            continue
        try:
            answer = encode(result, max_bytes)
        except BaseException as error:
            send(ERROR, one_line(str(error)) if type(error) is ValueError else describe(error))
        else:
            send(VALUE, answer)
