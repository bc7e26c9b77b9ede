"""A system's processes: each in a group of its own, started again after a second when it ends, or not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from triptych.base.parent import supervised

#: Seconds before a process that has ended is started again, and that SIGTERM has.
PAUSE_SECONDS, END_SECONDS = 1.0, 15.0


@dataclass(frozen=True, slots=True)
class Service:
    """One command; `env` is what it needs besides this process's environment."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


class Processes:
    """The services of one system. With `restarts` the loop that a kubelet or systemd would be."""

    def __init__(self, services: Sequence[Service], folder: Path, *, restarts: bool) -> None:
        self._services = services
        self._folder = folder
        self._restarts = restarts
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Starts all of them, and keeps them running."""
        for service in self._services:
            await self._launch(service)
            self._tasks.append(asyncio.create_task(self._keep(service)))

    async def _launch(self, service: Service) -> None:
        command, environment = supervised(service.command)
        with (self._folder / f"{service.name}.log").open("ab") as log:
            self._running[service.name] = await asyncio.create_subprocess_exec(
                *command,
                env=environment | dict(service.env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def _keep(self, service: Service) -> None:
        while True:
            process = self._running[service.name]
            await process.wait()
            # What it leaves behind holds ports and memory.
            _signal(process.pid, signal.SIGKILL)
            if not self._restarts:
                return
            await asyncio.sleep(PAUSE_SECONDS)
            await self._launch(service)

    def signal(self, name: str, number: signal.Signals) -> None:
        """To a service and all that it has started."""
        _signal(self._running[name].pid, number)

    async def close(self) -> None:
        """Ends all of them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._running.values():
            _signal(process.pid, signal.SIGCONT)
            _signal(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await asyncio.gather(*(process.wait() for process in self._running.values()))
        for process in self._running.values():
            _signal(process.pid, signal.SIGKILL)
            await process.wait()


def _signal(group: int, number: signal.Signals) -> None:
    # The group outlives its leader as long as one of its processes does.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
