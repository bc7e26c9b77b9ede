"""A relay in front of a server that passes on so many bytes per second, like a slow network card."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

_PIECE = 1 << 16


class _Limit:
    """Bytes that may pass: `rate` per second, with no more saved up than those of 50 ms."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = time.monotonic()

    async def wait(self, nbytes: int) -> None:
        self._free_at = max(self._free_at, time.monotonic() - 0.05) + nbytes / self._rate
        if (pause := self._free_at - time.monotonic()) > 0:
            await asyncio.sleep(pause)


def start_relay(target: int, rate: float) -> tuple[BaseProcess, int]:
    """A process that relays a loopback port, which is returned, to `target`."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_run, args=(target, rate, theirs), daemon=True
    )
    process.start()
    return process, int(ours.recv())


def _run(target: int, rate: float, pipe: Connection) -> None:
    asyncio.run(_serve(target, rate, pipe))


async def _serve(target: int, rate: float, pipe: Connection) -> None:
    limit = _Limit(rate)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", target)
        with contextlib.suppress(OSError):
            await asyncio.gather(_copy(reader, there[1], limit), _copy(there[0], writer, limit))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: _Limit) -> None:
    while piece := await reader.read(_PIECE):
        await limit.wait(len(piece))
        writer.write(piece)
        await writer.drain()
    writer.close()
