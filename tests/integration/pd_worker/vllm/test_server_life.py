"""The life of vLLM's server, and servers that misbehave."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from types import SimpleNamespace

import grpc
import pytest

from support.clock import Clock
from support.vllm.scripted_server import (
    Call,
    ScriptedServer,
    answer,
    breaks,
    data,
    event,
    fails,
    greedy,
    hangs,
    scripted_server,
)
from support.vllm.serving import front_config, fronting
from triptych.base.engine_beat import BusyClock
from triptych.base.errors import ConfigError
from triptych.base.hashing import prefix_root
from triptych.base.rpc.channels import INCARNATION_HEADER
from triptych.pd_worker.vllm import health
from triptych.pd_worker.vllm.connection import EngineConnection
from triptych.pd_worker.vllm.health import EngineHealth
from triptych.pd_worker.vllm.http.client import VLLMClient
from triptych.pd_worker.vllm.http.replies import EngineUnreachable
from triptych.pd_worker.vllm.run import MAX_FAILURES
from triptych.pd_worker.vllm.worker import load_front_model
from triptych.protos import pd_pb2

SAMPLING = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}


async def incarnation(client) -> str:
    return dict(await client._call.initial_metadata())[INCARNATION_HEADER]


async def broken(client) -> None:
    """Waits until the stream breaks as a killed worker's does."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async with asyncio.timeout(45):
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


async def test_the_worker_reports_the_servers_kv_cache_and_the_seconds_of_prompts(server, served):
    server.kv_usage, server.scripts = (0.25, 0.75), [hangs(1)]
    await served.client.submit(served.client.message("r1", "hello", **SAMPLING))
    await served.client.until("r1", tokens=1)
    assert not served.worker.engine._prefills._states, "its prompt is done"
    async with asyncio.timeout(45):
        while not served.worker._load().kv_usage:
            await asyncio.sleep(0.01)
    assert served.worker._load().kv_usage == 0.5
    await served.client.submit(served.client.message("r2", "hello", **SAMPLING))
    finished = await served.client.until("r2")
    assert 0 < finished.finished.work_seconds <= finished.finished.prefill_seconds
    served.worker.engine.cancel(["r1"], served.client.proxy_id)
    await served.settled()
    assert served.worker._load().kv_usage == 0.0


@pytest.mark.parametrize("shares", [(), (float("nan"),), (-1.0,)])
async def test_a_server_that_tells_no_share_of_its_kv_cache_is_said_to_use_none(server, shares):
    server.kv_usage = shares
    client = VLLMClient(server.url)
    try:
        assert await client.kv_usage() == 0.0
        await server.stop()
        assert await client.kv_usage() == 0.0
    finally:
        await client.close()


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
    await asyncio.wait_for(server.calls[0].gone.wait(), 45)
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
        async with asyncio.timeout(45):
            while server.probes < probes + 2:
                await asyncio.sleep(0.01)
        assert not served.health.up
        server.probe_status = 200
        await served.until_up(True)


async def test_a_long_prefill_is_no_stall(store, monkeypatch):
    clock = Clock(time.monotonic())
    monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(health, "LOOK_SECONDS", 60.0)
    async with scripted_server() as server, fronting(server, store, stall_timeout=0.5) as served:
        server.scripts = [hangs(1)]
        await served.client.submit(served.client.message("r1", "hello", **SAMPLING))
        await served.client.until("r1", tokens=1)
        for _ in range(5):
            server.steps += 1
            await served.health.poll()
            clock.now += 0.3
        assert served.health.up
        clock.now += 0.3
        await served.health.poll()
        assert not served.health.up


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


def says(*pieces: bytes, kind: str = "text/event-stream"):
    """An answer of exactly these bytes."""

    async def script(call: Call):
        response = await call.stream(kind=kind)
        for piece in pieces:
            await response.write(piece)
        return response

    return script


async def ask(served, name: str = "r1", **given):
    await served.client.submit(served.client.message(name, "hello", **{**SAMPLING, **given}))
    return await served.client.until(name)


