"""The process of a PD worker."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import urllib.request

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.channels import connected_channel
from support.data.checkpoints import build_checkpoint
from support.engine.slow_steps import slow_steps
from support.fakes.pd_client import PDClient
from support.waiting import within
from triptych.base.cpu.threads import decoder_threads
from triptych.base.types import WorkerInfo
from triptych.protos import pd_pb2
from triptych.registry.registry import Registry
from triptych.store.embedding_store import EmbeddingStore

_CHILD = """
import asyncio, sys
from triptych.base.log import setup_logging
setup_logging("pd-0")
from triptych.base.config import PDConfig
from triptych.pd_worker.service import run
asyncio.run(run(PDConfig(model=sys.argv[1], store=sys.argv[2], max_model_len=1024, kv_memory=32 << 20)))
"""


async def registered(registry: Registry) -> list[WorkerInfo]:
    """A worker says that it is ready shortly before it registers."""
    while not (workers := await registry.workers()):
        await asyncio.sleep(0.02)
    return workers


@pytest.mark.timeout(240)
async def test_a_worker_registers_serves_drains_and_withdraws(store: EmbeddingStore, store_url: str) -> None:
    model = str(build_checkpoint("qwen3_vl"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CHILD, model, store_url, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    log = []
    try:
        async for line in process.stderr:
            log.append(line.decode())
            if "ready: pd" in log[-1]:
                break
        # A decoder of this width.
        assert any("steps of less than 256 rows take one thread" in line for line in log)
        registry = Registry(store)
        [info] = await within("its registration", registered(registry))
        assert info.pool == "pd"
        assert info.capacity["max_model_len"] == 1024
        assert info.capacity["max_num_seqs"] == 64
        async with connected_channel(info.address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            reply = await check(health_pb2.HealthCheckRequest(), timeout=30)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
            client = PDClient(channel, info.model_key)
            await client.attach()
            await client.submit(client.message("r1", "Tell me more", max_tokens=400, ignore_eos=True))
            await client.until("r1", tokens=1)
            url = f"http://127.0.0.1:{info.capacity['metrics_port']}/metrics"
            page = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=30).read().decode())
            assert "vllm:num_requests_running" in page
            process.send_signal(signal.SIGTERM)
            answer = await client.until("r1")
            assert (len(answer.token_ids), answer.finished.reason) == (400, "length")
            await client.detach()
        await process.communicate()
        assert process.returncode == 0, log
        assert await registry.workers() == []
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


def test_narrow_decoders_get_one_thread() -> None:
    assert decoder_threads(0, 160) == 1
    assert decoder_threads(0, 4096) >= 1


REFUSED = pd_pb2.SubmitReply.STATUS_REFUSED


def endless(
    client: PDClient, request_id: str, text: str = "count", tokens: int = 400
) -> pd_pb2.SubmitRequest:
    return client.message(request_id, text, max_tokens=tokens, ignore_eos=True)


async def set_apart(client: PDClient, request_id: str, tokens: int = 8) -> pd_pb2.SetApartReply:
    message = pd_pb2.SetApartRequest(proxy_id=client.proxy_id, request_id=request_id, tokens=tokens)
    reply: pd_pb2.SetApartReply = await client.stub.SetApart(message, timeout=20)
    return reply


async def test_what_all_proxies_have_there_is_handed_over_before_the_worker_is_apart(served) -> None:
    worker, client = served
    slow_steps(worker.engine)
    other = PDClient(client.channel, client.model_key, "another-proxy")
    await other.attach()
    for each in (client, other):
        await each.submit(endless(each, "r1"))
        await each.until("r1", tokens=1)
    assert not (await set_apart(client, "alone")).HasField("error")
    assert worker.streams.unfinished == 0
    assert worker.engine.scheduler.num_running == 0
    for each in (client, other):
        assert (await each.until("r1")).lost
        assert (await each.submit(endless(each, "r2"))).status == REFUSED
    await other.detach()


async def test_a_worker_is_apart_for_one_proxy_at_a_time_and_not_when_it_drains(served) -> None:
    worker, client = served
    other = PDClient(client.channel, client.model_key, "another-proxy")
    await set_apart(client, "alone")
    assert (await set_apart(other, "alone-too")).error.code == "unavailable"
    assert not (await set_apart(client, "the-next-one")).HasField("error")
    worker.servicer.drain()
    assert (await set_apart(client, "later")).error.code == "unavailable"


async def test_the_worker_is_apart_only_when_its_step_has_ended_and_nothing_is_read(served, monkeypatch):
    worker, client = served
    held, entered = threading.Event(), threading.Event()
    take = worker.servicer._input_processor.process

    def slow_take(message, arrival):
        entered.set()
        assert held.wait(20)
        return take(message, arrival)

    monkeypatch.setattr(worker.servicer._input_processor, "process", slow_take)
    reading = asyncio.create_task(client.submit(endless(client, "r1")))
    await asyncio.to_thread(entered.wait, 20)
    apart = asyncio.create_task(set_apart(client, "alone"))
    assert (await client.until("r1")).lost
    assert not apart.done()
    held.set()
    assert not (await apart).HasField("error")
    assert (await reading).status == REFUSED
