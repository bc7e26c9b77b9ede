"""Sends one request, reads its streamed reply, and records what came of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from triptych.base.types import JsonObject
from triptych_bench.goodput.load.job import RequestRecord, Target
from triptych_bench.goodput.load.workload import PlannedRequest

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


_DATA = b"data:"
STAGES = ("fetch", "queue", "encode", "save", "load", "prefill", "decode")


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    triptych_timings: JsonObject | None = None


class StreamedReply:
    """`first`, `last` and `gaps` are in the unit of `feed`'s times; None and empty before the first token."""

    def __init__(self, first_token: str = "chunk") -> None:
        self._decode = msgspec.json.Decoder(_Chunk).decode
        self._any_chunk = first_token == "chunk"
        self._rest = b""
        self.first: float | None = None
        self.last: float | None = None
        self.gaps: list[float] = []
        self.chunks = 0
        self.usage: tuple[int, int] | None = None
        self.error = ""
        self.ended = False
        self.timings: JsonObject = {}

    def feed(self, data: bytes, now: float) -> None:
        """Bytes as they came, cut anywhere."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(_DATA):
                self._event(line[len(_DATA) :].strip(), now)

    def _event(self, event: bytes, now: float) -> None:
        if event == b"[DONE]":
            self.ended = True
            return
        try:
            chunk = self._decode(event)
        except msgspec.DecodeError as error:
            self.error = self.error or f"an event that is no chunk: {error}"
            return
        if chunk.error is not None:
            self.error = self.error or f"error event: {str(chunk.error)[:200]}"
        if chunk.usage is not None:
            self.usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        if chunk.triptych_timings is not None:
            self.timings = chunk.triptych_timings
        for choice in chunk.choices[:1]:
            self._choice(choice, now)

    def _choice(self, choice: _Choice, now: float) -> None:
        delta = choice.delta or _Delta()
        has_text = bool(delta.content or delta.reasoning_content or delta.reasoning)
        self.chunks += has_text
        if self.first is None:
            if has_text or self._any_chunk:
                self.first = self.last = now
        elif has_text and self.last is not None:
            self.gaps.append(now - self.last)
            self.last = now

    def stages(self) -> dict[str, float]:
        """Seconds by stage, as far as the server reports them."""
        result = self.timings
        return {name: float(result[name]) for name in STAGES if isinstance(result.get(name), int | float)}

    def caches(self) -> tuple[str, ...]:
        """Where each picture's embedding came from, as far as the server reports it."""
        items = self.timings.get("items")
        return tuple(str(item.get("cache")) for item in items) if isinstance(items, list) else ()

    def problem(self, asked: int, ignore_eos: bool) -> str:
        """Why this reply does not count; empty when it does."""
        if self.error:
            return self.error
        if not self.ended:
            return "the stream ended without [DONE]"
        if self.first is None:
            return "a reply without a token"
        if ignore_eos and self.usage is not None and self.usage[1] != asked:
            return f"{self.usage[1]} tokens of {asked}: does the server know ignore_eos?"
        return ""
