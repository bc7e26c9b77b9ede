"""Transcripts in OpenAI's shapes."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from triptych.proxy.openai.audio.endpoint import whole_reply
from triptych.proxy.openai.audio.transcriber import FileTranscript, TimedSegment

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
