"""One streamed reply, however it is cut, and the bodies that ask for it."""

from __future__ import annotations

import base64
import io
import json

import pytest
from PIL import Image

from triptych_bench.goodput.load.client import StreamedReply
from triptych_bench.goodput.load.job import LoadJob, Target
from triptych_bench.goodput.load.payload import Bodies
from triptych_bench.goodput.load.workload import Workload, plan_requests


def event(**body) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def token(text: str) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}])


ROLE = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
LAST = event(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}])
USAGE = event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 3})
DONE = b"data: [DONE]\n\n"


def read(*events: bytes, first_token: str = "chunk") -> StreamedReply:
    """Event number i comes at second i."""
    reply = StreamedReply(first_token)
    for now, data in enumerate(events):
        reply.feed(data, float(now))
    return reply


def test_first_token_gaps_and_usage_of_a_reply():
    reply = read(b"", ROLE, token("a"), token("b"), token("c"), LAST, USAGE, DONE)
    assert (reply.first, reply.gaps, reply.chunks, reply.usage) == (1.0, [1.0, 1.0, 1.0], 3, (9, 3))
    assert reply.problem(asked=3, ignore_eos=True) == ""


@pytest.mark.parametrize("size", [1, 7, 64])
def test_a_reply_cut_anywhere_is_the_same(size):
    whole = ROLE + token("ä\n") + token("b") + LAST + USAGE + DONE
    reply = StreamedReply()
    for at in range(0, len(whole), size):
        reply.feed(whole[at : at + size], 1.0)
    assert (reply.chunks, reply.usage, reply.ended, reply.error) == (2, (9, 3), True, "")


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([token("a"), event(error={"message": "gone"}), DONE], "gone"),
        ([token("a"), USAGE], "[DONE]"),
        ([USAGE, DONE], "without a token"),
        ([token("a"), b"data: {\n\n", DONE], "no chunk"),
        ([token("a"), event(choices=[], usage={"completion_tokens": 2}), DONE], "2 tokens of 3"),
    ],
)
def test_what_does_not_count_says_why(events, words):
    assert words in read(*events).problem(asked=3, ignore_eos=True)


def bodies_of(load: Workload, **target) -> Bodies:
    schedule = tuple((0.0, planned) for planned in plan_requests(load, 3, 1))
    return Bodies(LoadJob(Target("http://x", "m", **target), schedule))


def test_a_body_is_a_chat_request_with_its_pictures_its_text_and_its_length():
    bodies = bodies_of(Workload(8, 5, ((2, 1.0),), ((40, 24, 1.0),)), extra={"seed": 3})
    body = json.loads(bodies.body(1))
    first, second, words = body.pop("messages")[0]["content"]
    assert body == {
        "model": "m",
        "max_tokens": 5,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "triptych_timings": True,
        "seed": 3,
    }
    assert first != second
    assert len(words["text"].split()) == 8
    kind, _, data = first["image_url"]["url"].partition(",")
    assert kind == "data:image/jpeg;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        assert image.size == (40, 24)
    bodies.close()
