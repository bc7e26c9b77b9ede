"""A PD worker's engine takes a tenant's requests by their priority."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from support.engine.pd_serving import served_model, serving
from support.engine.slow_steps import slow_steps
from support.waiting import until, within
from triptych.pd_worker import worker as worker_module
from triptych.protos import pd_pb2


async def test_waiting_requests_are_computed_by_priority_and_one_of_an_earlier_proxy_has_zero(store_url):
    async with serving(served_model("qwen3_vl"), store_url, max_num_seqs=1) as (worker, client):
        hurry = slow_steps(worker.engine)
        ended: list[str] = []
        take = client._take

        def taken(event: pd_pb2.RequestEvent) -> None:
            take(event)
            if event.HasField("finished"):
                ended.append(event.request_id)

        client._take = taken
        await client.submit(client.message("first", "x", max_tokens=400, ignore_eos=True))
        await client.until("first", tokens=1)
        for name, priority in (("high", 9), ("earlier", None), ("zero", 0), ("low", -9)):
            message = client.message(name, "x", max_tokens=2)
            if priority is not None:
                message.priority = priority
            await client.submit(message)
        await client.stub.Cancel(pd_pb2.CancelRequest(proxy_id=client.proxy_id, request_ids=["first"]))
        hurry()
        await client.until("high")
        assert [name for name in ended if name != "first"] == ["low", "earlier", "zero", "high"]


async def test_requests_that_wait_for_an_input_thread_are_read_by_priority(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "INPUT_THREADS", 1)
    async with serving(served_model("qwen3_vl"), store_url) as (worker, client):
        door, read = threading.Event(), list[str]()
        processor = worker.servicer._input_processor
        process = processor.process

        def held(message: pd_pb2.SubmitRequest, arrival: float) -> Any:
            door.wait(60)
            read.append(message.request_id)
            return process(message, arrival)

        monkeypatch.setattr(processor, "process", held)
        submits = []
        for name, priority in (("first", 5), ("high", 9), ("zero", 0), ("low", -9)):
            message = client.message(name, "x", max_tokens=2)
            message.priority = priority
            submits.append(asyncio.create_task(client.submit(message)))
            await until(lambda: worker.servicer._reading == len(submits), "the request")
        door.set()
        await within("the requests", asyncio.gather(*submits))
        assert read == ["first", "low", "zero", "high"]
