"""As many requests are at vLLM as it computes at once: none waits in a queue that knows no tenants."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from support.vllm.scripted_server import ScriptedServer, hangs
from support.vllm.serving import Served, fronting
from triptych.pd_worker.vllm.http.client import VLLMClient

SAMPLING = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}


async def fill(served: Served, server: ScriptedServer, places: int, *, first: int = 0) -> int:
    """Two requests more than there are places. How many of them are at the server, all with a token."""
    client = served.client
    server.scripts = [hangs(1) for _ in range(places + 2)]
    for index in range(first, first + places + 2):
        await client.submit(client.message(f"r{index}", "hello", **SAMPLING))
    for index in range(first, first + places):
        answer = await client.until(f"r{index}", tokens=1)
        assert not answer.lost and answer.finished is None and len(answer.token_ids) == 1
    # A call that takes no place has been there and back since.
    async with asyncio.timeout(45):
        await served.worker.engine._client.probe(10.0)
    return sum(run.streaming for run in served.worker.engine._runs.values())


@pytest.mark.parametrize(
    ("says", "engines", "flags", "places"),
    [
        (3, 1, {}, 3),
        (3, 0, {}, 3),
        (2, 2, {}, 4),
        (200, 1, {"max_num_seqs": 2}, 2),
        (2, 1, {"max_num_seqs": 5}, 2),
        (0, 1, {"max_num_seqs": 3}, 3),
    ],
    ids=[
        "its own",
        "no metrics",
        "of two engines",
        "fewer by a flag",
        "no more by a flag",
        "it does not say",
    ],
)
async def test_as_many_requests_are_at_the_server_as_it_computes_at_once(
    server, store, says, engines, flags, places
):
    server.max_num_seqs, server.kv_usage = says, (0.0,) * engines
    async with fronting(server, store, **flags) as served:
        assert served.worker.info("127.0.0.1:1", 2).capacity["max_num_seqs"] == places
        assert await fill(served, server, places) == places
        served.worker.engine.cancel([f"r{index}" for index in range(places + 2)], served.client.proxy_id)
        await served.settled()


async def test_a_server_that_comes_back_with_other_places_is_filled_up_to_these(server, store):
    server.max_num_seqs = 2
    async with fronting(server, store) as served:
        assert await fill(served, server, 2) == 2
        await server.stop()
        await served.until_up(False)
        server.max_num_seqs = 4
        await server.start()
        await served.client.attach()
        await served.until_up(True)
        assert await fill(served, server, 4, first=10) == 4
        first = served.worker.info("127.0.0.1:1", 2)
        now = served.worker.renewed(first)
        assert (first.capacity["max_num_seqs"], now.capacity["max_num_seqs"]) == (2, 4)
        assert now == replace(first, capacity={**first.capacity, "max_num_seqs": 4})
        served.worker.engine.cancel([f"r{index}" for index in range(10, 16)], served.client.proxy_id)
        await served.settled()


async def test_asking_for_the_places_computes_nothing(server):
    client = VLLMClient(server.url)
    try:
        assert (await client.info()).max_num_seqs == 256
        assert not server.calls and not server.probes
    finally:
        await client.close()


async def test_a_place_goes_to_the_lowest_priority_and_vllm_hears_of_none(server, store):
    server.max_num_seqs = 1
    server.scripts = [hangs(1) for _ in range(4)]
    async with fronting(server, store) as served:
        client = served.client
        for index, priority in enumerate((0, 5, -1, 0)):
            message = client.message(f"r{index}", "hello", **SAMPLING)
            message.priority = priority
            await client.submit(message)
            if not index:
                await client.until("r0", tokens=1)
        for name, waiting in (("r2", "r1 r3"), ("r3", "r1"), ("r1", "")):
            running = {"r2": "r0", "r3": "r2", "r1": "r3"}[name]
            served.worker.engine.cancel([running], client.proxy_id)
            await client.until(name, tokens=1)
            assert not any(client.answers[other].token_ids for other in waiting.split())
        assert len(server.calls) == 4 and not any("priority" in call.body for call in server.calls)
        served.worker.engine.cancel(["r1"], client.proxy_id)
        await served.settled()
