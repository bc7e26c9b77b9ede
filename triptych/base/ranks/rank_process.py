"""The process of one other rank, as rank 0 sees it: started, watched, ended."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

from triptych.base.engine_beat import EngineBeat
from triptych.base.ranks.beat_page import BeatPage
from triptych.base.ranks.channel import Channel

logger = logging.getLogger(__name__)

#: Interpreter, module; the numbers that `triptych.base.ranks.process` takes follow.
COMMAND = (sys.executable, "-m", "triptych.base.ranks.process")
#: Seconds between two looks at the rank's beats.
_LOOK_SECONDS = 0.25
_START_SECONDS = 60.0
_KILL_SECONDS = 10.0


class RankProcess:
    """A child process and the thread that starts it, watches it and takes over its beats.

    The child is killed with that very thread, which therefore lives as long as the child.
    """

    def __init__(self, rank: int, service: str, page: BeatPage) -> None:
        self.rank = rank
        self.beat = EngineBeat(f"{service} rank {rank}")
        self._page = page
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: Exception | None = None
        self._tried = threading.Event()
        self._thread: threading.Thread | None = None
        self.channel: Channel

    @property
    def pid(self) -> int | None:
        """The process id; None before its start."""
        return self._process.pid if self._process else None

    def start(self, beats: int, rendezvous: int, command: Sequence[str] = COMMAND) -> None:
        """Starts the process with these descriptors; OSError where that fails."""
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours, f"rank {self.rank}")
        descriptors = (theirs.fileno(), beats, rendezvous)

        def watch() -> None:
            try:
                self._process = _started(command, descriptors)
            except Exception as error:
                self._failure = error
                self.beat.stop()
            finally:
                self._tried.set()
            if self._process is not None:
                self._follow(self._process)

        with theirs:
            name = f"rank-{self.rank}"
            self._thread = threading.Thread(target=self.beat.run, args=(watch,), name=name, daemon=True)
            self._thread.start()
            if not self._tried.wait(_START_SECONDS):
                raise OSError(f"rank {self.rank} did not start within {_START_SECONDS:.0f} s")
        if self._failure is not None:
            self.channel.close()
            raise OSError(f"rank {self.rank} did not start: {self._failure}") from self._failure

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        """Takes over the rank's beats until the process ends."""
        count, slow = 0, False
        while True:
            try:
                code = process.wait(_LOOK_SECONDS)
                break
            except subprocess.TimeoutExpired:
                if (now := self._page.count(self.rank)) != count:
                    count = now
                    self.beat.tick()
                if self._page.slow(self.rank) is not slow:
                    slow = not slow
                    (self.beat.begin_slow if slow else self.beat.end_slow)()
        if not self.beat.stopped:
            end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            logger.critical("rank %d has ended with %s", self.rank, end)

    def release(self) -> None:
        """Lets the process end: its connection is closed, and its end is no failure any more."""
        self.beat.stop()
        self.channel.close()

    def end(self, seconds: float) -> None:
        """Waits so long for the end of a released process, then kills it."""
        if self._thread is None:
            return
        self._thread.join(seconds)
        if self._thread.is_alive() and self._process is not None:
            logger.warning("rank %d has not ended: it is killed", self.rank)
            self._process.kill()
            self._thread.join(_KILL_SECONDS)


def _started(command: Sequence[str], descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C in the terminal reaches the leader, which ends all in order.
    return subprocess.Popen(
        [*command, str(os.getpid()), *map(str, descriptors)],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
