"""Cores and priorities of this process and its threads. Linux only."""

from __future__ import annotations

import os
import re
import threading

from triptych.errors import ConfigError

_SPAN = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")


def parse_cpus(text: str) -> frozenset[int]:
    """The cores of "0,2-3"; ConfigError for anything else."""
    cores: set[int] = set()
    for piece in text.split(","):
        span = _SPAN.fullmatch(piece.strip())
        if span is None or int(span[2] or span[1]) < int(span[1]):
            raise ConfigError(f"--cpus {text!r} names no cores: write them like 0,1 or 2-3")
        cores |= set(range(int(span[1]), int(span[2] or span[1]) + 1))
    return frozenset(cores)


def pin(text: str) -> None:
    """This process runs on the cores of `text` only; call it before threads start. "" changes nothing."""
    if not text:
        return
    cores, there = parse_cpus(text), os.sched_getaffinity(0)
    if not cores <= there:
        raise ConfigError(f"--cpus {text!r}: this process may use the cores {_listed(there)} only")
    os.sched_setaffinity(0, cores)


def lower_priority(nice: int) -> None:
    """The calling thread, and threads that it starts from now on, get the niceness; others keep theirs.

    So a busy tower does not keep its process from answering and from staying registered.
    """
    if nice:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


def _listed(cores: set[int]) -> str:
    return ",".join(map(str, sorted(cores)))
