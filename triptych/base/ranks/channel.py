"""What ranks share: frames of msgpack over a socket, with file descriptors, and a page of beats."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import msgspec

from triptych.base.errors import TriptychError
from triptych.base.types import prepared

_WORD = 8
_COUNT, _SLOW = 0, 1


class BeatPage:
    """Two words for each rank, which it alone writes: its beats, and how many reasons it has to be slow."""

    def __init__(self, descriptor: int, size: int) -> None:
        """The page in the file of this descriptor, for `size` ranks."""
        self._map = mmap.mmap(descriptor, 2 * _WORD * size)
        self._words = memoryview(self._map).cast("Q")

    def count(self, rank: int) -> int:
        """How often the rank has beaten."""
        return self._words[2 * rank + _COUNT]

    def slow(self, rank: int) -> bool:
        """Whether the rank has said that it may stand still longer than usual."""
        return self._words[2 * rank + _SLOW] > 0

    def add(self, rank: int, *, beats: int = 0, slow: int = 0) -> None:
        """Called by the rank itself."""
        self._words[2 * rank + _COUNT] += beats
        self._words[2 * rank + _SLOW] += slow


def new_page(size: int) -> int:
    """The descriptor of the file of a new page for `size` ranks; the caller's to close."""
    descriptor = os.memfd_create("rank-beats", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, 2 * _WORD * size)
    return descriptor


class RankLost(BaseException):
    """A rank is dead, or does not answer in time: its worker cannot go on.

    A BaseException, since Exceptions are caught in many places: it ends the engine's thread, and the
    watchdog then ends the process.
    """


class RankFailed(TriptychError):
    """A rank's program raised an Exception; the rank lives and waits for the next command."""

    def __init__(self, rank: int, kind: str, text: str) -> None:
        """`kind` is the name of the exception's class, `text` what it says."""
        super().__init__(f"rank {rank}: {kind}: {text}")
        self.rank = rank
        self.kind = kind
        self.text = text


class RankStartError(TriptychError):
    """The ranks of a worker did not start, for another reason than the configuration."""


#: What ranks tell each other: a map with text keys.
Message = dict[str, Any]

#: Longest frame in bytes: tensors never pass through frames.
MAX_FRAME_BYTES = 64 << 20
_MAX_DESCRIPTORS = 8
_LENGTH = struct.Struct(">I")
#: Seconds of one wait, after which the caller is heard.
_TURN_SECONDS = 1.0


class Channel:
    """One end of the connection between rank 0 and another rank: whole messages, each within a deadline.

    For one thread. A wait that passes its deadline leaves half a frame behind: the connection is closed, and
    every later call raises RankLost too.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self._connection = connection
        self._peer = peer

    def fileno(self) -> int:
        """The socket's descriptor; -1 once it is closed."""
        return self._connection.fileno()

    def send(self, message: Message, descriptors: Sequence[int] = (), *, seconds: float) -> None:
        """Sends the message and copies of the descriptors; RankLost where the peer does not take it."""
        body = msgspec.msgpack.encode(message)
        if len(body) > MAX_FRAME_BYTES:
            raise ValueError(f"a message of {len(body)} bytes: a frame holds {MAX_FRAME_BYTES}")
        if len(descriptors) > _MAX_DESCRIPTORS:
            raise ValueError(f"{len(descriptors)} descriptors: a frame carries {_MAX_DESCRIPTORS}")
        frame = memoryview(_LENGTH.pack(len(body)) + body)
        deadline = time.monotonic() + seconds
        try:
            self._connection.settimeout(max(seconds, 0.001))
            sent = socket.send_fds(self._connection, [frame], list(descriptors)) if descriptors else 0
            while sent < len(frame):
                self._connection.settimeout(max(deadline - time.monotonic(), 0.001))
                sent += self._connection.send(frame[sent:])
        except TimeoutError:
            self._give_up(f"has not read a message for {seconds:.0f} s")
        except OSError as error:
            self._give_up(f"is gone: {error.strerror or error}")

    def receive(
        self, *, seconds: float, while_waiting: Callable[[], object] = lambda: None
    ) -> tuple[Message, list[int]]:
        """The next message, and descriptors that are now this process's; RankLost without one in time.

        `while_waiting` is called once a second while nothing comes.
        """
        deadline = time.monotonic() + seconds
        # Descriptors come with a frame's first bytes.
        head, descriptors = self._read(_LENGTH.size, deadline, while_waiting, first=True)
        try:
            (length,) = _LENGTH.unpack(head)
            if length > MAX_FRAME_BYTES:
                self._give_up(f"sends a frame of {length} bytes")
            body, _ = self._read(length, deadline, while_waiting)
            message = self._unpacked(body)
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return message, descriptors

    def _read(
        self, nbytes: int, deadline: float, while_waiting: Callable[[], object], *, first: bool = False
    ) -> tuple[bytes, list[int]]:
        data, descriptors = bytearray(), list[int]()
        while len(data) < nbytes:
            try:
                self._connection.settimeout(min(max(deadline - time.monotonic(), 0.001), _TURN_SECONDS))
                if first and not data:
                    part, descriptors, _, _ = socket.recv_fds(self._connection, nbytes, _MAX_DESCRIPTORS)
                else:
                    part = self._connection.recv(nbytes - len(data))
            except TimeoutError:
                while_waiting()
                if time.monotonic() >= deadline:
                    self._give_up("has not answered in time")
                continue
            except OSError as error:
                self._give_up(f"is gone: {error.strerror or error}")
            if not part:
                self._give_up("is gone")
            data += part
        return bytes(data), descriptors

    def _unpacked(self, body: bytes) -> Message:
        with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
            return msgspec.msgpack.decode(body, type=prepared(Message))
        self._give_up("sends what is no message")

    def _give_up(self, reason: str) -> NoReturn:
        self.close()
        raise RankLost(f"{self._peer} {reason}")

    def close(self) -> None:
        """Closes the connection; the peer's waits end. Idempotent."""
        self._connection.close()
