from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket

import pytest
from openai import AsyncOpenAI

from support.fakes.fake_pd import FakePD
from support.fakes.fake_workers import TOKEN, whole_text
from support.waiting import until
from triptych.config import ProxyConfig
from triptych.ec_connector.registry.registry import Registry
from triptych.ec_connector.store.embedding_store import EmbeddingStore
from triptych.errors import ConfigError
from triptych.proxy import service


async def test_the_service_serves_until_sigterm_and_finishes_what_is_in_flight(
    store: EmbeddingStore, store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    worker = FakePD()
    await worker.start()
    await Registry(store).register(worker.info, term=600.0)
    running = asyncio.create_task(
        service.run(ProxyConfig(store=store_url, port=0, grpc_port=0, internal_token=TOKEN))
    )
    try:
        await until(lambda: running.done() or "ready: proxy http://" in caplog.text)
        ready = re.search(r"ready: proxy (http://127\.0\.0\.1:\d+) grpc 127\.0\.0\.1:\d+", caplog.text)
        assert ready
        await until(lambda: worker.attaches)
        client = AsyncOpenAI(base_url=ready[1] + "/v1", api_key="-", max_retries=0)
        worker.pause_at = 2
        asked = asyncio.create_task(
            client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "x"}], max_tokens=6
            )
        )
        await until(lambda: worker.requests)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: "draining 1 requests" in caplog.text)
        not_ready = await client._client.get(ready[1] + "/ready")
        assert not_ready.status_code == 503
        worker.gate.set()
        assert (await asked).choices[0].message.content == whole_text(6)
        await client.close()
        await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await worker.kill()
    lines = [record.getMessage() for record in caplog.records if "status 200" in record.getMessage()]
    assert len(lines) == 1
    assert "model demo, 3 prompt tokens, 6 completion tokens, 0 items" in lines[0]


async def test_a_port_that_is_taken_is_named_with_the_remedy(store_url: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is taken: --port N picks another"):
            await service.run(ProxyConfig(store=store_url, port=port, grpc_port=0))


async def test_a_grpc_port_that_is_taken_is_named_with_the_remedy(
    store: EmbeddingStore, store_url: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is taken: --grpc-port N picks another"):
            await service.run(ProxyConfig(store=store_url, port=0, grpc_port=port))


async def test_a_store_that_never_answers_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "STORE_SECONDS", 0.1)
    with pytest.raises(ConfigError, match="--store"):
        await service.run(ProxyConfig(store="redis://127.0.0.1:1/0", port=0, grpc_port=0))


async def test_a_missing_store_address_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="--store is missing"):
        await service.run(ProxyConfig(port=0, grpc_port=0))
