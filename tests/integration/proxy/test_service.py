from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket

import aiohttp
import grpc
import pytest
from grpc import aio
from openai import APIStatusError, AsyncOpenAI

from support.fakes.fake_pd import FakePD
from support.fakes.fake_workers import TOKEN, whole_text
from support.probing import probe
from support.processes.cluster import free_port
from support.waiting import until
from triptych.config import ProxyConfig, ScalingConfig
from triptych.ec_connector.registry.registry import Registry
from triptych.ec_connector.registry.scaling import ScalingBoard
from triptych.ec_connector.store.embedding_store import EmbeddingStore
from triptych.errors import ConfigError
from triptych.protos import proxy_pb2, proxy_pb2_grpc
from triptych.proxy import service
from triptych.scaling import PoolDemand, ScalingDecision


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


async def test_the_kubelets_probes_follow_the_proxy_but_not_its_last_pd_worker(
    store: EmbeddingStore, store_url: str
) -> None:
    worker = FakePD()
    await worker.start()
    metrics_port = free_port()
    config = ProxyConfig(
        store=store_url,
        port=0,
        grpc_port=0,
        metrics_port=metrics_port,
        metrics_host="127.0.1.7",
        internal_token=TOKEN,
    )
    running = asyncio.create_task(service.run(config))

    async def shows(expected: dict[str, object]) -> None:
        async with asyncio.timeout(45):
            while await asyncio.to_thread(probe, metrics_port, "/ready", "127.0.1.7") != expected:
                assert not running.done()
                await asyncio.sleep(0.05)
        assert await asyncio.to_thread(probe, metrics_port, "/health", "127.0.1.7") == {
            "code": 200,
            "status": "ok",
        }

    try:
        await shows({"code": 503, "status": "starting"})
        await Registry(store).register(worker.info, term=600.0)
        await shows({"code": 200, "status": "ready"})
        await Registry(store).withdraw(worker.info)
        await worker.kill()
        await shows({"code": 200, "status": "ready", "degraded": ["PD workers"]})
        os.kill(os.getpid(), signal.SIGTERM)
        await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await worker.kill()


async def test_a_proxy_that_drains_is_alive_and_not_ready(store: EmbeddingStore, store_url: str) -> None:
    worker = FakePD()
    await worker.start()
    await Registry(store).register(worker.info, term=600.0)
    port, metrics_port = free_port(), free_port()
    config = ProxyConfig(
        store=store_url,
        port=port,
        grpc_port=0,
        metrics_port=metrics_port,
        internal_token=TOKEN,
        drain_timeout=0.5,
    )
    running = asyncio.create_task(service.run(config))
    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0)
    try:
        await until(lambda: running.done() or worker.attaches)
        worker.pause_at = 2
        asked = asyncio.create_task(
            client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "x"}], max_tokens=6
            )
        )
        await until(lambda: worker.requests)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(45):
            while (await asyncio.to_thread(probe, metrics_port, "/ready"))["code"] != 503:
                await asyncio.sleep(0.01)
        assert await asyncio.to_thread(probe, metrics_port, "/health") == {"code": 200, "status": "ok"}
        # The request is never finished: --drain-timeout ends it.
        with pytest.raises(APIStatusError, match="stopping"):
            await asked
        await running
    finally:
        await client.close()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await worker.kill()


