"""The response object as it grows, and its events."""

from __future__ import annotations

import json
from typing import Any

from triptych.base.delta import Delta
from triptych.base.types import FinishReason, PositionLogprobs, TokenLogprob, Usage
from triptych.protos.pd_pb2 import Admitted
from triptych.proxy.call.chat import Done, Timings
from triptych.proxy.openai.responses.endpoint import ResponseBook
from triptych.proxy.openai.responses.request import LOGPROBS, parse_responses


def events_of(*outputs: Any, **body: Any) -> list[dict[str, Any]]:
    raw = json.dumps({"input": "x", "include": [LOGPROBS], **body}).encode()
    book = ResponseBook(parse_responses(raw, "r", max_images=1, timeout=9.0), "m")
    done = Done(FinishReason.STOP, Usage(1, 2, 0), Timings())
    return list(book.take([Admitted(prompt_token_ids=(1,)), *outputs, done]))


def one(events: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (event,) = (event for event in events if event["type"] == kind)
    return event


def position(text: str) -> PositionLogprobs:
    return PositionLogprobs(TokenLogprob(5, -0.5, text, text.encode()))


def test_the_end_of_a_text_has_the_log_probabilities_of_all_its_pieces() -> None:
    events = events_of(Delta("a", [1], (position("a"),)), Delta("b", [2], (position("b"),)))
    pieces = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [[entry["token"] for entry in piece] for piece in pieces] == [["a"], ["b"]]
    assert [entry["token"] for entry in one(events, "response.output_text.done")["logprobs"]] == ["a", "b"]
    part = one(events, "response.completed")["response"]["output"][0]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]] == ["a", "b"]
