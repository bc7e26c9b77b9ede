"""CPU affinity: the cores that this process may run on, and a core that it has for itself. Linux only."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
from collections.abc import Collection

from triptych.base.errors import ConfigError

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
    cores, allowed = parse_cpus(text), os.sched_getaffinity(0)
    if not cores <= allowed:
        raise ConfigError(
            f"--cpus {text!r}: this process may use the cores {','.join(map(str, sorted(allowed)))} only"
        )
    os.sched_setaffinity(0, cores)


class OwnCore:
    """A core claimed for one process, whose threads are pinned to it from `pin` to `unpin`, again and again.

    Where the kernel refuses, such as for a core that was taken away, it is given up: nothing is raised.
    """

    def __init__(self, core: int, claim: socket.socket) -> None:
        self.core = core
        self._claim = claim
        self._all = os.sched_getaffinity(0)
        self._pinned = False
        self._given_up = False

    def pin(self) -> None:
        """All threads of this process run on the core only. Costs nothing while they do already."""
        if not self._pinned:
            self._pinned = True
            self._move({self.core})

    def unpin(self) -> None:
        """They run on any core of the process. Costs nothing while they do already."""
        if self._pinned:
            self._pinned = False
            self._move(self._all)

    def release(self) -> None:
        """Another process may claim the core. Idempotent."""
        self.unpin()
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


def claim_core() -> OwnCore | None:
    """The last core of this process that no other process has claimed; None where that is the first one.

    The first one stays shared. A claim ends with its process.
    """
    for core in sorted(os.sched_getaffinity(0), reverse=True)[:-1]:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            # An abstract name: in no file system, and gone when the process is.
            claim.bind(f"\0triptych-core-{core}")
        except OSError:
            claim.close()
            continue
        return OwnCore(core, claim)
    return None
