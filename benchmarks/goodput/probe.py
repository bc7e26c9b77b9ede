"""Asks a target what it serves and how many tokens its tokenizer makes of a text."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from dataclasses import replace

import aiohttp

from triptych.base.errors import ConfigError
from triptych.goodput.load.client import LoadClient, make_session
from triptych.goodput.load.job import LoadJob, Target
from triptych.goodput.load.payload import Bodies, words_per_token
from triptych.goodput.load.workload import PlannedRequest

_SHORT, _LONG = 8, 40
_PATIENCE = 120.0


def find_model(target: Target) -> Target:
    """The target with the first model it serves, unless it has one. ConfigError when it does not answer."""
    return target if target.model else replace(target, model=asyncio.run(_first_model(target)))


async def _first_model(target: Target) -> str:
    url = f"{target.url.rstrip('/')}/v1/models"
    try:
        async with make_session(target) as session, asyncio.timeout(_PATIENCE), session.get(url) as response:
            if response.status != 200:
                raise ConfigError(f"--target {target.url}: /v1/models answers {response.status}")
            listed = await response.json(content_type=None)
            return str(listed["data"][0]["id"])
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise ConfigError(f"--target {target.url} does not answer: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"--target {target.url}: no model in /v1/models; name it with --model") from error


def calibrate(target: Target) -> float:
    """Words per token by the server's own usage of two short requests; 1 when it reports no usage."""
    planned = [PlannedRequest(seed, words, 1) for seed, words in ((1, _SHORT), (2, _LONG))]
    counts = asyncio.run(_prompt_tokens(target, planned))
    return words_per_token((_SHORT, counts[0]), (_LONG, counts[1]))


async def _prompt_tokens(target: Target, planned: list[PlannedRequest]) -> list[int]:
    counts = []
    job = LoadJob(target, tuple((0.0, request) for request in planned))
    async with make_session(target) as session:
        client = LoadClient(session, target, time.perf_counter(), _PATIENCE)
        for index, request in enumerate(planned):
            with closing(Bodies(job)) as bodies:
                body = bodies.body(index)
            record = await client.send(index, 0.0, request, body, warm_up=True)
            if not record.ok:
                raise ConfigError(f"--target {target.url} does not do what is measured: {record.error}")
            counts.append(record.prompt_tokens)
    return counts
