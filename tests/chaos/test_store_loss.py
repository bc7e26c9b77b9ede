"""The store flushed or gone: text goes on, media wait, every answer is right."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from support.chaos.rest import assert_at_rest
from support.chaos.stages import assert_unfinished, broken, caught, closed_gate, gathered, hold
from support.chaos.streams import Streams
from support.data.oracle import assert_exact
from support.data.traffic import STREAM_TOKENS, ask_all
from support.processes.cluster import PATIENCE
from triptych.apps.launch.embedded_store import EmbeddedStore

pytestmark = pytest.mark.timeout(300)


#: Requests wait for the store however long it is away.
PATIENT = ("--store-wait", "120")


def _flush(url: str) -> None:
    with redis.Redis.from_url(url, socket_timeout=PATIENCE) as client:
        client.flushall()


def _tower_items(cluster):
    return cluster.total("encoder", "triptych_encoder_tower_items_total")


async def test_a_flushed_store_changes_no_answer(shared_cluster, cases, reference):
    cluster = shared_cluster
    before = 0.0

    @contextmanager
    def gate():
        nonlocal before
        before = _tower_items(cluster)
        with closed_gate(cluster):
            yield

    async def flush(streams):
        await gathered(cluster, streams, streams.pictured)
        async with caught(cluster, streams, "an embedding", lambda: _tower_items(cluster) > before + 1):
            assert_unfinished(cluster)
            _flush(cluster.store_url)

    def crowd(number):
        return Streams(cluster.url, cases, STREAM_TOKENS, [f"flush {number}"])

    got = await broken(crowd, gate, flush)
    assert_exact(reference, [answer.token_ids for answer in got])
    await asyncio.to_thread(assert_at_rest, cluster)


@pytest.mark.slow
async def test_a_store_that_hangs_and_is_killed_loses_nothing_and_stops_no_text(
    make_cluster, cases, reference
):
    cluster = make_cluster(1, "--encoder-batch-patches", "1", *PATIENT)
    texts = [index for index, case in enumerate(cases) if not case.images]
    async with Streams(cluster.url, cases, STREAM_TOKENS, [""]) as streams:
        await hold("an embedding", lambda: _tower_items(cluster) > 1, streams)
        cluster.kill("store", signal.SIGSTOP)
        alone = await ask_all(cluster.url, [cases[index] for index in texts], STREAM_TOKENS)
        assert_exact([reference[index] for index in texts], [answer.token_ids for answer in alone])
        cluster.kill("store")
        got = await streams.all()
    assert_exact(reference, [answer.token_ids for answer in got])
    await asyncio.to_thread(assert_at_rest, cluster)


@pytest.mark.slow
async def test_a_store_that_is_gone_for_five_seconds_loses_nothing(make_cluster, cases, reference):
    with tempfile.TemporaryDirectory(prefix="store-") as folder:
        store = EmbeddedStore(Path(folder), 128 << 20)
        store.start()
        cluster = make_cluster(1, "--encoder-batch-patches", "1", "--store", store.url, *PATIENT)
        try:
            async with Streams(cluster.url, cases, STREAM_TOKENS, [""]) as streams:
                await hold("an embedding", lambda: _tower_items(cluster) > 1, streams)
                os.kill(store.pid, signal.SIGKILL)
                await asyncio.sleep(5.0)
                assert not store.running
                store.start()
                got = await streams.all()
            assert_exact(reference, [answer.token_ids for answer in got])
            await asyncio.to_thread(assert_at_rest, cluster)
            cluster.stop()
        finally:
            store.stop()
