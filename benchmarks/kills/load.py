"""An open loop of streamed requests in which one thing fails: which failed, how long nothing came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import aiohttp
import msgspec

from benchmarks.against_peer.trials import body, tokens_of
from triptych_bench.goodput.load.workload import Picture

#: Requests per second, for how long, and the second of the fault.
RATE, SECONDS, FAULT_AT = 2.0, 12.0, 3.0
REQUESTS = int(RATE * SECONDS)
#: Seconds that a client waits for its whole answer.
PATIENCE = 90.0
#: Multiples of the model's 32 pixels: nobody has to resize.
_SIZE = (448, 320)
_CONTENT = "waves"


class Trial(msgspec.Struct, frozen=True):
    """One run: the tokens of each request, empty for a failed one; seconds of stall; restarts by hand."""

    system: str
    fault: str
    number: int
    answers: list[list[int]]
    stall: float
    by_hand: int
    errors: list[str]

    @property
    def failed(self) -> int:
        return sum(not answer for answer in self.answers)


def bodies(model: str, seed: int, count: int, salt: str = "") -> list[bytes]:
    """Requests, every other one with a new picture; those of another seed share nothing with them."""
    seeds = range(seed * 1000, seed * 1000 + count)
    shown = [Picture(own, *_SIZE, _CONTENT) if own % 2 else None for own in seeds]
    return [body(own, one, model=model, salt=salt) for own, one in zip(seeds, shown, strict=True)]


class Load:
    """Clients of one server, none of which tries again."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/chat/completions"
        self.errors: list[str] = []
        #: When tokens came, of any request.
        self.times: list[float] = []

    async def at_a_rate(
        self, requests: Sequence[bytes], fault: Callable[[], Awaitable[None]]
    ) -> list[list[int]]:
        """Sends them at RATE, with `fault` at its second; the answers, in order."""
        async with aiohttp.ClientSession(trust_env=False) as session, asyncio.TaskGroup() as group:
            breaking = group.create_task(_after(FAULT_AT, fault))
            asked = [
                group.create_task(self._after(index / RATE, session, request))
                for index, request in enumerate(requests)
            ]
        breaking.result()
        return [task.result() for task in asked]

    async def at_once(self, requests: Sequence[bytes], at_once: int = 4) -> list[list[int]]:
        """All of them, a few at a time."""
        slots = asyncio.Semaphore(at_once)

        async def one(session: aiohttp.ClientSession, request: bytes) -> list[int]:
            async with slots:
                return await self.ask(session, request)

        async with aiohttp.ClientSession(trust_env=False) as session:
            return await asyncio.gather(*(one(session, request) for request in requests))

    def stall(self, since: float) -> float:
        """The longest time after `since` in which no client got a token."""
        times = sorted([since, *(moment for moment in self.times if moment > since)])
        return max((after - before for before, after in zip(times, times[1:], strict=False)), default=0.0)

    async def _after(self, seconds: float, session: aiohttp.ClientSession, request: bytes) -> list[int]:
        await asyncio.sleep(seconds)
        return await self.ask(session, request)

    async def ask(self, session: aiohttp.ClientSession, request: bytes) -> list[int]:
        """The answer's tokens; none, and an error, where it failed."""
        headers = {"Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(PATIENCE),
                session.post(self._url, data=request, headers=headers) as reply,
            ):
                if reply.status != 200:
                    raise ValueError(f"HTTP {reply.status}: {(await reply.text())[:120]}")
                return (await tokens_of(reply.content, lambda: self.times.append(time.monotonic())))[1]
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self.errors.append(f"{type(error).__name__}: {error}"[:160])
            return []


async def _after(seconds: float, act: Callable[[], Awaitable[None]]) -> None:
    await asyncio.sleep(seconds)
    await act()
