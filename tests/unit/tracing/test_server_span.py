from __future__ import annotations

from support.tracing.spans import TickingClock, kept_tracer, new_context
from triptych.base.tracing import attributes as names
from triptych.base.tracing.server_span import ServerSpan
from triptych.base.tracing.tracer import SpanKind
from triptych.base.types import SamplingParams

PARENT = new_context(sampled=True, state="a=1")


def test_a_finished_request_says_what_the_conventions_ask() -> None:
    clock = TickingClock()
    tracer, kept = kept_tracer(clock=clock)
    span = ServerSpan(tracer, PARENT, "chat", {names.HTTP_METHOD: "POST"})
    span.serves("demo", names.sampling(SamplingParams(max_tokens=8, temperature=0.5, top_k=0), 2))
    span.first_token(100.5)
    span.first_token(102.0)
    span.count(20, 16, 5)
    span.count(10, 0, 2)
    span.finished("stop")
    span.finished("length")
    span.http_status(200)
    clock.now = 103.0
    span.end()
    [record] = kept.spans
    assert (record.name, record.kind, record.parent) == ("chat demo", SpanKind.SERVER, PARENT)
    assert (record.start, record.end, record.error) == (100.0, 103.0, "")
    assert record.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "triptych",
        "gen_ai.request.model": "demo",
        "gen_ai.response.model": "demo",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.time_to_first_chunk": 0.5,
        "gen_ai.usage.input_tokens": 30,
        "gen_ai.usage.cache_read.input_tokens": 16,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.response.finish_reasons": ("stop", "length"),
        "http.request.method": "POST",
        "http.response.status_code": 200,
    }


def test_a_reply_that_breaks_off_after_its_200_is_an_error() -> None:
    tracer, kept = kept_tracer()
    span = ServerSpan(tracer, None, "chat", {})
    span.http_status(200)
    span.broken("client_closed")
    span.end()
    assert kept.one("chat").error == "client_closed"


def test_an_unsampled_request_has_a_context_and_no_span() -> None:
    tracer, kept = kept_tracer(0.1)
    span = ServerSpan(tracer, None, "chat", {})
    span.count(1, 0, 1)
    span.end()
    assert not span.recording
    assert not span.context.trace_flags.sampled
    assert kept.spans == []
