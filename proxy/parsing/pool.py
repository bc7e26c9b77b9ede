"""The parser processes of one proxy: started when they are needed, replaced when they end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from typing import IO, Any, Self

import msgspec

from triptych.base.errors import InternalError, TooLarge, Unavailable
from triptych.proxy.parsing.parse import Parse, ParseVerdict
from triptych.proxy.parsing.program import BODY_HEAD, VERDICT_HEAD
from triptych.proxy.quotas.quota import RETRY_AFTER, Quota

logger = logging.getLogger(__name__)

#: Seconds of a core that one body may take; none of those that are served takes one.
CPU_SECONDS = 5.0
#: Seconds until a process that says nothing is ended: it may have to share its core with many.
WALL_SECONDS = 60.0
#: Times that a body is given to a process: the first one may have ended before, or by a chance.
_TRIES = 2
_MAX_VERDICT = 64 << 10
_PIECE = 1 << 20
_verdicts = msgspec.msgpack.Decoder(ParseVerdict)
_PROGRAM = "triptych.proxy.parsing.program"


class ParserEnded(Exception):
    """The process has ended without an answer."""


class ParserProcess:
    """One process, and the socket that leads to it."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self._process = process
        self._socket = connection

    @classmethod
    async def start(cls, cpu_seconds: float) -> Self:
        """Unavailable where this machine starts no process any more."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                process = await asyncio.to_thread(_spawn, theirs, cpu_seconds)
        except OSError as error:
            ours.close()
            logger.warning("no parser process can be started: %s", error)
            raise Unavailable(
                "large requests cannot be read now: send less, or try again", retry_after=RETRY_AFTER
            ) from None
        return cls(process, ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, parse: Parse[Any], raw: bytes) -> ParseVerdict:
        """What it says of the body. ParserEnded without an answer; not to be used after a cancelled one."""
        loop = asyncio.get_running_loop()
        order = msgspec.msgpack.encode(parse.order)
        try:
            with await _shared(raw) as body:
                socket.send_fds(self._socket, [BODY_HEAD.pack(len(order))], [body.fileno()])
            await loop.sock_sendall(self._socket, order)
            (size,) = VERDICT_HEAD.unpack(await self._receive(VERDICT_HEAD.size))
            if size > _MAX_VERDICT:
                raise ParserEnded
            return _verdicts.decode(await self._receive(size))
        except (OSError, msgspec.MsgspecError):
            raise ParserEnded from None

    async def _receive(self, size: int) -> bytes:
        loop, data = asyncio.get_running_loop(), b""
        while len(data) < size:
            if not (more := await loop.sock_recv(self._socket, size - len(data))):
                raise ParserEnded
            data += more
        return data

    async def end(self) -> int:
        """Ends it, if it has not ended by itself; how it has."""
        self._socket.close()
        self._process.kill()
        return await asyncio.to_thread(self._process.wait)


def _spawn(connection: socket.socket, cpu_seconds: float) -> subprocess.Popen[bytes]:
    # The folder that this process runs in does not decide what that one imports.
    command = [sys.executable, "-P", "-m", _PROGRAM, str(cpu_seconds)]
    return subprocess.Popen(command, stdin=connection.fileno(), stdout=subprocess.DEVNULL)


async def _shared(raw: bytes) -> IO[bytes]:
    """The bytes in memory that another process can be given, written in pieces between turns of the loop.

    Through a socket each piece would wait for both processes to be scheduled.
    """
    file = os.fdopen(os.memfd_create("body", os.MFD_CLOEXEC), "wb", buffering=0)
    try:
        view = memoryview(raw)
        while view:
            view = view[file.write(view[:_PIECE]) :]
            await asyncio.sleep(0)
    except BaseException:
        file.close()
        raise
    return file


class ParserPool:
    """As many parser processes as the quota has places; a key has its share of them, and its turns."""

    def __init__(
        self, quota: Quota, *, cpu_seconds: float = CPU_SECONDS, wall_seconds: float = WALL_SECONDS
    ) -> None:
        self._quota = quota
        self._cpu_seconds = cpu_seconds
        self._wall_seconds = wall_seconds
        self._idle: list[ParserProcess] = []
        self._closed = False
        self._ending: asyncio.Task[None] | None = None

    async def check(self, holder: str, raw: bytes, parse: Parse[Any]) -> None:
        """Returns when a process has parsed the body well; raises the error that parsing ends with.

        QuotaExceeded where there is no turn in time.
        """
        with await self._quota.wait(holder, 1):
            for _ in range(_TRIES):
                verdict = await self._tried(raw, parse)
                if verdict is None:
                    continue
                if verdict.fault:
                    logger.error("a large body: %s", verdict.fault)
                if (error := verdict.error) is not None:
                    raise error
                return
        raise InternalError("the processes that read large requests have ended: send less, or try again")

    async def _tried(self, raw: bytes, parse: Parse[Any]) -> ParseVerdict | None:
        """None where the process has ended by something that a second one may be spared."""
        process = self._idle.pop() if self._idle else await self._started()
        try:
            async with asyncio.timeout(self._wall_seconds):
                verdict = await process.ask(parse, raw)
        except ParserEnded:
            status = await process.end()
            logger.warning("a parser process has ended (%d)", status)
            if status == -signal.SIGPROF:
                raise self._too_long() from None
            return None
        except TimeoutError:
            await process.end()
            raise self._too_long() from None
        except BaseException:
            # The client has gone while the process has the body.
            await asyncio.shield(process.end())
            raise
        self._idle.append(process)
        if self._closed:
            await self.close()
        return verdict

    async def _started(self) -> ParserProcess:
        """A new process, which the next body gets should this one's client go meanwhile."""
        start = asyncio.create_task(ParserProcess.start(self._cpu_seconds))
        try:
            return await asyncio.shield(start)
        except asyncio.CancelledError:
            start.add_done_callback(self._keep)
            raise

    def _keep(self, start: asyncio.Task[ParserProcess]) -> None:
        if not start.cancelled() and start.exception() is None:
            self._idle.append(start.result())
            if self._closed:
                self._ending = asyncio.create_task(self.close())

    def _too_long(self) -> TooLarge:
        return TooLarge("the request takes too long to read: send less", param="body")

    async def close(self) -> None:
        """Ends those that have nothing to do; the others end with their bodies."""
        self._closed = True
        while self._idle:
            await self._idle.pop().end()
