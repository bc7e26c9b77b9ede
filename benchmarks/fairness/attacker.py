"""A: a process of its own that floods until it is told to end, behind everybody else for the CPU."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.fairness.flood import Flood, Question, question
from benchmarks.fairness.floods import FLOODS
from benchmarks.fairness.sends import Client, Door

#: Where clients without a key come from.
KEYLESS_ADDRESS = "127.0.0.3"
#: A key that opens nothing.
WRONG_KEY = "tk-" + "w" * 43
_END_SECONDS = 5.0


def stand_behind() -> None:
    """Puts this process behind all others for the CPU.

    Nice counts within a session; beside the cluster's processes, which have their own, the session's does.
    """
    os.setsid()
    os.nice(19)
    with contextlib.suppress(OSError):  # a kernel without groups of sessions
        Path("/proc/self/autogroup").write_text("19")


class Attacker:
    """A started flood. `door` is the proxy's, `key` A's."""

    def __init__(self, flood: Flood, door: Door, key: str) -> None:
        self._flood = flood
        keyless = flood.keyless
        self._key = "" if keyless else WRONG_KEY if flood.keys > 2 else key
        self._door = door
        self._address = KEYLESS_ADDRESS if keyless else "127.0.0.1"
        #: How A's sends have ended.
        self.ended: Counter[str] = Counter()

    async def run(self, scale: float = 1.0) -> None:
        """Returns when everything has been sent and has ended, and never where it is sent again."""
        sends = self._flood.make(scale)
        places = iter(range(1 << 62)) if self._flood.again else iter(range(len(sends)))

        async def one() -> None:
            async with Client(self._door, self._key, self._address) as client:
                for place in places:
                    self.ended[await client.send(sends[place % len(sends)])] += 1
                if not self._flood.again:
                    await asyncio.Event().wait()  # what it has left unread stays

        async with asyncio.TaskGroup() as group:
            for _ in range(self._flood.clients):
                group.create_task(one())


async def _until_told(work: asyncio.Task[None], pipe: Connection) -> None:
    told = asyncio.create_task(asyncio.to_thread(pipe.recv))
    await asyncio.wait((work, told), return_when=asyncio.FIRST_COMPLETED)
    if work.done() and not told.done():
        await work
        await told
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work


def flood_process(pipe: Connection, name: str, door: Door, key: str, scale: float) -> None:
    """Sends "ready" when its bytes are made, begins when told, and sends how its sends have ended."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    flood = FLOODS[name]
    flood.make(scale)  # media are kept, and whoever waits for them waits for the CPU too
    stand_behind()
    attacker = Attacker(flood, door, key)

    async def run() -> None:
        pipe.send("ready")
        await asyncio.to_thread(pipe.recv)
        await _until_told(asyncio.create_task(attacker.run(scale)), pipe)

    asyncio.run(run())
    pipe.send(dict(attacker.ended))


def neighbour_process(pipe: Connection, asks: Question, door: Door, key: str) -> None:
    """An honest client that asks what B asks, and again as soon as it has its answer."""
    stand_behind()

    async def ask() -> None:
        number = 0
        async with Client(door, key) as client:
            while True:
                number += 1
                await client.post(question(asks, f"neighbour {os.getpid()} {number}"))

    async def run() -> None:
        pipe.send("ready")
        await asyncio.to_thread(pipe.recv)
        await _until_told(asyncio.create_task(ask()), pipe)

    asyncio.run(run())
    pipe.send({})


class Beside:
    """A process beside B, from `begin` to `end`."""

    def __init__(self, pipe: Connection, process: multiprocessing.process.BaseProcess) -> None:
        self._pipe = pipe
        self._process = process

    def begin(self) -> None:
        self._pipe.send("begin")

    def end(self) -> dict[str, int]:
        """How its sends have ended; empty where it does not say in time."""
        with contextlib.suppress(OSError):
            self._pipe.send("end")
        ended: dict[str, int] = {}
        with contextlib.suppress(EOFError, OSError):
            if self._pipe.poll(_END_SECONDS):
                ended = self._pipe.recv()
        self._process.kill()
        self._process.join()
        return ended


@contextmanager
def beside(target: object, *arguments: object) -> Iterator[Beside]:
    """One of the two processes, ready to begin."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)  # type: ignore[arg-type]
    process.start()
    try:
        if not ours.poll(60.0):
            raise RuntimeError("the client's process did not start in 60 s")
        ours.recv()
        yield Beside(ours, process)
    finally:
        process.kill()
        process.join()
