"""The filter of system calls, run by a small interpreter of its own, says what the tables say."""

import errno
import struct
from itertools import product

import pytest

from agentrl.gym.system_calls import (
    ALLOW,
    ARCHITECTURES,
    COMPUTE,
    ERRNO,
    FCNTL,
    FILES,
    IOCTL,
    KILL_PROCESS,
    START,
    program,
)

DENY = ERRNO | errno.EPERM


def verdict(code: bytes, architecture: int, number: int, *arguments: int) -> tuple[int, int]:
    """What a filter returns for a system call, and in how many steps."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    steps = list(struct.iter_unpack("=HBBI", code))
    at, value, num_steps = 0, 0, 0
    while True:
        kind, if_true, if_false, k = steps[at]
        at, num_steps = at + 1, num_steps + 1
        if kind == 0x06:
            return k, num_steps
        if kind == 0x20:
            (value,) = struct.unpack_from("=I", data, k)
        else:
            holds = {0x15: value == k, 0x35: value >= k}[kind]
            at += if_true if holds else if_false


@pytest.mark.parametrize(
    ("machine", "may_open", "may_start"), list(product(ARCHITECTURES, (False, True), (False, True)))
)
def test_every_number_is_treated_as_the_tables_say(machine: str, may_open: bool, may_start: bool) -> None:
    code = program(machine, may_open, may_start)
    column, architecture = ARCHITECTURES[machine]
    tables = COMPUTE | (FILES if may_open else {}) | (START if may_start else {})
    allowed = {numbers[column] for numbers in tables.values()}
    special = {IOCTL[0][column], FCNTL[0][column]}
    for number in (*range(1000), 2**31, 2**32 - 1):
        if number not in special:
            found, num_steps = verdict(code, architecture, number)
            assert found == (ALLOW if number in allowed else DENY), number
            assert num_steps <= 12  # a search, not a walk: the kernel takes these steps for every number
    for number in (0, 1, 59, 2**30 + 1):
        assert verdict(code, architecture ^ 1, number)[0] == KILL_PROCESS


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_arguments_decide_where_they_should(machine: str) -> None:
    column, architecture = ARCHITECTURES[machine]
    for numbers, argument, values in (IOCTL, FCNTL):
        for value in (*values, 8, 10, 0x5412):  # F_SETOWN, F_SETSIG, TIOCSTI
            arguments = [0] * argument + [value]
            found, _ = verdict(program(machine, True, True), architecture, numbers[column], *arguments)
            assert found == (ALLOW if value in values else DENY)


def test_an_unknown_machine_is_an_error() -> None:
    with pytest.raises(KeyError):
        program("pdp11", True, True)
