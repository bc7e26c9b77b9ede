"""A PD worker that is kept for one request: what it holds goes elsewhere, and nothing comes beside it."""

from __future__ import annotations

import asyncio
import threading

from support.fakes.pd_client import PDClient
from triptych.protos import pd_pb2

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
