"""PD workers of one model with different --max-model-len: a request goes where it fits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI

from support.fakes.fake_workers import MODEL, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.store.embedding_store import EmbeddingStore

SMALL, LARGE = 32, 96


def text(characters: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "x" * characters}]


@asynccontextmanager
async def mixed(store: EmbeddingStore, *limits: int) -> AsyncIterator[FakeCluster]:
    cluster = FakeCluster(store, pd_workers=len(limits))
    for worker, limit in zip(cluster.pd_workers, limits, strict=True):
        worker.max_model_len = limit
    async with cluster:
        yield cluster


async def complete(client: AsyncOpenAI, prompt: Any, max_tokens: int) -> str:
    done = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=max_tokens)
    return done.choices[0].text


def submits(cluster: FakeCluster) -> list[int]:
    return [len(worker.submits) for worker in cluster.pd_workers]


async def test_token_ids_go_at_once_to_a_worker_that_takes_them(store: EmbeddingStore) -> None:
    async with mixed(store, SMALL, LARGE, SMALL) as cluster:
        prompts = [[number] * 40 for number in range(6)]
        answers = await asyncio.gather(*(complete(cluster.client, prompt, 8) for prompt in prompts))
        assert answers == [whole_text(8)] * 6
        assert submits(cluster) == [0, 6, 0]


async def test_text_that_one_worker_finds_too_long_goes_to_a_larger_one(store: EmbeddingStore) -> None:
    async with mixed(store, SMALL, LARGE, 2 * LARGE) as cluster:
        answers = await asyncio.gather(*(cluster.stream(text(LARGE + number)) for number in range(8)))
        assert answers == [whole_text(8)] * 8
        assert submits(cluster)[2] == 8


async def test_a_request_too_long_for_all_is_a_400_with_the_largest_limit(store):
    async with mixed(store, SMALL, LARGE) as cluster:
        for ask in (cluster.stream(text(2 * LARGE)), complete(cluster.client, [1] * LARGE, 8)):
            with pytest.raises(APIStatusError) as caught:
                await ask
            assert (caught.value.status_code, caught.value.code) == (400, "context_length_exceeded")
            assert f"the model takes {LARGE}" in caught.value.message
        await cluster.at_rest()


async def test_a_models_entry_has_its_longest_context(store: EmbeddingStore) -> None:
    async with mixed(store, SMALL, LARGE) as cluster:
        [model] = (await cluster.client.models.list()).data
        assert (model.root, model.parent, model.max_model_len) == (model.id, None, LARGE)


async def test_a_request_waits_for_a_larger_worker_that_is_known_but_not_here(store: EmbeddingStore) -> None:
    async with mixed(store, SMALL, LARGE) as cluster:
        larger = cluster.pd_workers[1]
        await larger.kill()
        await until(lambda: len(cluster.pool.serving("pd")) == 1, "the loss")
        asked = asyncio.create_task(complete(cluster.client, [1] * 40, 8))
        await until(lambda: cluster.dispatcher.in_flight == 1, "the request")
        await larger.start()
        assert await asked == whole_text(8)
        assert submits(cluster)[0] == 0


async def test_a_request_that_waits_fails_once_no_worker_is_left_that_takes_it(store: EmbeddingStore) -> None:
    async with mixed(store, SMALL, LARGE) as cluster:
        larger = cluster.pd_workers[1]
        await larger.kill()
        asked = asyncio.create_task(complete(cluster.client, [1] * 40, 8))
        await until(lambda: cluster.dispatcher.in_flight == 1, "the request")
        await cluster.registry.withdraw(larger.info)
        with pytest.raises(APIStatusError) as caught:
            await asked
        assert caught.value.code == "context_length_exceeded"
        assert f"the model takes {SMALL}" in caught.value.message


async def test_a_stream_is_resumed_where_all_of_it_fits(store: EmbeddingStore) -> None:
    async with mixed(store, LARGE, SMALL, LARGE) as cluster:
        first, small, third = cluster.pd_workers
        for worker in cluster.pd_workers:
            worker.pause_at = 30
        asked = asyncio.create_task(cluster.stream(text(4), max_tokens=40))
        await until(lambda: cluster.received == 30, "thirty tokens")
        holder = first if first.submits else third
        other = third if holder is first else first
        other.pause_at = None
        await holder.kill()
        assert await asked == whole_text(40)
        assert not small.submits
