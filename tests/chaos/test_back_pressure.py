"""More images than the store holds, and a slow PD worker: encoded once, unless the rules are off."""

from __future__ import annotations

import asyncio

import pytest

from support.chaos.crowd import body_of, post_all
from support.chaos.rest import assert_at_rest
from support.data.traffic import Case, picture
from support.processes.cluster import Cluster

REQUESTS = 80
#: Long answers one by one: the PD worker is what everything waits for.
WORDS = (
    *("--max-num-seqs", "1", "--max-num-batched-tokens", "16"),
    *("--store-memory", "3MiB", "--encoder-cache-memory", "512KiB"),
)
TOKENS = 64

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def bodies() -> list[bytes]:
    """Embeddings of 75 KiB each: all together three times what the store has room for."""
    cases = [Case((0, f"number {n}"), (picture(9000 + n, 160, 160),)) for n in range(REQUESTS)]
    return [body_of(case, TOKENS) for case in cases]


async def _repetitions(cluster: Cluster, bodies: list[bytes]) -> float:
    """Share of all items whose embeddings were lost before they were loaded."""
    replies = await post_all(cluster.url, bodies)
    assert all(reply.status == 200 and reply.whole for reply in replies)
    await asyncio.to_thread(assert_at_rest, cluster)
    return await asyncio.to_thread(cluster.total, "proxy", "triptych_re_encodes_total") / REQUESTS


async def test_nothing_is_encoded_before_somebody_has_room_for_it(make_cluster, bodies):
    assert await _repetitions(make_cluster(1, *WORDS), bodies) <= 0.1
