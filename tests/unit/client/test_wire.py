from __future__ import annotations

import json

import pytest

import triptych
from triptych.apps.client.answers import answer_of
from triptych.apps.client.wire import EventLines, error_of, pause
from triptych.base.errors import (
    ContextTooLong,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    RateLimited,
    TooLarge,
    Unauthorized,
    Unavailable,
)
from triptych.base.types import Usage


def _body(code: str | None, message: str = "no", param: str | None = None) -> bytes:
    return json.dumps({"error": {"message": message, "code": code, "param": param, "type": "x"}}).encode()


def test_the_package_offers_both_clients_and_nothing_unknown():
    assert triptych.Client.__name__ == "Client"
    assert triptych.AsyncClient.__name__ == "AsyncClient"
    with pytest.raises(AttributeError, match="has no attribute 'Klient'"):
        triptych.Klient  # noqa: B018


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_request_error", InvalidRequest),
        (400, "context_length_exceeded", ContextTooLong),
        (404, "not_found", NotFound),
        (413, "request_too_large", TooLarge),
        (429, "rate_limit_exceeded", RateLimited),
        (503, "unavailable", Unavailable),
        (401, "invalid_api_key", Unauthorized),
        (401, "a_gateways_own_code", Unauthorized),
        (429, None, Overloaded),
        (500, "internal_error", InternalError),
        (418, "teapot", InternalError),
    ],
)
def test_an_error_reply_becomes_our_error(status, code, kind):
    error = error_of(status, _body(code, "what", "model"), "3")
    assert type(error) is kind
    assert (error.message, error.param, error.retry_after) == ("what", "model", 3.0)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": "text"}', b'{"detail": 1}'])
def test_a_reply_of_another_server_keeps_its_status_and_message(body):
    error = error_of(503, body, "Fri, 31 Dec 1999 23:59:59 GMT")
    assert type(error) is Unavailable
    assert "503" in error.message
    assert error.retry_after is None


def test_only_what_may_pass_is_tried_again():
    assert pause(Overloaded("x", retry_after=2.0), 1, 2) == 2.0
    assert pause(Unavailable("x"), 1, 2) == 0.25
    assert pause(Unavailable("x"), 2, 2) == 0.5
    assert pause(Unavailable("x"), 3, 2) is None
    assert pause(Unavailable("x", retry_after=3600.0), 1, 2) == 10.0
    assert pause(InvalidRequest("x"), 1, 2) is None
    assert pause(InternalError("x"), 1, 2) is None


def test_events_are_read_until_done():
    lines = EventLines()
    assert lines.parse('data: {"choices": []}') == {"choices": []}
    assert lines.parse("") is None
    assert lines.parse(": comment") is None
    assert lines.parse("data: [DONE]") is None
    lines.check_end()


def test_a_stream_without_its_end_is_an_error():
    lines = EventLines()
    lines.parse('data: {"choices": []}')
    with pytest.raises(Unavailable, match="broke off"):
        lines.check_end()


@pytest.mark.parametrize("data", ["data: {", "data: []"])
def test_an_event_that_is_none_is_an_error(data):
    with pytest.raises(InternalError):
        EventLines().parse(data)


def test_an_answer_has_its_parts():
    raw = {
        "choices": [
            {
                "message": {
                    "content": None,
                    "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": "{}"}}],
                },
                "finish_reason": "tool_calls",
            }
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}},
    }
    answer = answer_of(raw)
    assert (answer.text, answer.finish_reason, answer.usage) == ("", "tool_calls", Usage(5, 2, 3))
    assert [(call.id, call.name, call.arguments) for call in answer.tool_calls] == [("c1", "f", "{}")]


@pytest.mark.parametrize("raw", [{}, {"choices": []}, {"choices": [{}]}, {"choices": None}])
def test_a_reply_that_is_no_answer_is_an_error(raw):
    with pytest.raises(InternalError):
        answer_of(raw)
