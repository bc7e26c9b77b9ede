"""The ranks of one worker, as rank 0 sees them: processes started, commanded and ended together."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from triptych.base.config.flags import Config, public_values
from triptych.base.engine_beat import EngineBeat
from triptych.base.errors import ConfigError
from triptych.base.ranks.channel import (
    BeatPage,
    Channel,
    Message,
    RankFailed,
    RankLost,
    RankStartError,
    new_page,
)

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


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


#: Seconds that a rank has to load its model.
LOAD_SECONDS = 1800.0
#: Seconds that a command may take, the longest timeout of a job. A rank that stands still is found before
#: that, by its beat.
COMMAND_SECONDS = 3600.0
#: Seconds that a rank has to read a command.
SEND_SECONDS = 60.0
#: Seconds that ranks have to end.
END_SECONDS = 5.0


class RankGroup:
    """The ranks 1..R-1 of a worker with `size` ranks. Rank 0, which owns the group, is the worker's process.

    `program` names what they run, `config` is the worker's. Every command gets one reply from each rank.

    `beats` have to be watched with those of the worker's engines: a rank that dies or stands still ends the
    worker's process, and with it the other ranks.

    All but `beats` is for one thread at a time.
    """

    def __init__(self, program: str, size: int, config: Config, *, command: Sequence[str] = COMMAND) -> None:
        self.size = size
        self._program = program
        self._config = config
        self._command = command
        self._beats = new_page(size)
        self._page = BeatPage(self._beats, size)
        self._rendezvous = os.memfd_create("rendezvous", os.MFD_CLOEXEC)
        self._ranks = [RankProcess(rank, program, self._page) for rank in range(1, size)]
        self._closed = False

    @property
    def beats(self) -> list[EngineBeat]:
        """The beats of the other ranks, to be watched."""
        return [rank.beat for rank in self._ranks]

    @property
    def pids(self) -> list[int | None]:
        """The process ids of ranks 1, 2, …"""
        return [rank.pid for rank in self._ranks]

    def start(self) -> None:
        """Starts the processes, which load; `wait_ready` follows. RankStartError, with all of them ended."""
        service = os.environ.get("TRIPTYCH_SERVICE", self._program)
        try:
            for rank in self._ranks:
                rank.start(self._beats, self._rendezvous, self._command)
                start = {
                    "program": self._program,
                    "rank": rank.rank,
                    "size": self.size,
                    "service": service,
                    "config": public_values(self._config),
                }
                rank.channel.send(start, seconds=SEND_SECONDS)
        except (OSError, RankLost) as error:
            self.close(seconds=0)
            raise RankStartError(str(error)) from error

    def wait_ready(self, *, seconds: float = LOAD_SECONDS) -> list[Message]:
        """What each rank says of itself once it has loaded.

        ConfigError as a rank gave it, RankStartError for any other end; with all of them ended.
        """
        try:
            return [self._ready(rank, seconds) for rank in self._ranks]
        except BaseException:
            self.close(seconds=0)
            raise

    def _ready(self, rank: RankProcess, seconds: float) -> Message:
        try:
            message, _ = rank.channel.receive(seconds=seconds)
        except RankLost as lost:
            raise RankStartError(f"{lost}; its log says more") from lost
        if message.get("failed") == "ConfigError":
            raise ConfigError(f"rank {rank.rank}: {message['text']}")
        if "failed" in message:
            raise RankStartError(f"rank {rank.rank} did not start: {message['failed']}: {message['text']}")
        ready: Message = message["ready"]
        return ready

    def join(self, device: torch.device, *, seconds: float) -> ProcessGroup:
        """The process group of all ranks, which join meanwhile; see `process_group.join`."""
        from triptych.base.ranks.process_group import join

        return join(self._rendezvous, 0, self.size, device, seconds=seconds)

    def send(self, command: Message, descriptors: Sequence[int] = (), *, to: int | None = None) -> None:
        """Sends the command to rank `to`, or to all others. RankLost."""
        for rank in self._ranks if to is None else [self._ranks[to - 1]]:
            rank.channel.send(command, descriptors, seconds=SEND_SECONDS)

    def receive(
        self,
        source: int,
        *,
        seconds: float = COMMAND_SECONDS,
        while_waiting: Callable[[], object] = lambda: None,
    ) -> Message:
        """The reply of rank `source` to the oldest command without one. RankFailed, RankLost.

        `while_waiting` is called once a second, for the beat of the thread that waits.
        """
        message, _ = self._ranks[source - 1].channel.receive(seconds=seconds, while_waiting=while_waiting)
        if "failed" in message:
            raise RankFailed(source, message["failed"], message["text"])
        done: Message = message["done"]
        return done

    def collect(
        self,
        *,
        seconds: float = COMMAND_SECONDS,
        while_waiting: Callable[[], object] = lambda: None,
    ) -> list[Message]:
        """The replies of all other ranks, in order; reads all of them, then raises the first RankFailed."""
        replies, failed = list[Message](), list[RankFailed]()
        for rank in self._ranks:
            try:
                replies.append(self.receive(rank.rank, seconds=seconds, while_waiting=while_waiting))
            except RankFailed as error:
                failed.append(error)
        if failed:
            raise failed[0]
        return replies

    def call(self, command: Message, *, seconds: float = COMMAND_SECONDS) -> list[Message]:
        """Sends the command to all other ranks and collects their replies."""
        self.send(command)
        return self.collect(seconds=seconds)

    def close(self, *, seconds: float = END_SECONDS) -> None:
        """Lets the processes end, and kills those that have not ended after `seconds`. Idempotent."""
        if self._closed:
            return
        self._closed = True
        started = [rank for rank in self._ranks if rank.pid is not None]
        for rank in self._ranks:
            rank.beat.stop()
        for rank in started:
            rank.release()
        for rank in started:
            rank.end(seconds)
        os.close(self._beats)
        os.close(self._rendezvous)
