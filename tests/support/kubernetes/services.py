"""Services with a cluster IP, as relays on loopback: a connection goes to one ready pod and stays with it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_PIECE = 1 << 16


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A pod behind a Service: its IP and its container ports by name."""

    ip: str
    ports: Mapping[str, int]


class ServicePort:
    """One port of a cluster IP. It follows the ready pods with a delay, as kube-proxy does.

    Without endpoints the port is closed: connections are refused. Connections that exist stay, also those to
    a pod that has left the endpoints, until one of both ends closes.
    """

    def __init__(self, ip: str, port: int, target: int | str, delay: float) -> None:
        self._place = ip, port
        self._target = target
        self._delay = delay
        self._endpoints: Sequence[Endpoint] = ()
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.Task[None]] = set()
        self._choice = random.Random(f"{ip}:{port}")
        self._changing: set[asyncio.Task[None]] = set()
        self._order = asyncio.Lock()

    @property
    def settled(self) -> bool:
        """Whether new connections go to the endpoints that were given last."""
        return not self._changing

    def follow(self, endpoints: Sequence[Endpoint]) -> None:
        """From `delay` seconds on these endpoints get new connections."""
        task = asyncio.create_task(self._follow(endpoints))
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)

    async def _follow(self, endpoints: Sequence[Endpoint]) -> None:
        await asyncio.sleep(self._delay)
        async with self._order:
            self._endpoints = endpoints
            if endpoints and self._server is None:
                self._server = await asyncio.start_server(self._serve, *self._place)
            elif not endpoints and self._server is not None:
                self._server.close()
                self._server = None

    async def close(self) -> None:
        tasks = [*self._changing, *self._links]
        if self._server is not None:
            self._server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._links.add(task)
        try:
            endpoint = self._choice.choice(self._endpoints)
            port = endpoint.ports[self._target] if isinstance(self._target, str) else self._target
            inner, outer = await asyncio.open_connection(endpoint.ip, port)
        except (OSError, IndexError):
            writer.transport.abort()
            self._links.discard(task)
            return
        try:
            await asyncio.gather(_copy(reader, outer), _copy(inner, writer))
        finally:
            for one in (outer, writer):
                one.transport.abort()
            self._links.discard(task)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All bytes of one direction, then the end of it; a reset is passed on as one."""
    try:
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()
    except OSError:
        writer.transport.abort()


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether all of the selector's labels are there."""
    return bool(selector) and all(labels.get(key) == value for key, value in selector.items())
