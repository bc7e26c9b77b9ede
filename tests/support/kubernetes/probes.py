"""Probes as a kubelet makes them: HTTP or a command, counted against thresholds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

Manifest = dict[str, Any]
#: Runs a command in the container and says whether its exit code is 0.
Execute = Callable[[list[str]], Awaitable[bool]]


@dataclass(slots=True)
class ProbeCount:
    """Successes and failures in a row, and the state that they have led to; None before the first state."""

    success_threshold: int
    failure_threshold: int
    state: bool | None = None
    _successes: int = 0
    _failures: int = 0

    def add(self, success: bool) -> bool | None:
        """The state after one more result."""
        self._successes = self._successes + 1 if success else 0
        self._failures = 0 if success else self._failures + 1
        if success and self._successes >= self.success_threshold:
            self.state = True
        elif not success and self._failures >= self.failure_threshold:
            self.state = False
        return self.state


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe of a container's spec. All its seconds but the time-out are multiplied by `tempo`."""

    spec: Manifest
    ip: str
    ports: Mapping[str, int]
    execute: Execute
    tempo: float = 1.0

    @property
    def period(self) -> float:
        return float(self.spec.get("periodSeconds", 10)) * self.tempo

    @property
    def initial_delay(self) -> float:
        return float(self.spec.get("initialDelaySeconds", 0)) * self.tempo

    def count(self) -> ProbeCount:
        return ProbeCount(
            int(self.spec.get("successThreshold", 1)), int(self.spec.get("failureThreshold", 3))
        )

    async def ask(self) -> bool:
        """Whether the container answers as it should, within the time-out."""
        seconds = float(self.spec.get("timeoutSeconds", 1))
        try:
            async with asyncio.timeout(seconds):
                return await self._ask()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
            return False

    async def _ask(self) -> bool:
        if action := self.spec.get("httpGet"):
            host = action.get("host") or self.ip
            return 200 <= await http_status(host, self._port(action), action.get("path", "/")) < 400
        return await self.execute(self.spec["exec"]["command"])

    def _port(self, action: Manifest) -> int:
        port = action["port"]
        return self.ports[port] if isinstance(port, str) else int(port)


async def http_status(host: str, port: int, path: str) -> int:
    """The status of the answer to GET."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        words = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: kube-probe\r\nConnection: close\r\n\r\n"
        writer.write(words.encode())
        line = await reader.readuntil(b"\n")
        return int(line.split()[1])
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
