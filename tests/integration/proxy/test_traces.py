"""Spans of requests over HTTP and gRPC, and the contexts that go on to the workers."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from openai import APIStatusError

from support.channels import connected_channel
from support.fakes.fake_workers import MODEL, key_of, picture, user
from support.fakes.proxy_fakes import FakeCluster
from support.tracing.spans import KeptSpan, KeptSpans, kept_tracer
from support.waiting import until
from triptych.base.tracing.context import hex_trace_id, metadata, parse_traceparent
from triptych.base.tracing.tracer import SpanKind
from triptych.protos import common_pb2, proxy_pb2, proxy_pb2_grpc
from triptych.proxy.auth.keys import KeyLimits, KeyRing
from triptych.store.embedding_store import EmbeddingStore

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-1] + "0"
TEXT = [{"role": "user", "content": "a secret question"}]


async def server_span(kept: KeptSpans) -> KeptSpan:
    """The only one, once it has ended: a client has its reply a moment before."""
    await until(lambda: any(span.kind is SpanKind.SERVER for span in kept.spans), "the server span")
    [span] = [span for span in kept.spans if span.kind is SpanKind.SERVER]
    return span


async def grpc_chat(cluster: FakeCluster, metadata: list[tuple[str, str]], **fields: Any) -> None:
    message = proxy_pb2.ChatMessage(role="user", parts=[proxy_pb2.ChatPart(text="a secret question")])
    sampling = common_pb2.SamplingParams(max_tokens=8)
    request = proxy_pb2.ChatRequest(**{"messages": [message], "sampling": sampling, **fields})
    async with connected_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        stub: Any = proxy_pb2_grpc.ProxyServiceStub(channel)
        async for _ in stub.Chat(request, timeout=20.0, metadata=metadata):
            pass


async def test_a_traced_request_goes_on_to_both_workers_in_the_callers_trace(store: EmbeddingStore) -> None:
    tracer, kept = kept_tracer()
    async with FakeCluster(store, tracer=tracer) as cluster:
        headers = {"traceparent": PARENT, "tracestate": "rojo=1,congo=2"}
        await cluster.ask(
            user("a secret question", picture("p")), extra_headers=headers, user="a secret user"
        )
        server = await server_span(kept)
        assert server.parent == parse_traceparent(PARENT, "rojo=1,congo=2")
        assert (server.name, hex_trace_id(server.context), server.error) == (f"chat {MODEL}", TRACE, "")
        assert server.attributes["gen_ai.response.time_to_first_chunk"] > 0.0
        assert server.attributes["gen_ai.usage.output_tokens"] == 8
        assert server.attributes["http.route"] == "/v1/chat/completions"
        stages = {span.name for span in kept.spans if span.parent == server.context}
        assert stages == {"fetch", "look up", "encode item", "PD attempt"}
        [encoder] = cluster.encoders
        assert encoder.metadata[0]["traceparent"] == metadata(kept.one("encode item").context)[0][1]
        assert encoder.metadata[0]["tracestate"] == "rojo=1,congo=2"
        [submit] = cluster.pd_workers[0].submits
        assert submit.traceparent == metadata(kept.one("PD attempt").context)[0][1]
        assert submit.tracestate == "rojo=1,congo=2"
        shown = repr(kept.spans)
        assert "secret" not in shown and key_of(picture("p")) not in shown


async def test_a_request_that_is_not_sampled_is_marked_so_for_the_workers(store: EmbeddingStore) -> None:
    tracer, kept = kept_tracer()
    async with FakeCluster(store, tracer=tracer) as cluster:
        await cluster.ask(user("?", picture("p")), extra_headers={"traceparent": UNSAMPLED})
        await cluster.at_rest()
        for sent in (
            str(cluster.encoders[0].metadata[0]["traceparent"]),
            cluster.pd_workers[0].submits[0].traceparent,
        ):
            context = parse_traceparent(sent)
            assert context is not None and hex_trace_id(context) == TRACE
            assert not context.trace_flags.sampled
    assert kept.spans == []


async def test_a_client_with_a_key_does_not_choose_what_is_recorded(store: EmbeddingStore) -> None:
    """The draw is 0.5."""
    for ratio, recorded in ((0.1, 0), (0.9, 1)):
        tracer, kept = kept_tracer(ratio, trusts_parent=False)
        async with FakeCluster(
            store, tracer=tracer, keys=KeyRing("sk-secret-0123456789", "", KeyLimits())
        ) as cluster:
            for flag in (PARENT, UNSAMPLED):
                headers = {"traceparent": flag, "authorization": "Bearer sk-secret-0123456789"}
                await cluster.ask(TEXT, extra_headers=headers)
            await cluster.at_rest()
            await until(lambda kept=kept, maximum=2 * recorded: len(kept.all(f"chat {MODEL}")) == maximum)
            assert "sk-secret-0123456789" not in repr(kept.spans)


async def test_requests_that_are_not_let_in_cost_no_span(store: EmbeddingStore) -> None:
    tracer, kept = kept_tracer()
    async with FakeCluster(
        store, tracer=tracer, keys=KeyRing("sk-secret-0123456789", "", KeyLimits())
    ) as cluster:
        with pytest.raises(APIStatusError, match="401"):
            await cluster.ask(TEXT, extra_headers={"traceparent": PARENT})
        with pytest.raises(grpc.aio.AioRpcError):
            await grpc_chat(cluster, [("traceparent", PARENT)])
    assert kept.spans == []


async def test_a_bad_request_has_a_span_with_its_status_and_code(store: EmbeddingStore) -> None:
    tracer, kept = kept_tracer()
    async with FakeCluster(store, tracer=tracer) as cluster:
        with pytest.raises(APIStatusError):
            await cluster.ask(TEXT, max_tokens=-1)
        server = await server_span(kept)
        assert server.attributes["http.response.status_code"] == 400
        assert server.attributes["error.type"] == "invalid_request_error"
        assert (server.name, server.error) == ("chat", "")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_a_stream_that_fails_has_a_span_with_its_error(store: EmbeddingStore, path: str) -> None:
    tracer, kept = kept_tracer()
    async with FakeCluster(store, tracer=tracer) as cluster:
        error = common_pb2.Error(code="internal_error", message="the worker is ill")
        cluster.pd_workers[0].fail_with = error
        body = {"model": MODEL, "messages": TEXT, "input": "x", "max_tokens": 9, "stream": True}
        body.pop("messages" if path.endswith("responses") else "input")
        if path.endswith("responses"):
            body["max_output_tokens"] = body.pop("max_tokens")
        reply = await cluster.client._client.post(f"http://127.0.0.1:{cluster.port}{path}", json=body)
        assert reply.status_code == 200 and "the worker is ill" in reply.text
        server = await server_span(kept)
        assert (server.attributes["error.type"], server.error) == ("internal_error", "internal_error")


async def test_a_grpc_call_is_traced_like_a_post(store: EmbeddingStore) -> None:
    tracer, kept = kept_tracer()
    async with FakeCluster(store, tracer=tracer) as cluster:
        await grpc_chat(cluster, [("traceparent", PARENT), ("tracestate", "rojo=1")])
        server = await server_span(kept)
        assert server.parent == parse_traceparent(PARENT, "rojo=1")
        assert server.attributes["rpc.service"] == "triptych.v1.ProxyService"
        assert (server.attributes["rpc.method"], server.attributes["rpc.grpc.status_code"]) == ("Chat", 0)
        assert server.attributes["gen_ai.usage.output_tokens"] == 8
        assert kept.one("PD attempt").parent == server.context
        assert "secret" not in repr(kept.spans)
