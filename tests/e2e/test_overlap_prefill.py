"""Prompts that are prefilled while their later pictures are encoded give the tokens of generate."""

from __future__ import annotations

import asyncio
import json

import pytest

from support.chaos import stages
from support.chaos.rest import assert_at_rest
from support.chaos.streams import Streams
from support.data.checkpoints import build_checkpoint
from support.data.oracle import assert_exact
from support.data.traffic import ALBUM_TOKENS, OVERLAP_FLAGS, albums, expected
from support.processes.cluster import running_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_vl",
        pytest.param("qwen2_5_vl", marks=pytest.mark.slow),
        pytest.param("llava", marks=pytest.mark.slow),
    ],
)
async def test_answers_are_exact_where_prompts_are_prefilled_between_two_of_their_pictures(family, tmp_path):
    checkpoint, cases = build_checkpoint(family, tmp_path / family), albums(4)
    reference = expected(checkpoint, cases, ALBUM_TOKENS)
    with running_cluster(checkpoint, tmp_path / "run", *OVERLAP_FLAGS) as cluster:
        async with (
            stages.slowed(cluster, "encoder"),
            Streams(cluster.url, cases, ALBUM_TOKENS, ["slowly"]) as streams,
        ):
            answers = await streams.all()
        assert_exact(reference, [answer.token_ids for answer in answers], min_distinct=15)
        assert 0 < cluster.total("pd", "triptych_pd_overlap_requests_total") <= len(cases)
        assert cluster.total("pd", "triptych_pd_overlap_tokens_total") > 0
        # What a request has prefilled early itself is not cached; the begin of the template may be.
        config = json.loads((checkpoint / "config.json").read_text())
        image = config.get("image_token_id", config.get("image_token_index"))
        for answer in answers:
            cached = answer.usage.prompt_tokens_details.cached_tokens
            assert cached <= answer.prompt_token_ids.index(image)
        await asyncio.to_thread(assert_at_rest, cluster)
