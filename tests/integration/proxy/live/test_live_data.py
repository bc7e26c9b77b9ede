"""Live data of a real proxy before scripted workers: snapshot, stream, and the records of requests."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.fakes.fake_encoder import ROWS
from support.fakes.fake_workers import picture, user
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.base.engine_beat import BusyClock
from triptych.base.errors import RequestError
from triptych.base.machine.worker_load import read_load
from triptych.proxy.auth.keys import KeyLimits, KeyRing
from triptych.proxy.quotas.call_context import NOBODY
from triptych.store.embedding_store import EmbeddingStore

ALICE, BOB, OPERATOR = "alices-key-0123456789", "bobs-key-0123456789ab", "operators-key-0123456789"


class Watched:
    """A cluster whose live data are asked for over HTTP."""

    def __init__(self, cluster: FakeCluster, web: aiohttp.ClientSession) -> None:
        self.cluster = cluster
        self.web = web

    async def get(self, path: str, key: str = "") -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self.web.get(path, headers=headers) as reply:
            return reply.status, await reply.json()

    async def snapshot(self) -> Any:
        """Not the one of up to a second before."""
        assert self.cluster.live is not None and self.cluster.live._feed is not None
        self.cluster.live._feed._snapshot = None
        status, body = await self.get("/cluster")
        assert status == 200
        return body

    async def shows(self, name: str, key: str = "") -> Any:
        """The record of a request, which adds up."""
        status, record = await self.get(f"/cluster/requests/{name}", key)
        assert status == 200, record
        tiles = [span for span in record["spans"] if span["item"] is None]
        assert tiles[0]["start"] == 0
        assert all(before["end"] == after["start"] for before, after in itertools.pairwise(tiles))
        if record["seconds"] is not None:
            assert tiles[-1]["end"] == record["seconds"]
        assert all(0 <= span["start"] <= span["end"] <= tiles[-1]["end"] for span in record["spans"])
        return record

    async def ask(self, name: str, *pictures: str, **extra: Any) -> Any:
        message = user("?", *(picture(each) for each in pictures))
        return await self.cluster.ask(message, extra_headers={"X-Request-ID": name}, **extra)

    def stream(self) -> Any:
        return self.web.get("/cluster/events")


@asynccontextmanager
async def watched(store: EmbeddingStore, **options: Any) -> AsyncIterator[Watched]:
    async with (
        FakeCluster(store, live=True, **options) as cluster,
        aiohttp.ClientSession(f"http://127.0.0.1:{cluster.port}") as web,
    ):
        yield Watched(cluster, web)


@pytest.fixture
async def live(store: EmbeddingStore) -> AsyncIterator[Watched]:
    async with watched(store) as live:
        yield live


def spans(record: Any, item: int | None, name: str) -> list[Any]:
    return [span for span in record["spans"] if (span["item"], span["name"]) == (item, name)]


def keys_of(*keys: str, file: str = "") -> KeyRing:
    return KeyRing(",".join(keys), file, KeyLimits())


@pytest.fixture
def keys(tmp_path: Path) -> KeyRing:
    """The keys of two tenants, and of an operator."""
    file = tmp_path / "keys"
    file.write_text(f"ops sha256:{hashlib.sha256(OPERATOR.encode()).hexdigest()} operator\n")
    return keys_of(ALICE, BOB, file=str(file))


@asynccontextmanager
async def two_tokens_of_alice(live: Watched) -> AsyncIterator[None]:
    """Alice's request `alices-own` stays in flight after its second token."""
    live.cluster.pd_workers[0].pause_at = 2
    client = live.cluster.client.with_options(api_key=ALICE)
    headers = {"X-Request-ID": "alices-own"}
    create = client.chat.completions.create
    asked = asyncio.create_task(
        create(model="demo", messages=user("my secret"), max_tokens=8, extra_headers=headers)  # type: ignore[arg-type]
    )
    await until(lambda: live.cluster.received == 2, "two tokens")
    yield
    live.cluster.pd_workers[0].gate.set()
    await asked


async def events(reply: aiohttp.ClientResponse, count: int) -> list[tuple[str, Any]]:
    """The next events of a stream."""
    found = []
    for _ in range(count):
        name, data, end = [await asyncio.wait_for(reply.content.readline(), 20.0) for _ in range(3)]
        assert end == b"\n"
        found.append(
            (name.decode().removeprefix("event: ").strip(), json.loads(data.removeprefix(b"data: ")))
        )
    return found


async def test_the_record_of_a_request_says_which_worker_has_done_what(live: Watched) -> None:
    await live.ask("mine", "a", "b")
    record = await live.shows("mine")
    encoder, pd_worker = live.cluster.encoders[0].address, live.cluster.pd_workers[0].address
    assert (record["id"], record["status"], record["items"], record["attempts"]) == ("mine", 200, 2, 1)
    assert record["completion_tokens"] == 8 and record["prompt_tokens"] > 0
    for item in (0, 1):
        assert {span["where"] for span in spans(record, item, "encode")} <= {encoder}
        assert [span["where"] for span in spans(record, item, "load")] == [pd_worker]
    assert {span["where"] for span in spans(record, None, "decode")} == {pd_worker}
    assert "model" in record and record["started"] > 0


