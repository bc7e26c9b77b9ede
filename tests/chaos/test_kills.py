"""One kill at each stage, the stage held open: every answer right, no token twice or missing."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from support.chaos import stages
from support.chaos.rest import assert_at_rest
from support.chaos.streams import Streams
from support.data.oracle import assert_exact
from support.data.traffic import STREAM_TOKENS

pytestmark = pytest.mark.timeout(300)


async def _break_at(kill, cluster, cases, reference, crowds=1):
    """`crowds`: how often all cases are asked, each time with a salt that makes them new to the cluster."""

    def crowd(number):
        salts = [f"{kill.__name__} {number} {each}" for each in range(crowds)]
        return Streams(cluster.url, cases, STREAM_TOKENS, salts)

    got = await stages.broken(crowd, partial(stages.closed_gate, cluster), partial(kill, cluster))
    assert_exact([*reference] * crowds, [answer.token_ids for answer in got])
    assert {answer.finish_reason for answer in got} == {"length"}
    await asyncio.to_thread(assert_at_rest, cluster)


async def test_an_encoder_killed_while_the_tower_works_loses_nothing(shared_cluster, cases, reference):
    await _break_at(stages.kill_encoding, shared_cluster, cases, reference)


async def test_a_pd_worker_killed_in_its_streams_loses_no_token(shared_cluster, cases, reference):
    # Two crowds: streams of the first may end before five are in the middle.
    await _break_at(stages.kill_midstream, shared_cluster, cases, reference, crowds=2)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2], ids=["restart", "takeover"])
@pytest.mark.parametrize(
    "kill",
    [
        stages.kill_queued,
        stages.kill_encoding,
        stages.kill_saved,
        stages.kill_prefill,
        stages.kill_midstream,
    ],
    ids=["queued", "encoding", "saved", "prefill", "midstream"],
)
async def test_a_kill_at_any_stage_loses_nothing(make_cluster, slow_steps, cases, reference, workers, kill):
    # Two workers are through a crowd twice as soon as one, and a busy machine sees the stage late.
    await _break_at(kill, make_cluster(workers, *slow_steps), cases, reference, crowds=workers + 1)
