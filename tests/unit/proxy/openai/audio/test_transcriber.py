"""Transcripts: windows, their segments, chat models and the forms of the reply."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from triptych.base.delta import Delta
from triptych.base.errors import InvalidRequest
from triptych.base.types import TimestampTokens
from triptych.protos.pd_pb2 import Admitted
from triptych.proxy.call.chat import ChatCall, Output
from triptych.proxy.http.form_body import Form
from triptych.proxy.openai.audio.chat_transcriber import ChatTranscriber
from triptych.proxy.openai.audio.endpoint import whole_reply
from triptych.proxy.openai.audio.request import TranscriptionRequest, parse_transcription
from triptych.proxy.openai.audio.transcriber import (
    FileTranscript,
    Span,
    TimedSegment,
    Window,
    WindowSegments,
    segment_window,
)
from triptych.proxy.quotas.call_context import CallContext

TIMES = TimestampTokens(5000, 0.02)
END = 2
FULL = 3000


def at(seconds: float) -> int:
    return TIMES.first + round(seconds / TIMES.seconds)


def cut(window: Window, *ids: int, eos: bool = True) -> WindowSegments:
    return segment_window(window, [*ids, END] if eos else ids, TIMES, full=FULL, eos=eos)


def shown(found: WindowSegments) -> list[tuple[float, float, int, int]]:
    return [(round(s.start, 2), round(s.end, 2), s.first, s.last) for s in found.spans]


MIDDLE = Window(3000, 3000, 9000)
LAST = Window(6000, 1500, 7500)


@pytest.mark.parametrize(
    ("window", "ids", "eos", "spans", "next_start"),
    [
        (
            MIDDLE,
            [at(0), 65, 66, at(4), at(4), 67, at(9), at(9.5), 68],
            True,
            [(30.0, 34.0, 0, 4), (34.0, 39.0, 4, 8)],
            3000 + 900,
        ),
        (MIDDLE, [at(0), 65, at(4), at(5), 66, at(9)], True, [(30.0, 34.0, 0, 3), (35.0, 39.0, 3, 6)], 6000),
        (MIDDLE, [at(0), 65, 66, at(7)], True, [(30.0, 37.0, 0, 4)], 6000),
        (LAST, [at(0), 65, at(4), at(5), 66, at(9)], True, [(60.0, 64.0, 0, 4)], 6000 + 400),
        (LAST, [at(0), 65, at(9)], True, [(60.0, 69.0, 0, 4)], 7500),
        (MIDDLE, [at(0), 65, at(4), at(4)], False, [(30.0, 34.0, 0, 4)], 3000 + 400),
    ],
    ids=[
        "the next window begins where the last complete segment ends",
        "a single timestamp at the end: silence follows",
        "no pair of timestamps: one segment up to the last one",
        "the end token belongs to a segment of the last window",
        "the last window is over",
        "max_tokens: no end token",
    ],
)
def test_a_window_is_cut_into_segments_and_says_where_the_next_one_begins(
    window, ids, eos, spans, next_start
):
    found = cut(window, *ids, eos=eos)
    assert (shown(found), found.next_start) == (spans, next_start)


@pytest.mark.parametrize("ids", [(), (65, 66), (at(0), 65)])
def test_a_segment_without_an_end_timestamp_lasts_for_the_whole_window(ids: tuple[int, ...]) -> None:
    assert shown(cut(MIDDLE, *ids)) == [(30.0, 60.0, 0, len(ids))]


def test_a_window_whose_last_timestamp_is_zero_is_not_repeated() -> None:
    found = cut(MIDDLE, at(0), at(0), 65)
    assert found.next_start == 6000


def test_a_segment_holds_the_range_of_its_tokens() -> None:
    assert segment_window(Window(0, 200, 200), [65], TIMES, full=FULL, eos=False) == WindowSegments(
        (Span(0.0, 2.0, 0, 1),), 200
    )


class Backend:
    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self.calls: list[ChatCall] = []

    async def chat(self, call: ChatCall, context: CallContext) -> AsyncGenerator[list[Output], None]:
        self.calls.append(call)
        yield [Admitted(prompt_token_ids=(1, 2), frames=(0, 250, 250))]
        for text in self.texts:
            yield [Delta(text, ())]


def request(**fields: str) -> TranscriptionRequest:
    form = Form({name: [text] for name, text in fields.items()}, {"file": b"RIFF"})
    return parse_transcription(form, "id", translates=False, timeout=10.0)


def transcribed(*texts: str, **fields: str) -> tuple[list[str], ChatTranscriber, Backend]:
    backend = Backend(texts)
    transcriber = ChatTranscriber(backend, request(**fields))

    async def run() -> list[str]:
        return [piece async for piece in transcriber.run()]

    return asyncio.run(run()), transcriber, backend


@pytest.mark.parametrize(
    ("texts", "pieces", "language"),
    [
        (("lang", "uage English<asr", "_text>Hello", " there"), ["Hello", " there"], "english"),
        (("Hello", " there"), ["Hello", " there"], ""),
        (("lang", "syne"), ["langsyne"], ""),
        (("language is",), ["language is"], ""),
        ((" Hello",), ["Hello"], ""),
    ],
)
def test_the_text_comes_without_the_language_before_it(texts, pieces, language):
    said, transcriber, backend = transcribed(*texts)
    assert (said, transcriber.transcript.language) == (pieces, language)
    assert transcriber.transcript.text == "".join(pieces)
    assert transcriber.transcript.seconds == 2.5
    (call,) = backend.calls
    assert call.encoder is None and [part.param for part in call.items()] == ["file"]


def test_times_are_refused_by_their_field() -> None:
    for form in ("srt", "vtt", "verbose_json"):
        with pytest.raises(InvalidRequest, match="no times: send json or text") as caught:
            ChatTranscriber(Backend(()), request(response_format=form))
        assert caught.value.param == "response_format"


def test_a_language_that_was_given_is_the_replys() -> None:
    _, transcriber, backend = transcribed("Hi", language="en")
    assert transcriber.transcript.language == "en"
    assert backend.calls[0].transcription == replace(request(language="en").call.transcription)


SILENT_END = FileTranscript(
    "en",
    500,
    [
        TimedSegment(0.0, 0.5, " ", (), 0, 0.0),
        TimedSegment(0.5, 61.25, " one\n-->  two ", (5, 6), 0, -0.5),
        TimedSegment(61.25, 62.0, "", (), 200, 0.0),
    ],
    " one\n-->  two ",
)


@pytest.mark.parametrize(
    ("response_format", "text"),
    [
        ("srt", "1\n00:00:00,500 --> 00:01:01,250\none -> two\n\n"),
        ("vtt", "WEBVTT\n\n00:00:00.500 --> 00:01:01.250\none -> two\n\n"),
    ],
)
def test_captions_have_a_cue_for_each_segment_in_which_something_is_said(response_format, text):
    body, content_type = whole_reply(SimpleNamespace(response_format=response_format), SILENT_END)
    assert (body.decode(), content_type) == (text, b"text/plain; charset=utf-8")


def test_verbose_json_has_the_segments_without_text_too():
    sampling = SimpleNamespace(temperature=None)
    request = SimpleNamespace(
        response_format="verbose_json", translates=False, call=SimpleNamespace(sampling=sampling)
    )
    body, _ = whole_reply(request, SILENT_END)
    segments = msgspec.json.decode(body)["segments"]
    assert [(it["start"], it["end"], it["text"]) for it in segments] == [
        (0.0, 0.5, " "),
        (0.5, 61.25, " one\n-->  two "),
        (61.25, 62.0, ""),
    ]
