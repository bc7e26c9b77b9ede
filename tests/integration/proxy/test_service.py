from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc
import pytest
from grpc import aio
from openai import AsyncOpenAI, InternalServerError

from support.fakes.fake_pd import FakePD
from support.fakes.fake_workers import TOKEN, picture, user, whole_text
from support.probing import probe
from support.processes.cluster import free_port
from support.waiting import until
from triptych.base.config import ProxyConfig, ScalingConfig
from triptych.base.errors import ConfigError
from triptych.base.scaling import PoolDemand, ScalingDecision
from triptych.protos import proxy_pb2, proxy_pb2_grpc
from triptych.proxy import service
from triptych.registry.registry import Registry
from triptych.registry.scaling import ScalingBoard
from triptych.store.embedding_store import EmbeddingStore

QUESTION: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 6}
#: Where a proxy may listen for others than this machine.
OPEN: dict[str, Any] = {"host": "127.0.1.7", "auth": False, "insecure": True}


@dataclass
class Running:
    """A proxy's service under way, its port, and the PD worker that it knows."""

    task: asyncio.Task[None]
    port: int
    worker: FakePD
    host: str

    async def knows_the_worker(self) -> None:
        """Waits until the proxy is attached to the worker, and for its port, which may open later."""
        await until(lambda: self.task.done() or (self.worker.attaches and self._listens()))

    def _listens(self) -> bool:
        with socket.socket() as sock:
            return sock.connect_ex((self.host, self.port)) == 0

    async def question_under_way(self, client: AsyncOpenAI) -> asyncio.Task[Any]:
        """A question whose answer stands after two tokens, until the worker's gate is opened."""
        self.worker.pause_at = 2
        asked = asyncio.create_task(client.chat.completions.create(**QUESTION))
        await until(lambda: self.worker.requests)
        return asked


