"""Ranks that are threads of the test's process: everything but the processes is the real thing."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from triptych.base.config import EncoderConfig
from triptych.base.engine_beat import EngineBeat
from triptych.base.ranks.channel import BeatPage, Channel, RankLost
from triptych.base.ranks.group import RankGroup
from triptych.base.ranks.rank import Handler, Rank, RankStart


class RankThread:
    """A rank as `RankGroup` knows it. `handler` makes what answers its commands."""

    def __init__(self, rank: int, size: int, page: BeatPage, handler: Callable[[int], Handler]) -> None:
        ours, theirs = socket.socketpair()
        self.rank, self.pid = rank, 0
        self.beat = EngineBeat(f"rank {rank}")
        self.channel = Channel(ours, f"rank {rank}")
        self._theirs = Channel(theirs, "rank 0")
        served = Rank(RankStart("test", rank, size, "test", {}), self._theirs, page, -1)

        def serve() -> None:
            with contextlib.suppress(RankLost):
                served.serve(handler(rank))

        self._thread = threading.Thread(target=serve, daemon=True)
        self._thread.start()

    def die(self) -> None:
        """Closes the connection, as the end of a process does."""
        self._theirs.close()

    def release(self) -> None:
        self.beat.stop()
        self.channel.close()

    def end(self, seconds: float) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._theirs.close()


class RankThreads(RankGroup):
    """A group whose other ranks are threads, started and ready."""

    def __init__(self, size: int, handler: Callable[[int], Handler]) -> None:
        super().__init__("test", size, EncoderConfig())
        self.threads = [RankThread(rank, size, self._page, handler) for rank in range(1, size)]
        self._ranks = self.threads  # type: ignore[assignment]
        self.wait_ready(seconds=60)
