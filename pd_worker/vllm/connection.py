"""The vLLM server that a worker is put before, once it can be used."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from triptych.base.config import PDConfig
from triptych.pd_worker.vllm.health import EngineHealth
from triptych.pd_worker.vllm.http.client import EngineInfo, VLLMClient
from triptych.pd_worker.vllm.settings import read_key


@dataclass(frozen=True, slots=True)
class EngineConnection:
    """A server, and whether it lives."""

    client: VLLMClient
    health: EngineHealth
    info: EngineInfo


@asynccontextmanager
async def connected(config: PDConfig, stop: asyncio.Event) -> AsyncIterator[EngineConnection | None]:
    """The server of `config`; ConfigError where it never can be used.

    None where `stop` is set before it can be used.
    """
    client = VLLMClient(config.engine_url, read_key(config.engine_key_file))
    try:
        health = EngineHealth(client, config.stall_timeout)
        info = await _unless_stopped(health.first_answer(), stop)
        yield None if info is None else EngineConnection(client, health, info)
    finally:
        await client.close()


async def _unless_stopped(answer: Coroutine[Any, Any, EngineInfo], stop: asyncio.Event) -> EngineInfo | None:
    """What the engine says once it can be used; None where this process is to end before."""
    stopped = asyncio.create_task(stop.wait())
    answering = asyncio.create_task(answer)
    await asyncio.wait((stopped, answering), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if answering.done():
        return answering.result()
    answering.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await answering
    return None
