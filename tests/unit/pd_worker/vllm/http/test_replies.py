"""What comes from the server is read strictly."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.pd_worker.vllm.http.replies import (
    EngineGarbage,
    EngineRejected,
    StreamEvent,
    decode,
    error_of_body,
    error_of_event,
)


def chunk(**choice: object) -> StreamEvent:
    return decode(json.dumps({"choices": [choice]}).encode(), StreamEvent)


def test_tokens_and_reason_are_read_and_all_else_is_ignored():
    made = chunk(index=0, token_ids=[3, 4], finish_reason="length", stop_reason=None, weight_versions=[])
    assert (made.choices[0].token_ids, made.choices[0].finish_reason) == ([3, 4], "length")


def test_the_last_chunk_says_how_much_of_the_prompt_was_cached():
    raw = b'{"choices": [], "usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}}'
    assert decode(raw, StreamEvent).cached_tokens == 4
    assert chunk().cached_tokens == 0


@pytest.mark.parametrize(
    "raw",
    [b"", b"[", b"7", b"\xff", b'{"choices": 3}', b'{"choices": [{"token_ids": ["3"]}]}', b"[" * 100_000],
)
def test_what_is_no_chunk_is_garbage(raw):
    with pytest.raises(EngineGarbage):
        decode(raw, StreamEvent)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_chunk_or_garbage(raw):
    try:
        decode(raw, StreamEvent)
    except EngineGarbage:
        return
    json.loads(raw)


def test_an_error_event_names_field_and_reason():
    made = decode(b'{"error": {"message": "too many", "param": "logprobs", "code": 400}}', StreamEvent)
    assert made.error is not None
    error = error_of_event(made.error)
    assert isinstance(error, EngineRejected)
    assert (error.message, error.param) == ("too many", "logprobs")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "m"}}', "m"),
        (b'{"message": "m"}', "m"),
        (b'{"detail": "m"}', "m"),
        (b"<html>", "<html>"),
        (b'{"error": "m"}', '{"error": "m"}'),
    ],
)
def test_the_reason_of_a_refusal_is_found_in_each_form(body, message):
    error = error_of_body(400, body)
    assert isinstance(error, EngineRejected) and error.message == message
