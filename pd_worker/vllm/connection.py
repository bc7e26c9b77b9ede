"""The engine that a worker is put before, once it can be used: a server, or one in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from triptych.config import PDConfig
from triptych.cpu.threads import in_short_lived_thread
from triptych.errors import ConfigError
from triptych.models.identity import ModelIdentity
from triptych.pd_worker.vllm.front_model import front_identity
from triptych.pd_worker.vllm.health import EngineHealth
from triptych.pd_worker.vllm.http.client import VLLMClient
from triptych.pd_worker.vllm.in_process.launch import check_vllm, end_without_engine, started_engine
from triptych.pd_worker.vllm.port.client import EngineClient, EngineInfo
from triptych.pd_worker.vllm.port.errors import EngineError
from triptych.pd_worker.vllm.settings import read_key


@dataclass(frozen=True, slots=True)
class EngineConnection:
    """An engine and its life. `on_lost` is what its loss means where it cannot come back.

    `step_state` gives the KV cache's usage and the preemptions so far, where they are known.
    """

    client: EngineClient
    health: EngineHealth
    info: EngineInfo
    identity: ModelIdentity | None = None
    on_lost: Callable[[], None] | None = None
    step_state: Callable[[], tuple[float, int]] | None = None


@asynccontextmanager
async def connected(config: PDConfig, stop: asyncio.Event) -> AsyncIterator[EngineConnection | None]:
    """The engine of `config`, which ends with the context if it is this process's.

    None where `stop` is set before it can be used. ConfigError where it never can.
    """
    opened = _server(config, stop) if config.engine_url else _in_process(config, stop)
    async with opened as connection:
        yield connection


@asynccontextmanager
async def _server(config: PDConfig, stop: asyncio.Event) -> AsyncIterator[EngineConnection | None]:
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


@asynccontextmanager
async def _in_process(config: PDConfig, stop: asyncio.Event) -> AsyncIterator[EngineConnection | None]:
    check_vllm()
    identity = await asyncio.to_thread(in_short_lived_thread, front_identity, config)
    client = await started_engine(config, identity.namespace, stop)
    if client is None:
        yield None
        return
    try:
        health = EngineHealth(client, config.stall_timeout)
        try:
            info = await _unless_stopped(health.begin(), stop)
        except EngineError as error:
            raise ConfigError(f"vLLM has started, but generates nothing ({error})") from error
        if info is None:
            yield None
            return
        yield EngineConnection(client, health, info, identity, end_without_engine, lambda: client.step_state)
    finally:
        await client.close()
