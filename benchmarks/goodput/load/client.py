"""Sends one request and records what came of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import aiohttp

from triptych.goodput.load.job import Target
from triptych.goodput.load.record import RequestRecord
from triptych.goodput.load.reply import StreamedReply
from triptych.goodput.load.workload import PlannedRequest

_PIECE = 256 << 10


def make_session(target: Target) -> aiohttp.ClientSession:
    """As many connections as requests; idle ones are dropped before servers do it."""
    headers = {"Content-Type": "application/json"}
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=5.0)
    return aiohttp.ClientSession(
        connector=connector,
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=1 << 20,
        trust_env=False,
    )


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    """A large body in parts, so that other requests' sends and replies are not kept waiting."""
    for at in range(0, len(body), _PIECE):
        yield body[at : at + _PIECE]


class LoadClient:
    """Sends requests to one target. `start` is the window's start on the clock of time.perf_counter."""

    def __init__(
        self, session: aiohttp.ClientSession, target: Target, start: float, timeout: float = 120.0
    ) -> None:
        self._session = session
        self._target = target
        self._urls = [f"{url.rstrip('/')}/v1/chat/completions" for url in target.urls]
        self._start = start
        self._timeout = timeout

    async def send(
        self, index: int, planned: float, request: PlannedRequest, body: bytes, warm_up: bool
    ) -> RequestRecord:
        """Never raises for what the server does: a failure is a record with its reason."""
        reply = StreamedReply(self._target.first_token)
        sent = time.perf_counter()
        error = ""
        try:
            async with asyncio.timeout(self._timeout):
                error = await self._exchange(self._urls[index % len(self._urls)], body, reply)
        except TimeoutError:
            error = f"timeout after {self._timeout:g} s"
        except (aiohttp.ClientError, OSError) as problem:
            error = f"{type(problem).__name__}: {problem}"[:200]
        ended = time.perf_counter()
        error = error or reply.problem(request.output_tokens, self._target.ignore_eos)
        prompt, output = reply.usage or (0, reply.chunks)
        return RequestRecord(
            index=index,
            planned=planned,
            sent=sent - self._start,
            images=len(request.pictures),
            ttft=(ended if reply.first is None else reply.first) - sent,
            e2e=ended - sent,
            itls=tuple(reply.gaps),
            prompt_tokens=prompt,
            output_tokens=output,
            asked_tokens=request.output_tokens,
            counted_by="chunks" if reply.usage is None else "usage",
            error=error,
            stages=reply.stages(),
            caches=reply.caches(),
            warm_up=warm_up,
        )

    async def _exchange(self, url: str, body: bytes, reply: StreamedReply) -> str:
        headers = {"Content-Length": str(len(body))}
        async with self._session.post(url, data=_pieces(body), headers=headers) as response:
            if response.status != 200:
                return f"HTTP {response.status}: {(await response.text())[:200]}"
            async for data in response.content.iter_any():
                reply.feed(data, time.perf_counter())
                if reply.ended:
                    break
        return ""
