"""What a crowd of one tenant has to put out goes in turns with another's, a few in each turn of the loop."""

from __future__ import annotations

import asyncio
from collections import Counter

from support.fakes.fake_workers import MODEL
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.base.delta import Delta
from triptych.base.types import SamplingParams
from triptych.proxy.call.chat import ChatCall, ChatMessage
from triptych.proxy.quotas.call_context import NOBODY
from triptych.proxy.turns.loop_turns import STEPS
from triptych.store.embedding_store import EmbeddingStore

CROWD = 60


class Outputs:
    """Whose outputs are put out in which turn of the event loop."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self._turn = 0
        #: Requests whose admission has been put out.
        self.admitted = 0
        self.put_out: list[tuple[int, str]] = []

    def count_turns(self) -> None:
        self._turn += 1
        asyncio.get_running_loop().call_soon(self.count_turns)

    async def ask(self, tenant: str) -> None:
        call = ChatCall("c", MODEL, (ChatMessage("user", "x"),), SamplingParams(), 20.0, tenant=tenant)
        async for outputs in self._cluster.dispatcher.chat(call, NOBODY):
            if any(isinstance(output, Delta) for output in outputs):
                self.put_out.append((self._turn, tenant))
            else:
                self.admitted += 1

    async def of_one_step(self, crowd: str, *others: str) -> None:
        """A worker's one message has a token of each request of the crowd, and then of the others'."""
        [worker] = self._cluster.pd_workers
        worker.gate.clear()
        tenants = [crowd] * CROWD + list(others)
        asked = [asyncio.create_task(self.ask(tenant)) for tenant in tenants]
        await until(lambda: len(worker.requests) == len(tenants), "all requests at the worker")
        await until(lambda: self.admitted == len(tenants), "their admissions")
        self.count_turns()
        for request_id in list(worker.requests):
            self._cluster.dispatcher.tokens(request_id, 1, 0, [1000], "a")
        await until(lambda: len(self.put_out) == len(tenants), "all outputs")
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        worker.gate.set()


async def test_a_crowds_outputs_go_a_few_in_each_turn_of_the_loop_and_anothers_soon(
    store: EmbeddingStore,
) -> None:
    async with FakeCluster(store) as cluster:
        outputs = Outputs(cluster)
        await outputs.of_one_step("alice", "bob")
        assert max(Counter(turn for turn, _ in outputs.put_out).values()) <= STEPS
        assert [tenant for _, tenant in outputs.put_out].index("bob") <= 2 * STEPS


async def test_those_of_one_tenant_alone_go_together(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster:
        outputs = Outputs(cluster)
        await outputs.of_one_step("alice")
        assert len({turn for turn, _ in outputs.put_out}) == 1
