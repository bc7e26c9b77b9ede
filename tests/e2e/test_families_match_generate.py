"""Through HTTP, proxy, encoder worker, store and PD worker: the tokens of transformers' generate."""

from __future__ import annotations

import pytest

from support.data.oracle import assert_exact
from support.data.traffic import ask, ask_all, expected, mixed_cases
from support.matrix import matrix

TOKENS = 64

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("family", matrix(["qwen3_vl", "qwen2_5_vl", "llava"], quick=2))
async def test_mixed_requests_at_once_are_exact(families, family):
    cases = mixed_cases(24, seed=11)
    reference = expected(families.checkpoint(family), cases, TOKENS)
    answers = await ask_all(families.cluster.url, cases, TOKENS, model=family)
    assert_exact(reference, [answer.token_ids for answer in answers])
    assert [a.prompt_token_ids for a in answers] == [r.prompt_token_ids for r in reference]
    assert {a.finish_reason for a in answers} == {"length"}
    assert all(a.usage.completion_tokens == TOKENS for a in answers)


async def test_the_second_user_of_an_image_costs_no_tower_call(families):
    case = mixed_cases(2, seed=23)[1]
    first = await ask(families.cluster.url, case, 8, model="qwen3_vl")
    before = families.cluster.total("encoder", "triptych_encoder_tower_items_total")
    second = await ask(families.cluster.url, case, 8, model="qwen3_vl")
    assert second.token_ids == first.token_ids
    assert families.cluster.total("encoder", "triptych_encoder_tower_items_total") == before
    assert first.timings["items"][0]["cache"] == "encoded"
    # "pd" where the store's answer was late: its PD worker still holds the item.
    assert second.timings["items"][0]["cache"] in ("store", "pd")


async def test_chunking_prefix_hits_and_batches_really_occurred(families):
    cases = mixed_cases(8, seed=31)
    await ask_all(families.cluster.url, cases, 16, model="qwen3_vl")
    await ask_all(families.cluster.url, cases, 16, model="qwen3_vl")
    total = families.cluster.total
    assert total("pd", "triptych_pd_chunked_prefills_total") > 0
    assert total("pd", "vllm:prefix_cache_hits_total") > 0
    assert total("pd", "triptych_pd_batch_requests_sum") > total("pd", "triptych_pd_batch_requests_count")
    batches = total("encoder", "triptych_encoder_tower_calls_total")
    assert total("encoder", "triptych_encoder_tower_items_total") > batches > 0
