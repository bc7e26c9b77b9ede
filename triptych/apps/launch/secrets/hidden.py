"""Secrets that a person gave on the command line or in the environment, hidden from other processes.

Every user of a machine may read command lines, and the same user's processes an environment. What the kernel
shows of both lies in this process's own memory, where it can be overwritten; until that has happened, some
tenths of a second after the start, it can be seen. Linux only; elsewhere nothing is changed.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

#: Places in /proc/self/stat after the command's name: arg_start, arg_end, env_start and env_end.
_ARGUMENTS, _ENVIRONMENT = (45, 46), (47, 48)


def hide(options: Collection[str], variables: Collection[str]) -> None:
    """Overwrites the values of these options and variables where other processes see them.

    They are still in `sys.argv` and `os.environ`.
    """
    if not sys.platform.startswith("linux"):
        return
    for begin, word, follows in _words(_ARGUMENTS):
        name, is_assignment, value = word.partition(b"=")
        if is_assignment and name.decode(errors="replace") in options:
            ctypes.memset(begin + len(name) + 1, ord("*"), len(value))
        elif follows.decode(errors="replace") in options:
            ctypes.memset(begin, ord("*"), len(word))
    # A copy elsewhere first: the overwritten memory must not hold a variable any more.
    for variable in variables:
        if variable in os.environ:
            os.environ[variable] = os.environ[variable]
    for begin, word, _ in _words(_ENVIRONMENT):
        name, _, value = word.partition(b"=")
        if name.decode(errors="replace") in variables:
            ctypes.memset(begin + len(name) + 1, ord("*"), len(value))


def _words(area: tuple[int, int]) -> Iterator[tuple[int, bytes, bytes]]:
    """(address, word, word before it) of each in the area; none where the kernel does not tell."""
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        begin, end = (int(fields[place]) for place in area)
    except (OSError, ValueError, IndexError):
        return
    before = b""
    for word in (ctypes.string_at(begin, end - begin) if begin else b"").split(b"\0"):
        yield begin, word, before
        begin, before = begin + len(word) + 1, word
