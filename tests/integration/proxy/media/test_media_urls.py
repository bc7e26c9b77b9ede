"""Requests that name their pictures by URL, through the whole proxy."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc import aio
from openai import APIStatusError, BadRequestError

from support.fakes.fake_workers import data_url, key_of, picture, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.processes.web import PNG, WebServer, redirect, reply
from support.waiting import until
from triptych.protos import common_pb2, encoder_pb2, proxy_pb2, proxy_pb2_grpc
from triptych.store.embedding_store import EmbeddingStore

FLAGS = {"allow_media_networks": "127.0.0.0/8"}
LARGE = PNG + bytes(range(256)) * 12_345


def ask_about(*urls: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]}]


async def hang(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


async def test_a_picture_by_url_reaches_the_encoder_as_it_was_served(store: EmbeddingStore) -> None:
    async with WebServer() as web, FakeCluster(store, media_flags=FLAGS) as cluster:
        web.give("/moved.png", redirect("/a.png"))
        for url, media in (
            (web.give("/a.png", reply()), PNG),
            (web.url("/moved.png"), PNG),
            (web.give("/large.png", reply(LARGE)), LARGE),
        ):
            result = await cluster.ask(ask_about(url), extra_body={"triptych_timings": True})
            assert result.choices[0].message.content == whole_text(8)
            assert cluster.encoders[0].media[-1] == media
            assert cluster.jobs[-1].mm_hash == key_of(media)
            assert result.model_extra["triptych_timings"]["fetch"] > 0
        assert len(cluster.jobs) == 2
        await cluster.at_rest()


async def test_all_choices_of_a_request_see_the_same_bytes_of_a_url(store: EmbeddingStore) -> None:
    async with WebServer() as web, FakeCluster(store, media_flags=FLAGS) as cluster:
        url = web.give("/a", reply(), reply(PNG + b"2"))
        result = await cluster.ask(ask_about(url), n=3)
        assert len(result.choices) == 3
        assert web.asked == ["/a"]
        await cluster.at_rest()


async def test_other_bytes_behind_the_same_url_never_get_the_old_embedding(store: EmbeddingStore) -> None:
    async with WebServer() as web, FakeCluster(store, media_flags=FLAGS) as cluster:
        url = web.give("/a", reply(), reply(PNG + b"changed"), reply())
        for _ in range(3):
            await cluster.ask(ask_about(url))
        slots = [submit.items[0].plan.mm_hash for submit in cluster.pd_workers[0].submits]
        assert slots == [key_of(PNG), key_of(PNG + b"changed"), key_of(PNG)]
        assert cluster.encoders[0].media == [PNG, PNG + b"changed"]


async def test_a_server_that_hangs_past_the_requests_deadline_is_a_504(store: EmbeddingStore) -> None:
    async with WebServer() as web, FakeCluster(store, media_flags=FLAGS, request_timeout=0.4) as cluster:
        with pytest.raises(APIStatusError) as caught:
            await cluster.ask(ask_about(web.give("/a", hang)))
        assert caught.value.status_code == 504
        assert "media" in str(caught.value)
        await cluster.at_rest()


async def test_a_second_try_of_a_job_does_not_fetch_again(store: EmbeddingStore) -> None:
    async with WebServer() as web, FakeCluster(store, media_flags=FLAGS) as cluster:
        error = common_pb2.Error(code="unavailable", message="try elsewhere")
        cluster.encoders[0].failures.append(encoder_pb2.JobFailed(error=error, retryable=True))
        cluster.encoders[0].ask_media_again = True
        await cluster.ask(ask_about(web.give("/a", reply(LARGE), reply(PNG))))
        assert web.asked == ["/a"]
        whole = b"".join(cluster.encoders[0].media)
        assert whole == LARGE * 3
        await cluster.at_rest()


async def test_a_job_outlives_the_request_that_brought_its_media(store: EmbeddingStore) -> None:
    async with WebServer() as web, FakeCluster(store, media_flags=FLAGS) as cluster:
        url = web.give("/a", reply(LARGE))
        encoder = cluster.encoders[0]
        encoder.gate.clear()
        first = asyncio.create_task(cluster.ask(ask_about(url)))
        await until(lambda: encoder.media)
        second = asyncio.create_task(cluster.ask(ask_about(url)))
        await until(lambda: any(len(job.waiters) == 2 for job in cluster.dispatcher.jobs.table.jobs()))
        first.cancel()
        await until(lambda: cluster.dispatcher.in_flight == 1)
        encoder.ask_media_again = True
        encoder.gate.set()
        assert (await second).choices[0].message.content == whole_text(8)
        assert b"".join(encoder.media) == LARGE * 2
        await cluster.at_rest()


async def test_one_bad_picture_of_many_ends_the_others(store: EmbeddingStore) -> None:
    async with WebServer() as web, FakeCluster(store, media_flags=FLAGS) as cluster:
        with pytest.raises(BadRequestError) as caught:
            await cluster.ask(
                ask_about(web.give("/a", hang), web.give("/b", reply(b"", 410)), data_url(LARGE[: 1 << 18]))
            )
        assert caught.value.param == "messages[0].content[1].image_url.url"
        await cluster.at_rest()


async def test_grpc_takes_urls_too(store: EmbeddingStore) -> None:
    async with WebServer() as web, FakeCluster(store, media_flags=FLAGS) as cluster:
        async with aio.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
            stub: Any = proxy_pb2_grpc.ProxyServiceStub(channel)

            def request(url: str) -> proxy_pb2.ChatRequest:
                parts = [proxy_pb2.ChatPart(image_url=url), proxy_pb2.ChatPart(text="?")]
                message = proxy_pb2.ChatMessage(role="user", parts=parts)
                return proxy_pb2.ChatRequest(
                    messages=[message], sampling=common_pb2.SamplingParams(max_tokens=4)
                )

            events = [event async for event in stub.Chat(request(web.give("/a", reply())))]
            assert "".join(event.text for event in events) == whole_text(4)
            assert [event async for event in stub.Chat(request(data_url(picture("p"))))]
            assert cluster.encoders[0].media == [PNG, picture("p")]
            with pytest.raises(aio.AioRpcError) as caught:
                [event async for event in stub.Chat(request(web.url("/missing")))]
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "messages[0].parts[0].image_url" in str(caught.value.details())
        await cluster.at_rest()
