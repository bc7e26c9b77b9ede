"""The supervisor's side of the fork server.

The first start pays for the imports once, whatever the number of workers; a worker that was killed is back in
a second; the imported code is in memory once. Whatever goes wrong here, workers are started by exec instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from triptych.apps.launch.fork.server import ForkReply, ForkRequest
from triptych.base.parent import PARENT_VARIABLE, adopt_orphans

logger = logging.getLogger("launch")

#: Seconds for the imports; a busy machine may take a minute.
PRELOAD_SECONDS = 180.0
FORK_SECONDS = 10.0
_END_SECONDS = 5.0


class ForkedProcess:
    """A child of this process that the fork server forked; the part of asyncio's Process that is needed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._descriptor = os.pidfd_open(pid)
        self._loop.add_reader(self._descriptor, self._reap)

    def _reap(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set()

    async def wait(self) -> int:
        """The exit code, minus the signal's number where a signal ended it."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """No effect once the process has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The fork server as a child of this process. `command` gets its socket's number as its last word."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._lock = asyncio.Lock()
        self._ready = False
        self._ending = False

    @staticmethod
    def possible(device: str) -> bool:
        """Whether workers of this device may be forked: on Linux, and not where they open a GPU."""
        return sys.platform.startswith("linux") and device == "cpu" and _has_pidfd()

    @property
    def pid(self) -> int | None:
        """Its process id, None while there is none."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def start(self) -> None:
        """Starts the process; it imports while the store and the workers start."""
        adopt_orphans()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                str(theirs.fileno()),
                env=os.environ | {"TRIPTYCH_SERVICE": "fork-server", PARENT_VARIABLE: str(os.getpid())},
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)

    async def fork(
        self, name: str, args: Sequence[str], environment: Mapping[str, str]
    ) -> ForkedProcess | None:
        """A new `triptych` process with these words; None when it has to be started by exec."""
        async with self._lock:
            if self._writer is None:
                return None
            try:
                if not self._ready:
                    await self._read_reply(PRELOAD_SECONDS)
                    self._ready = True
                request = ForkRequest(name, list(args), dict(environment))
                self._writer.write(json.dumps(asdict(request)).encode() + b"\n")
                reply = await self._read_reply(FORK_SECONDS)
                if "pid" in reply:
                    return ForkedProcess(reply["pid"])
                logger.warning("%s cannot be forked (%s): it starts by exec", name, reply.get("error"))
            except (OSError, ValueError, TimeoutError) as error:
                if not self._ending:
                    logger.warning("workers start by exec from now on: %s %s", type(error).__name__, error)
                await self._give_up()
        return None

    async def _read_reply(self, seconds: float) -> ForkReply:
        assert self._reader is not None
        async with asyncio.timeout(seconds):
            line = await self._reader.readline()
        if not line:
            raise ConnectionError("the fork server has ended")
        reply: ForkReply = json.loads(line)
        return reply

    async def end(self) -> None:
        """Ends the process, and with it a wait for its imports; the workers live on."""
        self._ending = True
        if not self._ready and self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)
        async with self._lock:
            await self._give_up()

    async def _give_up(self) -> None:
        writer, self._writer, process = self._writer, None, self._process
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        if process is None:
            return
        try:
            # It ends by itself when the socket closes.
            await asyncio.wait_for(process.wait(), _END_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()


def _has_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True