async def test_a_broken_stream_is_continued_without_a_gap_or_a_token_twice(server, served):
    server.scripts = [breaks(3), breaks(0), breaks(5)]
    found = await ask(served)
    calls = [len(call.body["token_ids"]) for call in server.calls]
    prompt = list(found.admitted.prompt_token_ids)
    assert found.token_ids == greedy({"token_ids": prompt}, 12) and found.finished.reason == "length"
    assert [length - len(prompt) for length in calls] == [0, 3, 3, 8]


async def test_a_stream_that_ends_without_a_reason_is_continued(server, served):
    server.scripts = [says(event([21])), says(event([22]), b"data: [DONE]\n\n")]
    found = await ask(served)
    assert found.token_ids[:2] == [21, 22] and len(found.token_ids) == 12


GARBAGE = {
    "no event": says(b"<html>no</html>\n"),
    "another type": says(b"{}", kind="application/json"),
    "no JSON": says(b"data: {\n\n"),
    "no chunk": says(b"data: 7\n\n"),
    "foreign tokens": says(event([100_000])),
    "negative tokens": says(event([-1])),
    "binary": says(bytes(range(256)) * 64),
    "a redirect": fails(302),
    "a failure": fails(500),
    "a gateway's failure": says(b"", kind="text/html"),
    "an error event": says(data({"error": {"message": "Internal server error", "code": 500}})),
    "nothing": breaks(0),
}


@pytest.mark.parametrize("script", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_is_asked_for_again_a_few_times_and_then_an_error(server, served, script):
    server.default = script
    found = await ask(served)
    assert len(server.calls) == MAX_FAILURES
    # The worker lives, and so does the engine.
    assert served.health.up
    assert found.finished.reason == "error" and found.finished.error.code == "internal_error"
    assert "vLLM" in found.finished.error.message and found.token_ids == []


async def test_one_request_that_fails_leaves_the_others_alone(server, served):
    async def script(call: Call):
        return await (fails(500) if call.body["cache_salt"] in bad else answer)(call)

    client, key = served.client, served.client.model_key
    bad = {prefix_root(key, "bad").hex()}
    server.default = script
    for number in range(6):
        message = client.message(f"r{number}", "hello", **SAMPLING)
        message.salt = "bad" if number % 2 else "good"
        await client.submit(message)
    found = [await client.until(f"r{number}") for number in range(6)]
    assert [one.finished.reason for one in found] == ["length", "error"] * 3


async def test_a_refusal_is_the_clients_with_vllms_reason_and_field(server, served):
    server.default = fails(400, "logprobs is greater than max allowed: 20", param="logprobs")
    found = await ask(served)
    assert len(server.calls) == 1
    error = found.finished.error
    assert (error.code, error.param) == ("invalid_request_error", "logprobs")
    assert "greater than max allowed: 20" in error.message


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_refusal_of_this_worker_is_no_fault_of_the_client(server, served, status):
    server.default = fails(status)
    found = await ask(served)
    assert found.finished.error.code == "internal_error"


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_server_is_waited_for(server, served, status):
    server.scripts = [fails(status)] * 5
    found = await ask(served)
    assert len(server.calls) == 6
    assert found.finished.reason == "length" and len(found.token_ids) == 12


async def test_a_slow_server_is_read_as_it_writes(server, served):
    async def script(call: Call):
        response = await call.stream()
        for index, token in enumerate(greedy(call.body, 12)):
            raw = event([token], finish_reason="length" if index == 11 else None)
            for at in range(0, len(raw), 7):
                await response.write(raw[at : at + 7])
                await asyncio.sleep(0)
        return response

    server.scripts = [script]
    found = await ask(served)
    assert len(server.calls) == 1
    assert len(found.token_ids) == 12 and found.finished.reason == "length"


@pytest.mark.parametrize("turns", range(5))
def test_a_connection_that_a_server_accepts_as_it_stops_is_closed(turns):
    async def stopped() -> None:
        async with scripted_server() as server:
            with socket.create_connection((server.host, int(server.url.rpartition(":")[2]))):
                for _ in range(turns):
                    await asyncio.sleep(0)
                await server.stop()

    asyncio.run(stopped())
    gc.collect()  # what is open still is a warning
