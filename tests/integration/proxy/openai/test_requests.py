from __future__ import annotations

import asyncio
import json

import pytest
from openai import APIStatusError

from support.fakes.fake_workers import key_of, picture, user, whole_text
from support.fakes.proxy_fakes import FakeCluster, raw_post
from support.waiting import until
from triptych.base.rpc.channels import make_channel
from triptych.protos import common_pb2, encoder_pb2, pd_pb2, proxy_pb2, proxy_pb2_grpc
from triptych.store.embedding_store import EmbeddingStore


async def test_three_images_make_three_encoder_jobs_and_the_pd_worker_sees_no_pixel(store):
    pictures = [picture(name, 300_000) for name in ("one", "two", "three")]
    async with FakeCluster(store, max_body=8 << 20) as cluster:
        reply = await cluster.ask(user("what?", *pictures))
        assert reply.choices[0].message.content == whole_text(8)
        assert sorted(job.mm_hash for job in cluster.jobs) == sorted(map(key_of, pictures))
        assert sorted(cluster.encoders[0].media) == sorted(pictures)
        submit = cluster.pd_workers[0].submits[0]
        assert submit.ByteSize() < 4096
        assert [slot.plan.mm_hash for slot in submit.items] == [key_of(media) for media in pictures]
        await cluster.at_rest()


async def test_equal_images_of_one_request_and_of_two_are_encoded_once(cluster: FakeCluster) -> None:
    cluster.encoders[0].gate.clear()
    same = picture("same")
    asked = [asyncio.create_task(cluster.ask(user(f"q{i}", same, same))) for i in range(2)]
    table = cluster.dispatcher.jobs.table
    await until(lambda: cluster.jobs and [len(job.waiters) for job in table.jobs()] == [2], "one job of both")
    cluster.encoders[0].gate.set()
    for task in asked:
        assert (await task).choices[0].message.content == whole_text(8)
    assert len(cluster.jobs) == 1


async def test_a_stored_image_costs_no_encoder_job(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster:
        await cluster.ask(user("first", picture("p")))
        reply = await cluster.ask(user("second", picture("p")), extra_body={"triptych_timings": True})
        assert len(cluster.jobs) == 1
        assert reply.model_extra["triptych_timings"]["items"] == [
            {"mm_hash": key_of(picture("p"))[:12], "cache": "store"}
        ]


async def test_another_salt_shares_no_embedding(cluster: FakeCluster) -> None:
    await cluster.ask(user("?", picture("p")), extra_body={"cache_salt": "a"})
    await cluster.ask(user("?", picture("p")), extra_body={"cache_salt": "b"})
    assert [job.salt for job in cluster.jobs] == ["a", "b"]
    assert [submit.salt for submit in cluster.pd_workers[0].submits] == ["a", "b"]


async def test_usage_token_ids_and_timings_come_with_the_stream(cluster: FakeCluster) -> None:
    chunks = await cluster.client.chat.completions.create(
        model="demo",
        messages=user("?", picture("p")),
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True, "triptych_timings": True},
    )
    seen = [chunk async for chunk in chunks]
    assert seen[0].model_extra["prompt_token_ids"] == [1, 2, 3]
    ids = [i for c in seen for choice in c.choices for i in choice.model_extra["token_ids"]]
    assert ids == [1000, 1001, 1002, 1003]
    assert seen[-2].choices[0].finish_reason == "length"
    assert seen[-1].usage.prompt_tokens_details.cached_tokens == 2
    assert (seen[-1].usage.prompt_tokens, seen[-1].usage.completion_tokens) == (3, 4)
    timings = seen[-2].model_extra["triptych_timings"]
    assert timings["items"][0]["cache"] == "encoded"
    assert (timings["encode"], timings["save"], timings["decode"]) == (0.5, 0.25, 1.0)


async def test_an_image_that_no_encoder_can_read_is_a_400_that_names_its_field(cluster: FakeCluster):
    failed = common_pb2.Error(code="invalid_request_error", message="no image in these bytes")
    cluster.encoders[0].failures.append(encoder_pb2.JobFailed(error=failed, retryable=False))
    with pytest.raises(APIStatusError) as caught:
        await cluster.ask(user("?", picture("bad")))
    assert caught.value.status_code == 400
    assert caught.value.body["param"] == "messages[0].content[0].image_url.url"


