"""Slow readers, vanishing uploads, dripping headers and idle connections: the others notice nothing."""

from __future__ import annotations

import asyncio

import pytest

from support.chaos.crowd import BadClients, body_of, files
from support.chaos.rest import assert_at_rest
from support.chaos.soak import resident
from support.data.oracle import assert_exact
from support.data.traffic import STREAM_TOKENS, ask_all
from support.processes.cluster import Cluster, wait_for
from triptych.proxy.http.connections import raise_file_limit

#: Files that may be open for other reasons than these clients.
SLACK_FILES = 16
#: Memory that a connection may cost the proxy while it is there, KiB.
CONNECTION_KIB = 32

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("idle", [2_000, 10_000])
async def test_bad_clients_harm_nobody_and_leave_nothing(shared_cluster, cases, reference, idle):
    assert raise_file_limit() > idle + 100
    pid = shared_cluster.pid("proxy")
    wait_for("the proxy to have closed earlier connections", lambda: files(pid) < 100)
    files_before, memory_before = files(pid), resident(pid)
    async with BadClients(shared_cluster.url) as bad:
        await bad.idle(idle)
        for number in range(8):
            await bad.vanish_in_upload(reset=number % 2 == 0)
            await bad.drip_headers()
        await bad.read_slowly(body_of(cases[1], 400, cache_salt="slow reader"))
        answers = await ask_all(
            shared_cluster.url, cases[:12], STREAM_TOKENS, cache_salt=f"bad clients {idle}"
        )
        assert_exact(reference[:12], [answer.token_ids for answer in answers])
        grown = resident(pid) - memory_before
    await asyncio.to_thread(assert_at_rest, shared_cluster)
    await asyncio.to_thread(
        wait_for, "the files to be closed", lambda: files(pid) <= files_before + SLACK_FILES, 60
    )
    assert grown * 1024 < idle * CONNECTION_KIB + 64 * 1024


async def test_ten_thousand_idle_connections_are_closed_by_the_proxy(shared_cluster: Cluster) -> None:
    assert raise_file_limit() > 10_100
    pid = shared_cluster.pid("proxy")
    async with BadClients(shared_cluster.url) as bad:
        await bad.idle(10_000)
        await asyncio.to_thread(wait_for, "the proxy to close them", lambda: bad.refused == 10_000)
        assert files(pid) < 200
