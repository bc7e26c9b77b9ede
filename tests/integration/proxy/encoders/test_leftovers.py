"""Requests that fail leave nothing that only the cycle collector would find: their bodies are large."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator

import pytest

from support.fakes.fake_workers import data_url, picture
from support.fakes.proxy_fakes import FakeCluster, raw_post
from support.waiting import until
from triptych.protos import common_pb2, encoder_pb2
from triptych.proxy.call.chat import ChatCall
from triptych.store.embedding_store import EmbeddingStore


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def calls() -> int:
    return sum(isinstance(thing, ChatCall) for thing in gc.get_objects())


def body(model: str = "demo") -> bytes:
    parts = [{"type": "image_url", "image_url": {"url": data_url(picture("a", 1000))}}]
    return json.dumps({"model": model, "messages": [{"role": "user", "content": parts}]}).encode()


async def test_a_refused_request_is_forgotten_at_once(store: EmbeddingStore, no_collector: None) -> None:
    async with FakeCluster(store) as cluster:
        before = calls()
        assert (await raw_post(cluster.port, body(model="other")))[0] == 404
        await until(lambda: calls() == before)


async def test_a_request_whose_picture_fails_is_forgotten_at_once(
    store: EmbeddingStore, no_collector: None
) -> None:
    async with FakeCluster(store) as cluster:
        error = common_pb2.Error(code="invalid_request_error", message="no picture")
        failure = encoder_pb2.JobFailed(error=error, retryable=False)
        cluster.encoders[0].failures = [failure]
        before = calls()
        assert (await raw_post(cluster.port, body()))[0] == 400
        await until(lambda: calls() == before)


async def test_an_answered_request_is_forgotten_at_once(store: EmbeddingStore, no_collector: None) -> None:
    async with FakeCluster(store) as cluster:
        before = calls()
        assert (await raw_post(cluster.port, body()))[0] == 200
        await until(lambda: calls() == before)


async def test_a_request_whose_time_is_over_is_forgotten_at_once(
    store: EmbeddingStore, no_collector: None
) -> None:
    async with FakeCluster(store, request_timeout=0.3) as cluster:
        cluster.encoders[0].gate.clear()
        before = calls()
        assert (await raw_post(cluster.port, body()))[0] == 504
        await until(lambda: calls() == before)
