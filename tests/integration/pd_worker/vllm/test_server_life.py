"""A server that ends, stands still or returns as another one: its worker lives on."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from support.vllm.scripted_server import ScriptedServer, greedy, hangs, scripted_server
from support.vllm.serving import front_config, fronting
from triptych.base.engine_beat import BusyClock
from triptych.base.errors import ConfigError
from triptych.base.rpc.channels import INCARNATION_HEADER
from triptych.pd_worker.vllm.connection import EngineConnection
from triptych.pd_worker.vllm.health import EngineHealth
from triptych.pd_worker.vllm.http.client import VLLMClient
from triptych.pd_worker.vllm.http.replies import EngineUnreachable
from triptych.pd_worker.vllm.worker import load_front_model
from triptych.protos import pd_pb2

SAMPLING = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}


async def incarnation(client) -> str:
    return dict(await client._call.initial_metadata())[INCARNATION_HEADER]


async def broken(client) -> None:
    """Waits until the stream breaks as a killed worker's does."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async with asyncio.timeout(20):
            await client._reader
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_end_of_the_server_looks_like_the_end_of_the_worker(server, served):
    client = served.client
    server.scripts = [hangs(3)]
    await client.submit(client.message("r1", "hello", **SAMPLING))
    half = await client.until("r1", tokens=3)
    before = await incarnation(client)
    await server.stop()
    await broken(client)
    await client.attach(pd_pb2.Reattach(request_id="r1", attempt=1, position=3))
    assert await incarnation(client) != before
    assert (await client.until("r1")).lost
    assert not served.health.up and served.worker.engine.num_requests == 0
    assert served.metrics.engine_losses._value.get() == 1

    refused = await client.submit(client.message("r2", "hello", **SAMPLING))
    assert refused.error.code == "unavailable" and refused.error.retry_after > 0

    await server.start()
    await served.until_up(True)
    resume = pd_pb2.Resume(prompt_token_ids=half.admitted.prompt_token_ids, output_token_ids=half.token_ids)
    await client.submit(client.message("r1", "", attempt=2, resume=resume, **SAMPLING))
    found = await client.until("r1")
    assert found.token_ids == greedy({"token_ids": list(half.admitted.prompt_token_ids)}, 12)


async def test_the_worker_is_busy_while_the_server_computes_a_request(server, served):
    seconds = 0.0
    served.worker._beat.busy = clock = BusyClock(lambda: seconds)
    seconds += 5.0
    server.scripts = [hangs(1)]
    await served.client.submit(served.client.message("r1", "hello", **SAMPLING))
    await served.client.until("r1", tokens=1)
    served.worker._load()
    seconds += 5.0
    assert clock.share() == 0.5


async def test_the_servers_own_metrics_are_read_from_another_thread(server):
    client = VLLMClient(server.url)
    server.steps = 7
    read = EngineConnection(client, EngineHealth(client, 5.0), await client.info()).metrics_reader()
    try:
        assert await asyncio.to_thread(read) == b'vllm:iteration_tokens_total_count{engine="0"} 7\n'
        await server.stop()
        with pytest.raises(EngineUnreachable):
            await asyncio.to_thread(read)
    finally:
        await client.close()


async def test_a_server_whose_engine_has_died_is_lost_at_once(server, served):
    server.scripts = [hangs(1)]
    await served.client.submit(served.client.message("r1", "hello", **SAMPLING))
    await served.client.until("r1", tokens=1)
    server.healthy = False
    await broken(served.client)
    assert not served.health.up
    await asyncio.wait_for(server.calls[0].gone.wait(), 20)
    server.healthy = True
    await served.until_up(True)


async def test_a_server_that_makes_no_step_is_lost_until_it_gives_a_token(store):
    async with scripted_server() as server, fronting(server, store, stall_timeout=0.2) as served:
        server.scripts = [hangs(1)]
        server.probe_status = 500
        await served.client.submit(served.client.message("r1", "hello", **SAMPLING))
        await broken(served.client)
        assert not served.health.up
        probes = server.probes
        async with asyncio.timeout(20):
            while server.probes < probes + 2:
                await asyncio.sleep(0.01)
        assert not served.health.up
        server.probe_status = 200
        await served.until_up(True)


async def test_a_long_prefill_is_no_stall(store):
    async with scripted_server() as server, fronting(server, store, stall_timeout=0.5) as served:
        server.scripts = [hangs(1)]
        await served.client.submit(served.client.message("r1", "hello", **SAMPLING))
        await served.client.until("r1", tokens=1)
        for _ in range(5):
            server.steps += 1
            await served.health.poll()
            await asyncio.sleep(0.3)
        assert served.health.up


async def test_a_server_that_returns_with_another_model_stays_away(server, served):
    await server.stop()
    await served.until_up(False)
    server.max_model_len = 256
    await server.start()
    for _ in range(3):
        assert not await served.health.poll()
    server.max_model_len = 512
    await served.until_up(True)


async def health_of(server: ScriptedServer, key: str = "") -> tuple[VLLMClient, EngineHealth]:
    client = VLLMClient(server.url, key)
    return client, EngineHealth(client, 60.0)


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"probe_status": 403}, "--enable-scale-out"),
        ({"probe_status": 404}, "--enable-scale-out"),
        ({"key": "sesame"}, "--engine-key-file"),
        ({"version": "0.31.2"}, "0.32 and 0.33"),
    ],
)
async def test_a_server_that_cannot_be_used_ends_the_start_with_the_remedy(change, remedy):
    async with scripted_server() as server:
        for name, value in change.items():
            setattr(server, name, value)
        client, health = await health_of(server)
        with pytest.raises(ConfigError, match=remedy):
            await health.first_answer()
        await client.close()


async def test_a_key_opens_the_server():
    async with scripted_server() as server:
        server.key = "sesame"
        client, health = await health_of(server, "sesame")
        info = await health.first_answer()
        await client.close()
    assert (info.version, info.root, info.max_model_len) == ("0.32.0", "models/tiny", 512)


def test_a_model_length_above_the_servers_is_refused():
    with pytest.raises(ConfigError, match="--max-model-len 1024 is more than the 512"):
        load_front_model(front_config(max_model_len=1024), 512)


@pytest.mark.parametrize("family", ["bart", "whisper"])
def test_a_family_that_vllm_takes_no_embeddings_for_is_refused(family):
    with pytest.raises(ConfigError, match="is not served through vLLM: use `triptych pd --engine native`"):
        load_front_model(front_config(family), 512)
