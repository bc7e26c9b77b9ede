"""Cores and priorities of this process and its threads. Linux only."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from triptych.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

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


def in_passing_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` returns or raises, from a thread that ends with it, and with it its OpenMP threads.

    Every thread that computes in parallel keeps OpenMP threads until it ends. Once those of a process are
    more than its cores, none of them spins any more before it sleeps: a step of two threads, which meet some
    thousand times a second, then takes half as long again. So what is computed once must leave none behind.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="passing") as executor:
        return executor.submit(work, *args, **kwargs).result()


def lower_priority(nice: int) -> None:
    """The calling thread, and threads that it starts from now on, get the niceness; others keep theirs.

    So a busy tower does not keep its process from answering and from staying registered.
    """
    if nice:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


class OwnCore:
    """A core that one process at a time may keep its threads on: from `keep` to `let_go`, again and again.

    Where the kernel says no, such as for a core that was taken away, it is given up: nothing is raised.
    """

    def __init__(self, core: int, claim: socket.socket) -> None:
        self.core = core
        self._claim = claim
        self._all = os.sched_getaffinity(0)
        self._kept = False
        self._given_up = False

    def keep(self) -> None:
        """All threads of this process run there only. Costs nothing while they do already."""
        if not self._kept:
            self._kept = True
            self._move({self.core})

    def let_go(self) -> None:
        """They run wherever the process may. Costs nothing while they do already."""
        if self._kept:
            self._kept = False
            self._move(self._all)

    def release(self) -> None:
        """Another process may have it. Idempotent."""
        self.let_go()
        self._claim.close()

    def _move(self, cores: Collection[int]) -> None:
        if self._given_up:
            return
        try:
            for thread in os.listdir("/proc/self/task"):
                # A thread may have ended meanwhile.
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread), cores)
        except OSError as error:
            self._given_up = True
            logger.warning("core %d is given up: %s", self.core, error.strerror)


def claim_core(cores: Collection[int]) -> OwnCore | None:
    """The last of `cores` that no other process has claimed; None where that would be the first one.

    The first one stays for everybody. A claim ends with its process.
    """
    for core in sorted(cores, reverse=True)[:-1]:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            # An abstract name: in no file system, and gone when the process is.
            claim.bind(f"\0triptych-core-{core}")
        except OSError:
            claim.close()
            continue
        return OwnCore(core, claim)
    return None


def _listed(cores: set[int]) -> str:
    return ",".join(map(str, sorted(cores)))
