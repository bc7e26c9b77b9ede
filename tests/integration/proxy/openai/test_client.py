"""`triptych.Client` against a proxy over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import triptych
from support.fakes.fake_workers import MODEL, picture, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.base.errors import InvalidRequest, NotFound
from triptych.base.types import Usage
from triptych.protos import common_pb2

PNG = b"\x89PNG\r\n\x1a\n" + picture("p")


@pytest.fixture
async def client(cluster: FakeCluster) -> AsyncIterator[triptych.AsyncClient]:
    async with triptych.AsyncClient(f"http://127.0.0.1:{cluster.port}") as client:
        yield client


async def test_the_async_client_asks_with_files_streams_and_lists_models(client, cluster):
    assert await client.ask("what?", files=[PNG], max_tokens=3) == whole_text(3)
    assert cluster.encoders[0].media == [PNG]
    pieces = [chunk async for chunk in client.stream("what?", files=[PNG], max_tokens=5)]
    assert "".join(piece.text for piece in pieces) == whole_text(5)
    assert pieces[-1].finish_reason == "length"
    answer = await client.chat([{"role": "user", "content": "x"}], model=MODEL, max_tokens=2)
    assert (answer.finish_reason, answer.usage) == ("length", Usage(3, 2, 2))
    assert await client.models() == [MODEL]


async def test_errors_are_those_of_the_proxy(client: triptych.AsyncClient, cluster: FakeCluster) -> None:
    with pytest.raises(NotFound) as unknown:
        await client.ask("x", model="gpt-9")
    assert unknown.value.param == "model"
    with pytest.raises(InvalidRequest) as bad:
        async for _ in client.stream("x", temperature=7):
            pass
    assert bad.value.param == "temperature"


async def test_an_error_inside_a_stream_is_raised(client: triptych.AsyncClient, cluster: FakeCluster) -> None:
    cluster.pd_workers[0].fail_with = common_pb2.Error(code="invalid_request_error", message="no")
    with pytest.raises(InvalidRequest, match="^no$"):
        async for _ in client.stream("x"):
            pass


async def test_leaving_a_stream_cancels_the_request(client, cluster):
    cluster.pd_workers[0].pause_at = 2
    stream = client.stream("x", max_tokens=100)
    assert (await anext(stream)).finish_reason is None
    await stream.aclose()
    await until(lambda: cluster.pd_workers[0].cancels != [], "the cancellation")


async def test_a_full_cluster_is_asked_again(client: triptych.AsyncClient, cluster: FakeCluster) -> None:
    full = common_pb2.Error(code="overloaded", message="full", retry_after=0.01)
    cluster.pd_workers[0].refusals = [full]
    assert await client.ask("x", max_tokens=2) == whole_text(2)
    assert len(cluster.pd_workers[0].submits) == 2
