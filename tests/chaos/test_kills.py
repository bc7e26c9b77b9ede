"""One kill at each stage, the stage held open: every answer right, no token twice or missing."""

from __future__ import annotations

import asyncio

import pytest

from support import stages
from support.oracle import assert_exact
from support.rest import assert_at_rest
from support.traffic import STREAM_TOKENS, ask_all

pytestmark = pytest.mark.timeout(300)


async def _break_at(kill, cluster, cases, reference):
    stages.close_gate(cluster)
    # The salt makes every picture and prompt new to a cluster that has seen them.
    answers = asyncio.create_task(ask_all(cluster.url, cases, STREAM_TOKENS, cache_salt=kill.__name__))
    await kill(cluster)
    got = await answers
    assert_exact(reference, [answer.token_ids for answer in got])
    assert {answer.finish_reason for answer in got} == {"length"}
    await asyncio.to_thread(assert_at_rest, cluster)


async def test_an_encoder_killed_while_the_tower_works_loses_nothing(shared_cluster, cases, reference):
    await _break_at(stages.kill_encoding, shared_cluster, cases, reference)


async def test_a_pd_worker_killed_in_its_streams_loses_no_token(shared_cluster, cases, reference):
    await _break_at(stages.kill_midstream, shared_cluster, cases, reference)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2], ids=["restart", "takeover"])
@pytest.mark.parametrize(
    "kill",
    [stages.kill_queued, stages.kill_encoding, stages.kill_saved, stages.kill_prefill, stages.kill_midstream],
    ids=["queued", "encoding", "saved", "prefill", "midstream"],
)
async def test_a_kill_at_any_stage_loses_nothing(make_cluster, slow_steps, cases, reference, workers, kill):
    await _break_at(kill, make_cluster(workers, *slow_steps), cases, reference)
