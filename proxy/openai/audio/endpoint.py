"""POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from contextlib import aclosing

from triptych.base.errors import InvalidRequest
from triptych.proxy.http.endpoint import HttpReply
from triptych.proxy.http.json_body import DONE, event, to_json
from triptych.proxy.openai.audio.chat_transcriber import ChatTranscriber
from triptych.proxy.openai.audio.request import TranscriptionForm, TranscriptionRequest, parse_audio_form
from triptych.proxy.openai.audio.transcriber import FileTranscript, TimedSegment, Transcriber
from triptych.proxy.openai.chat.endpoint import CallEndpoint
from triptych.proxy.parsing.parse import Option, Parse

TEXT = b"text/plain; charset=utf-8"
JSON = b"application/json"


def whole_reply(request: TranscriptionRequest, transcript: FileTranscript) -> tuple[bytes, bytes]:
    """The reply's body and its content type."""
    match request.response_format:
        case "text":
            return (transcript.text.strip() + "\n").encode(), TEXT
        case "srt":
            return _srt(transcript).encode(), TEXT
        case "vtt":
            return _vtt(transcript).encode(), TEXT
        case "verbose_json":
            return to_json(_verbose(request, transcript)), JSON
    return to_json({"text": transcript.text.strip(), "usage": usage(transcript)}), JSON


def usage(transcript: FileTranscript) -> dict[str, object]:
    return {"type": "duration", "seconds": math.ceil(transcript.seconds)}


def delta_event(text: str) -> bytes:
    return event({"type": "transcript.text.delta", "delta": text})


def done_event(transcript: FileTranscript) -> bytes:
    done = {"type": "transcript.text.done", "text": transcript.text.strip(), "usage": usage(transcript)}
    return event(done)


def _verbose(request: TranscriptionRequest, transcript: FileTranscript) -> dict[str, object]:
    temperature = request.call.sampling.temperature or 0.0
    return {
        "task": "translate" if request.translates else "transcribe",
        "language": transcript.language,
        "duration": round(transcript.seconds, 2),
        "text": transcript.text.strip(),
        "segments": [_segment(at, it, temperature) for at, it in enumerate(transcript.segments)],
        "usage": usage(transcript),
    }


def _segment(index: int, segment: TimedSegment, temperature: float) -> dict[str, object]:
    """`no_speech_prob` is always 0: nothing here asks the model for it."""
    data = segment.text.encode()
    return {
        "id": index,
        "seek": segment.seek,
        "start": round(segment.start, 2),
        "end": round(segment.end, 2),
        "text": segment.text,
        "tokens": segment.token_ids,
        "temperature": temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": len(data) / len(zlib.compress(data)) if data else 0.0,
        "no_speech_prob": 0.0,
    }


def _srt(transcript: FileTranscript) -> str:
    return "".join(
        f"{index}\n{_clock(it.start, ',')} --> {_clock(it.end, ',')}\n{_line(it)}\n\n"
        for index, it in enumerate(_cues(transcript), start=1)
    )


def _vtt(transcript: FileTranscript) -> str:
    cues = [f"{_clock(it.start, '.')} --> {_clock(it.end, '.')}\n{_line(it)}\n\n" for it in _cues(transcript)]
    return "WEBVTT\n\n" + "".join(cues)


def _cues(transcript: FileTranscript) -> list[TimedSegment]:
    """The segments with text: an empty caption is left out."""
    return [segment for segment in transcript.segments if segment.text.strip()]


def _line(segment: TimedSegment) -> str:
    """A cue's text, without line breaks and arrows that would end the cue or read as its timing line."""
    return " ".join(segment.text.split()).replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    thousandths = round(seconds * 1000)
    minutes, rest = divmod(thousandths, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"


class AudioEndpoint(CallEndpoint[TranscriptionRequest]):
    """A form with a file in; a transcript, or with `translates` its English, out."""

    translates = False

    expected = "send a form with an audio file, such as curl -F file=@speech.wav"
    smaller = "send a smaller file, such as FLAC, or cut it"
    operation = "generate_content"
    body = TranscriptionForm

    def parse(self, request_id: str, content_type: bytes = b"") -> Parse[TranscriptionRequest]:
        form: dict[str, Option] = {
            "content_type": content_type.decode("latin-1"),
            "translates": self.translates,
        }
        form |= {"request_id": request_id, "timeout": self.limits.timeout}
        return Parse(parse_audio_form, form)

    def names(self, raw: bytes, request: TranscriptionRequest) -> Iterable[str]:
        return request.names

    async def answer(self, request: TranscriptionRequest, reply: HttpReply) -> None:
        model = self.dispatcher.resolve_model(request.call.model)
        transcriber: Transcriber | ChatTranscriber
        kind = self.dispatcher.kind(model)
        if kind.encoder_decoder:
            transcriber = Transcriber(self.dispatcher, self.queries, model, request)
        else:
            if kind.items and "audio" not in kind.items:
                takes = ", ".join(kind.input_modalities)
                raise InvalidRequest(
                    f"model: {model!r} takes {takes} and no audio: name one of /v1/models that does",
                    param="model",
                )
            transcriber = ChatTranscriber(self.dispatcher, request)
        async with aclosing(transcriber.run()) as pieces:
            async for piece in pieces:
                if request.stream:
                    await reply.part(delta_event(piece))
        transcript = transcriber.transcript
        if request.stream:
            await reply.part(done_event(transcript) + DONE, last=True)
            return
        body, content_type = whole_reply(request, transcript)
        await reply.whole(body, content_type=content_type)


class TranslationEndpoint(AudioEndpoint):
    """A form with a file in; its English out."""

    translates = True