async def test_records_and_rows_say_how_many_tokens_of_the_prompt_media_take(live: Watched) -> None:
    await live.ask("mine", "a", "b")
    await live.ask("text")
    assert (await live.shows("mine"))["media_tokens"] == 2 * ROWS
    assert (await live.shows("text"))["media_tokens"] == 0
    _, ended = await live.get("/cluster/requests")
    assert [row["media_tokens"] for row in ended["requests"]] == [0, 2 * ROWS]


async def test_the_time_that_hits_have_saved_is_that_of_as_many_towers(live: Watched) -> None:
    assert (await live.snapshot())["rates"]["saved_seconds"] is None
    await live.ask("first", "a")
    for name in ("second", "third"):
        await live.ask(name, "a")

    assert live.cluster.live is not None and live.cluster.live._feed is not None
    live.cluster.live._feed.poll()
    rates, each = (await live.snapshot())["rates"], live.cluster.live.calls.tallies.mean_seconds()
    assert each is not None
    assert (rates["hits"], rates["saved_seconds"]) == (2, round(2 * each, 3))


async def test_requests_in_flight_are_shown_with_their_stage(live: Watched) -> None:
    encoder, worker = live.cluster.encoders[0], live.cluster.pd_workers[0]
    worker.pause_at = 2
    encoder.gate.clear()
    asked = asyncio.create_task(live.ask("mine", "a"))
    await until(lambda: encoder.jobs, "the encoder job")
    seen = await live.snapshot()
    (row,) = seen["requests"]
    assert (row["stage"], row["items"], row["items_ready"], row["attempt"]) == ("encode", 1, 0, 0)
    assert (seen["proxy"]["in_flight"], seen["proxy"]["queued"]) == (1, 1)
    assert seen["encoders"][0]["jobs"] == 1
    encoder.gate.set()
    await until(lambda: live.cluster.received == 2, "two tokens")
    seen = await live.snapshot()
    (row,) = seen["requests"]
    assert (row["stage"], row["items_ready"], row["tokens"]) == ("decode", 1, 2)
    assert row["pd_worker"] == worker.address
    assert (seen["proxy"]["queued"], seen["pd_workers"][0]["requests"]) == (0, 1)
    record = await live.shows("mine")
    assert (record["seconds"], record["status"]) == (None, None)
    assert (await live.shows(row["id"]))["id"] == "mine"
    worker.gate.set()
    await asked
    seen = await live.snapshot()
    assert seen["requests"] == [] and seen["encoders"][0]["done"] == 1


async def test_the_stream_begins_with_the_history_and_goes_on_every_second(live: Watched) -> None:
    async with live.stream() as reply, live.stream() as other:
        assert reply.status == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        found = await events(reply, 4)
        assert [name for name, _ in found] == ["history", "snapshot", "snapshot", "snapshot"]
        assert len(found[0][1]["series"]["in_flight"]) == 720
        assert found[3][1]["time"] > found[1][1]["time"]
        # The other one has read nothing meanwhile, and misses none of what it is sent.
        assert [name for name, _ in await events(other, 3)] == ["history", "snapshot", "snapshot"]
        seen = found[-1][1]
        assert seen["models"] == [live.cluster.pd_workers[0].info.model]
        assert (seen["encoders"][0]["state"], seen["pd_workers"][0]["state"]) == ("serving", "serving")
        assert seen["store"]["up"] is True


async def sees_of_alices(live: Watched, key: str, rows: int) -> None:
    """The key is shown so many of the requests in flight, of which there is one."""
    status, seen = await live.get("/cluster", key)
    assert (status, len(seen["requests"])) == (200, rows)
    async with live.web.get("/cluster/events", headers={"Authorization": f"Bearer {key}"}) as reply:
        for name, shown in (await events(reply, 3))[1:]:
            assert (name, len(shown["requests"])) == ("snapshot", rows)
            # Those of others are counted.
            assert shown["proxy"]["in_flight"] == shown["pd_workers"][0]["requests"] == 1


async def test_a_key_sees_its_own_requests_and_an_operators_those_of_all(store, keys):
    seen_by = {ALICE: 1, BOB: 0, OPERATOR: 1}
    async with watched(store, keys=keys) as live:
        async with two_tokens_of_alice(live):
            await asyncio.gather(*(sees_of_alices(live, key, rows) for key, rows in seen_by.items()))
        for key, rows in seen_by.items():
            status, reply = await live.get("/cluster/requests", key)
            assert (status, len(reply["requests"])) == (200, rows)
            for row in reply["requests"]:
                assert (await live.shows(row["id"], key))["id"] == "alices-own"


