"""Bursts of requests with pictures of their own against a pool of encoders that may be empty."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.micro.back_pressure import picture
from benchmarks.scaling.timeline import Sampler, Timeline, changes
from triptych.goodput.launch import Launched
from triptych.progress.progress import each

#: Longest wait for a pool to be empty again.
PATIENCE = 300.0


@dataclass(frozen=True, slots=True)
class BurstOptions:
    """`requests` at once, each of `images` pictures, `bursts` times."""

    bursts: int
    requests: int
    images: int
    side: int
    tokens: int


@dataclass(slots=True)
class BurstRun:
    """What all bursts have shown. `statuses` are of the replies, 0 for one that broke off."""

    timeline: Timeline
    statuses: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    #: Seconds of each burst, from its first request to its last answer.
    lengths: list[float] = field(default_factory=list)
    #: Encoders that were left when the run ended.
    left: int = 0


async def run_bursts(cluster: Launched, options: BurstOptions) -> BurstRun:
    """Sends the bursts, each once the pool is as small as it may be, and looks at the pool meanwhile."""
    sampler = Sampler(cluster)
    run = BurstRun(sampler.timeline)
    looking = asyncio.create_task(sampler.run())
    try:
        await asyncio.sleep(2.0)
        least = sampler.encoders()
        for number in each("bursts", range(options.bursts)):
            since = len(cluster.log.read_text(errors="replace"))
            run.timeline.bursts.append(sampler.now())
            await _burst(cluster, run, options, number)
            await _until_small(sampler, least)
            run.timeline.changes.append(changes(cluster.log, since))
            await asyncio.sleep(2.0)
        run.left = sampler.encoders() - least
    finally:
        looking.cancel()
        ended = await asyncio.gather(looking, return_exceptions=True)
    if isinstance(ended[0], Exception):
        raise ended[0]
    return run


async def _until_small(sampler: Sampler, least: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while sampler.encoders() > least and time.monotonic() < deadline:
        await asyncio.sleep(0.1)


async def _burst(cluster: Launched, run: BurstRun, options: BurstOptions, number: int) -> None:
    began = time.monotonic()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as session:
        seeds = [(number * options.requests + index) * options.images for index in range(options.requests)]
        await asyncio.gather(*(_ask(session, cluster.url, run, options, seed) for seed in seeds))
    run.lengths.append(time.monotonic() - began)


async def _ask(
    session: aiohttp.ClientSession, url: str, run: BurstRun, options: BurstOptions, seed: int
) -> None:
    body = request([seed + index for index in range(options.images)], options.side, options.tokens)
    began = time.monotonic()
    status = 0
    try:
        async with session.post(f"{url}/v1/chat/completions", data=body) as reply:
            answer = json.loads(await reply.read())
            status = reply.status if reply.status != 200 or answer["choices"] else 0
    except (aiohttp.ClientError, ValueError, KeyError):
        status = 0
    run.statuses[status] += 1
    run.seconds.append(time.monotonic() - began)


def request(seeds: list[int], side: int, tokens: int) -> bytes:
    """A question about pictures that nobody has asked about, one for each seed."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": picture(seed, side)}} for seed in seeds
    ]
    body = {
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "How many shapes?"}]}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    return json.dumps(body).encode()
