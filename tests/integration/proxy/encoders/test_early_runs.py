"""A picture alone is encoded while its PD worker reads the prompt; beside others it waits for that."""

from __future__ import annotations

import asyncio

from support.fakes.fake_workers import picture, user
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until, within


async def test_a_picture_alone_is_encoded_before_its_pd_worker_has_admitted_it(store):
    async with FakeCluster(store) as cluster:
        encoder, pd = cluster.encoders[0], cluster.pd_workers[0]
        pd.admission.clear()
        asked = asyncio.create_task(cluster.ask(user("?", picture("alone"))))
        await until(lambda: encoder.runs == 1, "its run")
        pd.admission.set()
        await within("the reply", asked)
        assert encoder.runs == 1
        await cluster.at_rest()


async def test_a_picture_beside_another_request_waits_for_memory_at_its_pd_worker(store):
    async with FakeCluster(store) as cluster:
        encoder, pd = cluster.encoders[0], cluster.pd_workers[0]
        pd.gate.clear()
        text = asyncio.create_task(cluster.ask(user("only text")))
        await until(lambda: len(pd.submits) == 1, "the text at a PD worker")
        pd.admission.clear()
        asked = asyncio.create_task(cluster.ask(user("?", picture("beside"))))
        await until(lambda: len(pd.submits) == 2, "the picture's request at a PD worker")
        assert encoder.runs == 0
        pd.admission.set()
        pd.gate.set()
        await within("both replies", asyncio.gather(text, asked))
        assert encoder.runs == 1
        await cluster.at_rest()
