"""A kill while prompts are prefilled up to a picture that is still being encoded: every answer right."""

from __future__ import annotations

import asyncio

import pytest

from support.chaos import stages
from support.chaos.rest import assert_at_rest
from support.chaos.streams import Streams
from support.data.oracle import assert_exact
from support.data.traffic import ALBUM_TOKENS, OVERLAP_FLAGS, albums, expected

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EARLY = "triptych_pd_overlap_tokens_total"


@pytest.mark.parametrize("workers", [1, 2], ids=["restart", "takeover"])
@pytest.mark.parametrize("pool", ["encoder", "pd"])
async def test_a_kill_between_two_pictures_loses_nothing(make_cluster, checkpoint, workers, pool):
    cases = albums(8)
    cluster = make_cluster(workers, *OVERLAP_FLAGS)
    async with (
        stages.slowed(cluster, "encoder", runs=0.03, rests=0.15),
        Streams(cluster.url, cases, ALBUM_TOKENS, ["gap"]) as streams,
    ):
        await stages.hold("prefill up to a picture", lambda: cluster.total("pd", EARLY) > 0, streams)
        assert stages.unfinished(cluster) > 0
        cluster.kill(f"{pool}-0")
        answers = await streams.all()
    reference = expected(checkpoint, cases, ALBUM_TOKENS)
    assert_exact(reference, [answer.token_ids for answer in answers], min_distinct=15)
    await asyncio.to_thread(assert_at_rest, cluster)
