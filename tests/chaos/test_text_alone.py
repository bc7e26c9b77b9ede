"""Text needs no encoder."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from support.chaos.rest import assert_at_rest
from support.chaos.stages import hold
from support.data.oracle import assert_exact
from support.data.traffic import STREAM_TOKENS, ask, ask_all

pytestmark = pytest.mark.timeout(300)


async def test_text_is_answered_with_every_encoder_dead_and_pictures_when_one_is_back(
    shared_cluster, cases, reference
):
    cluster = shared_cluster
    texts = [index for index, case in enumerate(cases) if not case.images]
    with_picture = next(index for index, case in enumerate(cases) if case.images)
    encoders = {name: cluster.pid(name) for name in cluster.names("encoder")}
    # The supervisor sleeps meanwhile, or it would start them again.
    os.kill(cluster.process.pid, signal.SIGSTOP)
    try:
        for pid in encoders.values():
            os.kill(pid, signal.SIGKILL)
        waiting = asyncio.create_task(
            ask(cluster.url, cases[with_picture], STREAM_TOKENS, cache_salt="text alone")
        )
        answers = await ask_all(
            cluster.url, [cases[index] for index in texts], STREAM_TOKENS, cache_salt="text alone"
        )
        assert_exact([reference[index] for index in texts], [answer.token_ids for answer in answers])
        assert not waiting.done()
    finally:
        os.kill(cluster.process.pid, signal.SIGCONT)
    assert_exact([reference[with_picture]], [(await waiting).token_ids])
    await hold("new encoders", lambda: set(cluster.names("encoder")) == set(encoders))
    assert not {cluster.pid(name) for name in encoders} & set(encoders.values())
    await asyncio.to_thread(assert_at_rest, cluster)
