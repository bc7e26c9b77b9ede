"""A container as a process of this machine, with its log and its exit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from support.kubernetes.pod_spec import Command
from triptych.apps.launch.embedded_store import find_server_binary

#: Seconds that a killed process may take to be gone.
_KILL_SECONDS = 20.0
#: What stands for the client of the store's image.
_CLIENT = Path(__file__).with_name("valkey_cli.py")


def on_this_machine(words: Sequence[str], ip: str) -> list[str]:
    """The program of an image as it is found here. Servers of stores are bound to the pod's address."""
    program, *rest = words
    if program == "triptych":
        return [sys.executable, "-m", "triptych.apps.cli", *rest]
    if program in ("valkey-server", "redis-server"):
        return [str(find_server_binary()), *rest, "--bind", ip]
    if program == "valkey-cli":
        return [sys.executable, str(_CLIENT), ip, *rest]
    return [program, *rest]


class ContainerProcess:
    """One run of a container. It is in a process group of its own, which ends as a whole."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, command: Command, ip: str, log: Path) -> ContainerProcess:
        words = on_this_machine(command.words, ip)
        with log.open("ab") as out:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=_machine() | dict(command.environment),
                start_new_session=True,
            )
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    async def end(self, seconds: float) -> int:
        """SIGTERM, and SIGKILL where it still runs `seconds` later; the exit code."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(seconds, 0.0)):
                    await self._process.wait()
        return await self.kill()

    async def kill(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        async with asyncio.timeout(_KILL_SECONDS):
            return await self._process.wait()


def _machine() -> dict[str, str]:
    """What a process needs of this machine where an image would have it: nothing else is inherited."""
    kept = ("PATH", "PYTHONPATH", "LANG", "OMP_NUM_THREADS", "COVERAGE_PROCESS_START")
    return {name: os.environ[name] for name in kept if name in os.environ}