@contextlib.asynccontextmanager
async def running_service(
    store: EmbeddingStore, store_url: str, *, registered: bool = True, **config: Any
) -> AsyncIterator[Running]:
    """A proxy with one PD worker; the block ends it by SIGTERM, and it must end in good order."""
    worker, port = FakePD(), free_port()
    await worker.start()
    if registered:
        await Registry(store).register(worker.info, term=600.0)
    given = {"port": port, "grpc_port": 0, "internal_token": TOKEN} | config
    task = asyncio.create_task(service.run(ProxyConfig(store=store_url, **given)))
    try:
        yield Running(task, port, worker, str(config.get("host", "127.0.0.1")))
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await worker.kill()


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What the service logs, its ordinary lines too."""
    caplog.set_level(logging.INFO)
    return caplog


def openai_client(port: int) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0)


async def test_the_service_serves_until_sigterm_and_finishes_what_is_in_flight(store, store_url, told):
    async with running_service(store, store_url) as proxy:
        ready = re.compile(rf"ready: proxy http://127\.0\.0\.1:{proxy.port} grpc 127\.0\.0\.1:\d+")
        await until(lambda: proxy.task.done() or ready.search(told.text))
        await proxy.knows_the_worker()
        async with openai_client(proxy.port) as client:
            asked = await proxy.question_under_way(client)
            terminate()
            await until(lambda: "draining 1 requests" in told.text)
            not_ready = await client._client.get(f"http://127.0.0.1:{proxy.port}/ready")
            assert not_ready.status_code == 503
            proxy.worker.gate.set()
            assert (await asked).choices[0].message.content == whole_text(6)
    lines = [record.getMessage() for record in told.records if "status 200" in record.getMessage()]
    assert len(lines) == 1
    assert "model demo, 3 prompt tokens, 6 completion tokens, 0 items" in lines[0]


async def test_a_request_that_waits_for_an_encoder_is_answered_at_the_end_of_the_drain(
    store: EmbeddingStore, store_url: str, told: pytest.LogCaptureFixture
) -> None:
    question = QUESTION | {"messages": user("x", picture("p"))}
    async with running_service(store, store_url, drain_timeout=0.2) as proxy:
        await proxy.knows_the_worker()
        async with openai_client(proxy.port) as client:
            asked = asyncio.create_task(client.chat.completions.create(**question))
            metrics = f"http://127.0.0.1:{proxy.port}/metrics"
            async with asyncio.timeout(45):
                while "\ntriptych_requests_in_flight 1.0" not in (await client._client.get(metrics)).text:
                    await asyncio.sleep(0.05)
            terminate()
            with pytest.raises(InternalServerError, match="stopping") as failed:
                await asked
            assert failed.value.status_code == 503
    assert "Cancel 1 running task" not in told.text


async def test_the_line_of_a_request_that_names_no_model_names_the_one_that_served_it(store, store_url, told):
    async with running_service(store, store_url) as proxy:
        await proxy.knows_the_worker()
        async with openai_client(proxy.port) as client:
            await client.chat.completions.create(**QUESTION | {"model": ""})
        terminate()
    lines = [record.getMessage() for record in told.records if "status 200" in record.getMessage()]
    assert [re.search(r"model (\S+),", line)[1] for line in lines] == ["demo"]


async def test_the_kubelets_probes_follow_the_proxy_but_not_its_last_pd_worker(store, store_url):
    host, metrics_port = "127.0.1.7", free_port()
    flags = {"metrics_port": metrics_port, "metrics_host": host}
    async with running_service(store, store_url, registered=False, **flags) as proxy:

        async def shows(expected: dict[str, object]) -> None:
            async with asyncio.timeout(45):
                while await asyncio.to_thread(probe, metrics_port, "/ready", host) != expected:
                    assert not proxy.task.done()
                    await asyncio.sleep(0.05)
            alive = await asyncio.to_thread(probe, metrics_port, "/health", host)
            assert alive == {"code": 200, "status": "ok"}

        await shows({"code": 503, "status": "starting"})
        await Registry(store).register(proxy.worker.info, term=600.0)
        await shows({"code": 200, "status": "ready"})
        await Registry(store).withdraw(proxy.worker.info)
        await proxy.worker.kill()
        await shows({"code": 200, "status": "ready", "degraded": ["PD workers"]})
        terminate()


async def test_a_proxy_that_drains_leaves_scaling_to_the_others(store, store_url, told):
    board = ScalingBoard(store)
    await board.announce("pd", ScalingDecision(2, "flow", active=True), 60.0)

    async def published() -> PoolDemand | None:
        """What the proxy has on the board."""
        return next(iter(await board.publish("test", "pd", PoolDemand(waiting=1), -1)), None)

    async def until_published(kept: int | None) -> PoolDemand:
        async with asyncio.timeout(45):
            while (demand := await published()) is None or demand.kept != kept:
                await asyncio.sleep(0.01)
        return demand

    scaling = ScalingConfig(max_pd_workers=3)
    async with (
        running_service(store, store_url, scaling=scaling) as proxy,
        openai_client(proxy.port) as client,
    ):
        await proxy.knows_the_worker()
        asked = await proxy.question_under_way(client)
        await until_published(2)
        terminate()
        await until(lambda: "draining 1 requests" in told.text)
        assert (await until_published(None)).slow > 0.0, "its request still counts"
        proxy.worker.gate.set()
        assert (await asked).choices[0].message.content == whole_text(6)


async def test_a_grpc_client_of_a_proxy_that_drains_is_sent_elsewhere_and_its_call_finished(
    store: EmbeddingStore, store_url: str, told: pytest.LogCaptureFixture
) -> None:
    async with running_service(store, store_url, **OPEN) as proxy:
        # The worker may be known before the line that says where the proxy listens.
        said = re.compile(r"grpc (127\.0\.1\.7:\d+)")
        await until(lambda: proxy.task.done() or (proxy.worker.attaches and said.search(told.text)))
        found = said.search(told.text)
        assert found
        async with aio.insecure_channel(found[1]) as channel:
            message = proxy_pb2.ChatMessage(role="user", parts=[proxy_pb2.ChatPart(text="x")])
            request = proxy_pb2.ChatRequest(messages=[message])
            request.sampling.max_tokens = 6
            proxy.worker.pause_at = 2
            call = proxy_pb2_grpc.ProxyServiceStub(channel).Chat(request)
            await until(lambda: proxy.worker.requests)
            terminate()
            # GOAWAY: the channel looks for another server, which there is none of here.
            async with asyncio.timeout(45):
                while channel.get_state() is grpc.ChannelConnectivity.READY:
                    await asyncio.sleep(0.01)
            proxy.worker.gate.set()
            assert "".join([reply.text async for reply in call]) == whole_text(6)


async def test_a_store_that_never_answers_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "STORE_SECONDS", 0.1)
    with pytest.raises(ConfigError, match="--store"):
        await service.run(ProxyConfig(store="redis://127.0.0.1:1/0", port=0, grpc_port=0))


async def test_a_proxy_that_waits_for_its_store_says_so_and_why_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service, "STORE_SECONDS", 0.1)
    with pytest.raises(ConfigError):
        await service.run(ProxyConfig(store="redis://127.0.0.1:1/0", port=0, grpc_port=0))
    waits = [record.getMessage() for record in caplog.records if "waits up to" in record.getMessage()]
    assert len(waits) == 1
    assert "redis://127.0.0.1:1/0 is not reachable" in waits[0]


async def test_a_proxy_that_still_waits_for_its_store_ends_in_good_order_at_a_signal() -> None:
    running = asyncio.create_task(
        service.run(ProxyConfig(store="redis://127.0.0.1:1/0", port=0, grpc_port=0))
    )
    await until(lambda: running.done() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
    assert not running.done()
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(45):
        await running


async def test_pages_of_allowed_origins_may_call_it_and_others_may_not(store, store_url):
    origins = "https://chat.example, http://localhost:3000"
    async with running_service(store, store_url, allowed_origins=origins, api_key="k" * 32) as running:
        await running.knows_the_worker()
        url = f"http://127.0.0.1:{running.port}/v1/chat/completions"
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        async with aiohttp.ClientSession() as http:
            for origin, status in (("https://chat.example", 200), ("https://evil.example", 400)):
                async with http.options(url, headers={"Origin": origin, **asks}) as reply:
                    assert reply.status == status
                    allowed = reply.headers.get("Access-Control-Allow-Origin")
                    assert allowed == (origin if status == 200 else None)
            headers = {"Origin": "http://localhost:3000", "Authorization": f"Bearer {'k' * 32}"}
            async with http.post(url, json=QUESTION, headers=headers) as reply:
                assert reply.status == 200
                assert reply.headers["Access-Control-Allow-Origin"] == headers["Origin"]
        terminate()


async def _statuses(port: int, host: str, headers: dict[str, str]) -> tuple[int, int, int]:
    """Of /ready, of a list of models, and of a question."""
    url = f"http://{host}:{port}"
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.get(f"{url}/ready") as ready, http.get(f"{url}/v1/models") as models:
            pass
        async with http.post(f"{url}/v1/chat/completions", json=QUESTION) as asked:
            return ready.status, models.status, asked.status


FOREIGN = [
    {"Host": "evil.example"},
    {"Host": "10.42.0.7:8000"},
    {"Host": "triptych-proxy.models.svc:8000"},
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
]


async def test_without_keys_on_loopback_a_foreign_host_or_page_reaches_the_probes_only(store, store_url):
    names = "chat.example"
    async with running_service(store, store_url, allowed_hosts=names) as proxy:
        await proxy.knows_the_worker()
        for headers in FOREIGN:
            assert await _statuses(proxy.port, proxy.host, headers) == (200, 403, 403), headers
        for headers in (
            {},
            {"Host": f"localhost:{proxy.port}"},
            {"Host": names, "Origin": f"https://{names}"},
        ):
            assert await _statuses(proxy.port, proxy.host, headers) == (200, 200, 200), headers
        terminate()


@pytest.mark.parametrize("keys", [True, False], ids=["with keys", "for other machines"])
async def test_other_proxies_answer_by_pod_ip_and_service_name(store, store_url, keys):
    options = {"api_key": "k" * 32} if keys else OPEN
    async with running_service(store, store_url, **options) as proxy:
        await proxy.knows_the_worker()
        key = {"Authorization": f"Bearer {'k' * 32}"} if keys else {}
        for headers in FOREIGN:
            assert await _statuses(proxy.port, proxy.host, headers | key) == (200, 200, 200), headers
        terminate()
