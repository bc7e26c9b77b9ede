"""Time to first token of two clusters on this machine, one with --overlap-prefill, one without, in turns."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.overlap_prefill.simulated import ENCODERS, PICTURES
from triptych.config import WorkerCounts
from triptych.errors import TriptychError
from triptych.goodput.launch import Launched, launched
from triptych.progress.progress import each

START_SECONDS = 300.0
SWITCHES = ("--no-overlap-prefill", "--overlap-prefill")
#: The first rounds, in which workers compile, learn costs and fill their pools.
WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Measured:
    """TTFTs in seconds by round, without and with overlap, and tokens that were prefilled early."""

    wait: list[float]
    overlap: list[float]
    early_tokens: float

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(
            after / before for before, after in zip(self.wait, self.overlap, strict=True)
        )

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles of the rounds' ratios."""
        ratios = [after / before for before, after in zip(self.wait, self.overlap, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        return low, high


def measure(model: str, rounds: int, side: int, words: Sequence[str]) -> Measured:
    """`rounds` pairs of requests with four new pictures of `side` pixels; `words` are flags of `serve`."""
    shape = WorkerCounts(encoders=ENCODERS, pd_workers=1)
    with contextlib.ExitStack() as stack:
        clusters = [
            stack.enter_context(launched(shape, model, [switch, *words], START_SECONDS))
            for switch in SWITCHES
        ]
        return asyncio.run(_measure(clusters, rounds, side))


async def _measure(clusters: Sequence[Launched], rounds: int, side: int) -> Measured:
    taken: list[list[float]] = [[], []]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120.0)) as session:
        for number in each("rounds", range(rounds + WARM_UP)):
            pictures = [_data_url(number * PICTURES + index, side) for index in range(PICTURES)]
            for index in (0, 1) if number % 2 else (1, 0):
                seconds = await _ask(session, clusters[index].url, pictures)
                if number >= WARM_UP:
                    taken[index].append(seconds)
        early = [await _early_tokens(session, cluster) for cluster in clusters]
    if early[0]:
        raise TriptychError(f"{early[0]:g} tokens were prefilled early with --no-overlap-prefill")
    return Measured(taken[0], taken[1], early[1])


async def _ask(session: aiohttp.ClientSession, url: str, pictures: Sequence[str]) -> float:
    """Seconds until the first token, which is the only one."""
    content = [{"type": "image_url", "image_url": {"url": picture}} for picture in pictures]
    body = {
        "messages": [{"role": "user", "content": [*content, {"type": "text", "text": "what is this?"}]}],
        "max_tokens": 1,
        "temperature": 0,
        "ignore_eos": True,
    }
    began = time.perf_counter()
    async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
        reply.raise_for_status()
        await reply.read()
    return time.perf_counter() - began


async def _early_tokens(session: aiohttp.ClientSession, cluster: Launched) -> float:
    total = 0.0
    for url in cluster.metrics_urls:
        async with session.get(url) as reply:
            for family in text_string_to_metric_families(await reply.text()):
                if family.name == "triptych_pd_overlap_tokens":
                    total += sum(s.value for s in family.samples if s.name.endswith("_total"))
    return total


def _data_url(seed: int, side: int) -> str:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"
