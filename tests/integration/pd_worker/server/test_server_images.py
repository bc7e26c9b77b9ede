"""Embeddings come from the store, by notice, and a lost one is asked for again."""

from __future__ import annotations

import functools

import pytest

from support.data.oracle import assert_exact, oracle
from support.data.pictures import picture
from support.engine.pd_serving import served_model, serving, slot, stored_items
from triptych.base.types import ItemPlan
from triptych.protos import pd_pb2

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "llava")
PICTURES = (picture(1, 64, 48), picture(2, 48, 96))
QUESTION = [
    {"type": "image"},
    {"type": "text", "text": "and"},
    {"type": "image"},
    {"type": "text", "text": "?"},
]


@pytest.fixture(autouse=True)
def _no_engine_wakes_by_itself(monkeypatch):
    """Whoever waits is woken by what it waits for."""
    monkeypatch.setattr("triptych.pd_worker.engine._LONGEST_SLEEP", 300.0)


@functools.cache
def items_of(family: str) -> list[tuple[ItemPlan, bytes]]:
    return stored_items(family, PICTURES)


def notice(plans) -> pd_pb2.ItemsNotice:
    return pd_pb2.ItemsNotice(proxy_id="proxy", mm_hashes=[plan.mm_hash for plan in plans])


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_question_about_two_pictures_is_answered_as_transformers_does(family, store, store_url):
    items = items_of(family)
    plans = [plan for plan, _ in items]
    messages = [{"role": "user", "content": QUESTION}]
    expected = oracle(served_model(family).path, messages, PICTURES, max_new_tokens=40)
    async with serving(served_model(family), store_url, max_num_batched_tokens=16) as (worker, client):
        message = client.message(
            "r1",
            QUESTION,
            items=[slot(plan, pd_pb2.ITEM_STATE_PENDING) for plan in plans],
            max_tokens=40,
            ignore_eos=True,
            temperature=0.0,
        )
        assert (await client.submit(message)).status == pd_pb2.SubmitReply.STATUS_QUEUED
        for plan, body in items:
            await store.save(plan, body, ttl=60)
            await client.stub.NotifyItems(notice([plan]))
        answer = await client.until("r1")
    assert answer.bodies[0] == "admitted"
    assert list(answer.admitted.prompt_token_ids) == expected.prompt_token_ids
    assert [place.length for place in answer.admitted.placements] == [plan.length for plan in plans]
    assert answer.bodies.count("item_loaded") == 2
    assert_exact([expected], [answer.token_ids])


async def test_a_lost_embedding_is_asked_for_and_the_request_goes_on(store, store_url):
    items = items_of("qwen3_vl")
    plans = [plan for plan, _ in items]
    ready = [slot(plan) for plan in plans]
    async with serving(served_model("qwen3_vl"), store_url) as (_, client):
        await store.save(*items[0], ttl=60)
        await client.submit(client.message("r1", QUESTION, items=ready, max_tokens=8, ignore_eos=True))
        answer = await client.has("r1", "item_missing")
        assert answer.missing == [plans[1].mm_hash]
        await store.save(*items[1], ttl=60)
        await client.stub.NotifyItems(notice(plans[1:]))
        await client.until("r1")
        assert answer.finished.reason == "length"
        assert sorted(set(answer.loaded)) == sorted(plan.mm_hash for plan in plans)


async def test_items_above_the_encoder_cache_are_refused_with_both_sizes(store, store_url):
    slots = [slot(plan) for plan, _ in items_of("qwen3_vl")]
    async with serving(served_model("qwen3_vl"), store_url, encoder_cache_memory=5000) as (_, client):
        reply = await client.submit(client.message("r1", QUESTION, items=slots))
        resume = pd_pb2.Resume(prompt_token_ids=[1, 2, 3])
        again = await client.submit(client.message("r2", "", items=slots, attempt=2, resume=resume))
    assert reply.error.param == "messages"
    assert "--encoder-cache-memory is 4.9 KiB" in reply.error.message
    assert again.error == reply.error