async def test_a_key_that_is_withdrawn_ends_its_listener(store, keys, tmp_path):
    async with watched(store, keys=keys) as live:
        headers = {"Authorization": f"Bearer {OPERATOR}"}
        async with live.web.get("/cluster/events", headers=headers) as reply:
            assert len(await events(reply, 2)) == 2
            keys._looked -= 100.0  # the file is looked at from time to time
            (tmp_path / "keys").write_text(f"other sha256:{'0' * 64}\n")
            assert await asyncio.wait_for(reply.content.read(), 30) is not None
            assert reply.content.at_eof()


async def test_requests_that_have_ended_are_listed_newest_slowest_or_failed_first(live: Watched):
    await live.ask("first", "a")
    await live.ask("second")
    with pytest.raises(RequestError):
        await anext(aiter(live.cluster.dispatcher.chat(failing_call(0), NOBODY)))

    async def labels(query: str) -> list[str]:
        status, reply = await live.get(f"/cluster/requests{query}")
        assert status == 200 and reply["models"] == ["demo"]
        return [(await live.shows(row["id"]))["id"] for row in reply["requests"]]

    assert await labels("") == ["label-0", "second", "first"]
    assert await labels("?failed=true") == ["label-0"]
    assert await labels("?model=demo&limit=2") == ["label-0", "second"]
    assert await labels("?model=other") == []
    _, reply = await live.get("/cluster/requests?order=slowest")
    seconds = [row["seconds"] for row in reply["requests"]]
    assert seconds == sorted(seconds, reverse=True)
    (row,) = (row for row in reply["requests"] if row["items"])
    assert (row["status"], row["tokens"], row["pd_worker"]) == (
        200,
        8,
        live.cluster.pd_workers[0].address,
    )
    assert 0 < row["ttft"] <= row["seconds"]


async def test_a_wrong_query_is_refused_by_the_name_of_its_field(live: Watched) -> None:
    wrong = {"order=oldest": ".order", "failed=x": ".failed", "limit=0": ".limit", "q=1": ""}
    for query, field in wrong.items():
        status, reply = await live.get(f"/cluster/requests?{query}")
        assert (status, reply["error"]["param"]) == (400, f"query{field}")


async def test_a_worker_is_shown_by_its_own_name_with_what_it_reports(live: Watched) -> None:
    encoder, busy = live.cluster.encoders[0], BusyClock()
    busy.mark(True)
    await encoder.kill()
    encoder.load = partial(read_load, busy)
    os.environ["TRIPTYCH_SERVICE"] = "encoder-7"
    try:
        await encoder.start()
        await until(lambda: live.cluster.pool.workers["encoder", encoder.address].load, "its report")
    finally:
        del os.environ["TRIPTYCH_SERVICE"]
    assert live.cluster.live is not None and live.cluster.live._feed is not None
    live.cluster.live._feed.poll()
    seen = await live.snapshot()
    (row,), (other,) = seen["encoders"], seen["pd_workers"]
    assert (row["name"], row["address"]) == ("encoder-7", encoder.address)
    assert row["busy"] > 0.9 and row["memory_bytes"] > 1 << 20 and row["gpu"] is None
    # One of an earlier release reports nothing.
    assert (other["name"], other["busy"], other["memory_bytes"]) == (other["address"], None, None)
    await live.ask("mine", "a")
    assert {span["where"] for span in spans(await live.shows("mine"), 0, "encode")} <= {"encoder-7"}


async def test_without_the_page_there_are_no_live_data(cluster: FakeCluster) -> None:
    async with aiohttp.ClientSession(f"http://127.0.0.1:{cluster.port}") as web:
        for path in ("/cluster", "/cluster/events", "/cluster/requests/mine"):
            async with web.get(path) as reply:
                assert reply.status == 404
    await cluster.ask(user("?"))
    assert cluster.dispatcher.recorder._subscribers == ()


async def test_records_of_many_requests_are_bounded(live: Watched) -> None:
    calls = live.cluster.live.calls
    for index in range(400):
        with pytest.raises(RequestError):
            await anext(aiter(live.cluster.dispatcher.chat(failing_call(index), NOBODY)))
    # The newest, and of older ones those that failed.
    assert len(list(calls._ended.all())) == 384 and not calls._open
    assert len(calls._names) == 384 and not calls._rows  # nobody has seen a row
    gone = next(f"label-{index}" for index in range(400) if calls.find("", f"label-{index}") is None)
    assert (await live.get(f"/cluster/requests/{gone}"))[0] == 404
    assert (await live.shows("label-399"))["status"] == 400


def failing_call(index: int) -> Any:
    """A call that fails before it reaches a worker: its picture is no picture's URL."""
    from triptych.base.types import SamplingParams
    from triptych.proxy.call.chat import ChatCall, ChatMessage
    from triptych.proxy.media.source import ImagePart

    image = ImagePart("http://127.0.0.1:9/none.png", "messages[0]")
    return ChatCall(
        label=f"label-{index}",
        model="demo",
        messages=(ChatMessage("user", (image,)),),
        sampling=SamplingParams(max_tokens=1),
        timeout=10.0,
    )
