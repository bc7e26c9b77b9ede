"""Many clients at once, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from support.data.traffic import Case
from support.processes.cluster import Cluster, scrape
from support.waiting import within


@dataclass
class Reply:
    """What one client got."""

    status: int
    retry_after: str | None
    seconds: float
    token_ids: list[int] = field(default_factory=list)
    whole: bool = False


def body_of(case: Case, tokens: int, **extra: Any) -> bytes:
    body = {
        "messages": case.client_messages(),
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return json.dumps(body | extra).encode()


async def post_all(url: str, bodies: Iterable[bytes]) -> list[Reply]:
    """Every body on a connection of its own, all at once."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout()) as session:
        replies = asyncio.gather(*(_post(session, url, body) for body in bodies))
        return list(await within("the replies to a crowd", replies))


async def _post(session: aiohttp.ClientSession, url: str, body: bytes) -> Reply:
    began = time.monotonic()
    async with session.post(f"{url}/v1/chat/completions", data=body) as answer:
        reply = Reply(answer.status, answer.headers.get("retry-after"), 0.0)
        async for line in answer.content:
            if line == b"data: [DONE]\n":
                reply.whole = True
            elif line.startswith(b"data: "):
                for choice in json.loads(line[6:])["choices"]:
                    reply.token_ids += choice.get("token_ids") or []
        reply.seconds = time.monotonic() - began
        return reply


async def most(cluster: Cluster, name: str, done: asyncio.Event) -> float:
    """The highest value of a gauge of the proxy that was seen until `done`."""
    highest = 0.0
    while not done.is_set():
        samples = await asyncio.to_thread(scrape, f"{cluster.url}/metrics")
        highest = max(highest, samples.get(name, 0.0))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), 0.1)
    return highest