async def test_a_proxy_that_drains_leaves_scaling_to_the_others(
    store: EmbeddingStore, store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    board, worker = ScalingBoard(store), FakePD()
    await board.announce("pd", ScalingDecision(2, "flow", active=True), 60.0)
    await worker.start()
    await Registry(store).register(worker.info, term=600.0)
    port = free_port()
    config = ProxyConfig(
        store=store_url,
        port=port,
        grpc_port=0,
        internal_token=TOKEN,
        scaling=ScalingConfig(max_pd_workers=3),
    )
    running = asyncio.create_task(service.run(config))
    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0)

    async def published() -> PoolDemand | None:
        """What the proxy has on the board."""
        return next(iter(await board.publish("test", "pd", PoolDemand(waiting=1), -1)), None)

    async def until_published(kept: int | None) -> PoolDemand:
        async with asyncio.timeout(45):
            while (demand := await published()) is None or demand.kept != kept:
                await asyncio.sleep(0.01)
        return demand

    try:
        await until(lambda: running.done() or worker.attaches)
        worker.pause_at = 2
        asked = asyncio.create_task(
            client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "x"}], max_tokens=6
            )
        )
        await until(lambda: worker.requests)
        await until_published(2)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: "draining 1 requests" in caplog.text)
        assert (await until_published(None)).slow > 0.0, "its request still counts"
        worker.gate.set()
        assert (await asked).choices[0].message.content == whole_text(6)
        await running
    finally:
        await client.close()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await worker.kill()


async def test_a_kept_connection_is_served_once_more_after_sigterm_and_then_closed(
    store: EmbeddingStore, store_url: str
) -> None:
    worker = FakePD()
    await worker.start()
    await Registry(store).register(worker.info, term=600.0)
    port = free_port()
    config = ProxyConfig(
        store=store_url,
        host="127.0.1.7",
        port=port,
        grpc_port=0,
        internal_token=TOKEN,
        auth=False,
        insecure=True,
    )
    running = asyncio.create_task(service.run(config))
    question = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 6}
    try:
        await until(lambda: running.done() or worker.attaches)
        async with (
            aiohttp.TCPConnector(limit=1) as connector,
            aiohttp.ClientSession(f"http://127.0.1.7:{port}", connector=connector) as session,
        ):

            async def ask() -> tuple[int, str | None]:
                async with session.post("/v1/chat/completions", json=question) as reply:
                    await reply.read()
                    return reply.status, reply.headers.get("connection")

            assert await ask() == (200, None)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.5)
            # A gateway sends on until its connection is closed, for the endpoints are no concern of it.
            assert await ask() == (200, "close")
        await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await worker.kill()


async def test_a_grpc_client_of_a_proxy_that_drains_is_sent_elsewhere_and_its_call_finished(
    store: EmbeddingStore, store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    worker = FakePD()
    await worker.start()
    await Registry(store).register(worker.info, term=600.0)
    config = ProxyConfig(
        store=store_url,
        host="127.0.1.7",
        port=0,
        grpc_port=0,
        internal_token=TOKEN,
        auth=False,
        insecure=True,
    )
    running = asyncio.create_task(service.run(config))
    try:
        # The worker may be known before the line that says where the proxy listens.
        said = re.compile(r"grpc (127\.0\.1\.7:\d+)")
        await until(lambda: running.done() or (worker.attaches and said.search(caplog.text)))
        found = said.search(caplog.text)
        assert found
        async with aio.insecure_channel(found[1]) as channel:
            message = proxy_pb2.ChatMessage(role="user", parts=[proxy_pb2.ChatPart(text="x")])
            request = proxy_pb2.ChatRequest(messages=[message])
            request.sampling.max_tokens = 6
            worker.pause_at = 2
            call = proxy_pb2_grpc.ProxyServiceStub(channel).Chat(request)
            await until(lambda: worker.requests)
            os.kill(os.getpid(), signal.SIGTERM)
            # GOAWAY: the channel looks for another server, which there is none of here.
            async with asyncio.timeout(45):
                while channel.get_state() is grpc.ChannelConnectivity.READY:
                    await asyncio.sleep(0.01)
            worker.gate.set()
            assert "".join([reply.text async for reply in call]) == whole_text(6)
        await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await worker.kill()


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


async def test_a_proxy_that_still_waits_for_its_store_ends_in_good_order_at_a_signal() -> None:
    running = asyncio.create_task(
        service.run(ProxyConfig(store="redis://127.0.0.1:1/0", port=0, grpc_port=0))
    )
    await until(lambda: running.done() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
    assert not running.done()
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(10):
        await running


async def test_a_missing_store_address_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="--store is missing"):
        await service.run(ProxyConfig(port=0, grpc_port=0))
