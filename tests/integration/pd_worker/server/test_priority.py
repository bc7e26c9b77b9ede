"""A PD worker's engine takes a tenant's requests by their priority."""

from __future__ import annotations

from support.engine.pd_serving import served_model, serving
from support.engine.slow_steps import slow_steps
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
