"""One of the ranks 1..R-1, as its program sees it: commands of rank 0 in, replies out, beats meanwhile."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from triptych.base.errors import ConfigError
from triptych.base.ranks.channel import BeatPage, Channel, Message

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

#: Seconds that rank 0 has to take a reply.
REPLY_SECONDS = 60.0

#: Does a command, which may carry descriptors, and gives the reply; an Exception is a reply, too.
Handler = Callable[[Message, list[int]], Message]


@dataclass(frozen=True, slots=True)
class RankStart:
    """The first message to a rank: its place and its config (the worker's flags by name, without secrets)."""

    program: str
    rank: int
    size: int
    service: str
    config: Message = field(repr=False)


class Rank:
    """A rank's process. `start` says which rank; `rendezvous` is the descriptor for the process group."""

    def __init__(self, start: RankStart, channel: Channel, page: BeatPage, rendezvous: int) -> None:
        self.rank = start.rank
        self.size = start.size
        self.config = start.config
        self._channel = channel
        self._page = page
        self._rendezvous = rendezvous

    def tick(self) -> None:
        """The rank has come one step, layer or sleep further: called by the thread that computes."""
        self._page.add(self.rank, beats=1)

    @contextmanager
    def slow(self) -> Iterator[None]:
        """A context for what may take long, like a first step that compiles."""
        self._page.add(self.rank, slow=1)
        try:
            yield
        finally:
            self._page.add(self.rank, beats=1, slow=-1)

    def join(self, device: torch.device, *, seconds: float) -> ProcessGroup:
        """The process group of all ranks; see `process_group.join`."""
        from triptych.base.ranks.process_group import join

        return join(self._rendezvous, self.rank, self.size, device, seconds=seconds)

    def serve(self, handle: Handler, ready: Message | None = None) -> None:
        """Tells rank 0 that this one is ready, then does its commands, one after the other, for ever.

        Ends by RankLost, when rank 0 closes the connection.
        """
        self._reply({"ready": ready or {}})
        while True:
            command, descriptors = self._channel.receive(seconds=math.inf, while_waiting=self.tick)
            self.tick()
            try:
                reply: Message = {"done": handle(command, descriptors)}
            except Exception as error:
                logger.exception("a command failed")
                reply = failure(error)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            self.tick()
            self._reply(reply)

    def fail(self, error: Exception) -> None:
        """Tells rank 0 why this rank does not start."""
        self._reply(failure(error))

    def _reply(self, message: Message) -> None:
        self._channel.send(message, seconds=REPLY_SECONDS)


def failure(error: Exception) -> Message:
    """The reply that stands for an exception."""
    kind = "ConfigError" if isinstance(error, ConfigError) else type(error).__name__
    return {"failed": kind, "text": str(error)[:4096]}
