"""One kill at each stage, the stage held open: every answer right, no token twice or missing."""

from __future__ import annotations

import asyncio

import pytest

from support import stages
from support.oracle import assert_exact
from support.rest import assert_at_rest
from support.traffic import STREAM_TOKENS, ask_all

pytestmark = pytest.mark.timeout(300)

#: Small steps, so that prefill and streams last long enough to be met.
SLOW = ("--max-num-batched-tokens", "64", "--encoder-batch-patches", "1")


async def _break_at(kill, cluster, cases, reference):
    stages.close_gate(cluster)
    answers = asyncio.create_task(ask_all(cluster.url, cases, STREAM_TOKENS))
    await kill(cluster)
    got = await answers
    assert_exact(reference, [answer.token_ids for answer in got])
    assert {answer.finish_reason for answer in got} == {"length"}
    await asyncio.to_thread(assert_at_rest, cluster)


async def test_an_encoder_killed_while_the_tower_works_loses_nothing(make_cluster, cases, reference):
    await _break_at(stages.kill_encoding, make_cluster(1, *SLOW), cases, reference)


async def test_a_pd_worker_killed_in_its_streams_loses_no_token(make_cluster, cases, reference):
    await _break_at(stages.kill_midstream, make_cluster(1, *SLOW), cases, reference)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2], ids=["restart", "takeover"])
@pytest.mark.parametrize(
    "kill",
    [stages.kill_queued, stages.kill_encoding, stages.kill_saved, stages.kill_prefill, stages.kill_midstream],
    ids=["queued", "encoding", "saved", "prefill", "midstream"],
)
async def test_a_kill_at_any_stage_loses_nothing(make_cluster, cases, reference, workers, kill):
    await _break_at(kill, make_cluster(workers, *SLOW), cases, reference)