async def test_an_error_after_the_first_byte_is_an_event_in_the_stream(cluster: FakeCluster) -> None:
    pd = cluster.pd_workers[0]
    pd.pause_at = 2
    chunks = await cluster.client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "x"}], stream=True
    )
    text = [await anext(chunks) for _ in range(2)]
    assert text
    held = next(iter(pd.requests.values()))
    error = common_pb2.Error(code="internal_error", message="it broke")
    pd.emit(held, finished=pd_pb2.Finished(reason="error", error=error))
    with pytest.raises(Exception, match="it broke"):
        _ = [chunk async for chunk in chunks]


async def test_a_client_that_leaves_cancels_its_encoder_job(cluster: FakeCluster) -> None:
    cluster.encoders[0].gate.clear()
    asked = asyncio.create_task(cluster.ask(user("?", picture("p"))))
    await until(lambda: len(cluster.jobs) == 1)
    asked.cancel()
    await until(lambda: cluster.encoders[0].open == 0)


async def test_grpc_gives_the_same_answer(cluster: FakeCluster) -> None:
    channel = make_channel(f"127.0.0.1:{cluster.grpc_port}")
    await channel.channel_ready()
    stub = proxy_pb2_grpc.ProxyServiceStub(channel)
    parts = [proxy_pb2.ChatPart(image=picture("p")), proxy_pb2.ChatPart(text="what?")]
    request = proxy_pb2.ChatRequest(
        messages=[proxy_pb2.ChatMessage(role="user", parts=parts)],
        sampling=common_pb2.SamplingParams(max_tokens=5),
        return_token_ids=True,
    )
    events = [event async for event in stub.Chat(request)]
    assert "".join(event.text for event in events) == whole_text(5)
    assert list(events[0].prompt_token_ids) == [1, 2, 3]
    assert [i for event in events for i in event.token_ids] == [1000, 1001, 1002, 1003, 1004]
    assert events[-1].finish.completion_tokens == 5
    assert cluster.jobs[0].mm_hash == key_of(picture("p"))
    models = await stub.ListModels(proxy_pb2.ListModelsRequest())
    assert list(models.models) == ["demo"]
    await channel.close()


async def test_a_sane_request_id_goes_all_the_way_and_another_is_replaced(cluster: FakeCluster) -> None:
    body = json.dumps({"model": "demo", "messages": user("x"), "max_tokens": 2}).encode()
    _, headers, _ = await raw_post(cluster.port, body, {"X-Request-Id": "my-id.7"})
    assert headers["x-request-id"] == "my-id.7"
    _, headers, _ = await raw_post(cluster.port, body, {"X-Request-Id": "bad id; rm"})
    submits = cluster.pd_workers[0].submits
    assert [submit.label for submit in submits] == ["my-id.7", headers["x-request-id"]]
    assert not {submit.request_id for submit in submits} & {submit.label for submit in submits}
    assert headers["x-request-id"] != "bad id; rm"


async def test_unknown_paths_and_methods_are_answered_in_openais_shape(cluster: FakeCluster) -> None:
    client = cluster.client._client
    missing = await client.get(f"http://127.0.0.1:{cluster.port}/v1/nothing")
    wrong = await client.get(f"http://127.0.0.1:{cluster.port}/v1/chat/completions")
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert missing.json()["error"]["message"] == (
        "GET /v1/nothing is not served here: /openapi.json lists what is"
    )
    assert (missing.json()["error"]["code"], wrong.json()["error"]["code"]) == (
        "not_found",
        "method_not_allowed",
    )
    assert wrong.json()["error"]["message"].endswith("is not served here: use POST")
    for path in ("/chat/completions", "/v1/chat/completion", "/api/v1/chat/completions/"):
        near = await client.post(f"http://127.0.0.1:{cluster.port}{path}")
        assert near.json()["error"]["message"].endswith("; did you mean /v1/chat/completions?")
    for method, path in (("POST", "/v1/chat/completions/"), ("GET", "/v1/models/"), ("GET", "/docs/")):
        slash = await client.request(method, f"http://127.0.0.1:{cluster.port}{path}")
        assert slash.status_code == 404, "no redirect"
        assert slash.json()["error"]["message"].endswith(f"; did you mean {path.rstrip('/')}?")


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_what_is_no_http_is_refused_in_json(cluster: FakeCluster, before: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.port)
    if before:
        writer.write(before)
        await reader.readuntil(b"}")
    writer.write(b"FOO /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    assert head.startswith(b"HTTP/1.1 400") and b"application/json" in head
    assert "HTTP/1.1" in json.loads(body)["error"]["message"]
