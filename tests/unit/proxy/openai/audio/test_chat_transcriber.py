"""Transcripts by decoder-only models: the language that some write first is no part of the text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import pytest

from triptych.base.errors import InvalidRequest
from triptych.proxy.call.chat import ChatCall, Delta, Output, Started
from triptych.proxy.http.form_body import Form
from triptych.proxy.openai.audio.chat_transcriber import ChatTranscriber
from triptych.proxy.openai.audio.request import TranscriptionRequest, parse_transcription


class Backend:
    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self.calls: list[ChatCall] = []

    async def chat(self, call: ChatCall) -> AsyncGenerator[list[Output], None]:
        self.calls.append(call)
        yield [Started((1, 2), frames=(0, 250, 250))]
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
