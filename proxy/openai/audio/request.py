"""The form of OpenAI's audio endpoints turned into a call, or into an error that names the field."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from triptych.base.errors import InvalidRequest
from triptych.base.request import MAX_LANGUAGE, MAX_SPOKEN_PROMPT, Seed
from triptych.base.types import (
    SamplingParams,
    Temperature,
)
from triptych.proxy.call.chat import ChatCall, EncoderPrompt, Transcription
from triptych.proxy.call.validation import check_salt, check_sampling, seed_of
from triptych.proxy.http.form_body import Form, parse_form
from triptych.proxy.http.json_body import convert_field
from triptych.proxy.media.source import AudioPart
from triptych.proxy.openai.fields.sampling import CacheSalt

_TIMED = frozenset({"srt", "vtt", "verbose_json"})


class TranslationForm(msgspec.Struct, kw_only=True):
    """The form of POST /v1/audio/translations."""

    file: Annotated[
        object,
        Meta(
            description="An audio file: WAV, FLAC, MP3, Ogg, M4A or WebM.",
            extra_json_schema={"type": "string", "format": "binary"},
        ),
    ]
    model: Annotated[
        str, Meta(description="A name from GET /v1/models; optional when only one model is served.")
    ] = ""
    prompt: Annotated[
        str, Meta(description="Text that the model takes as said before.", max_length=MAX_SPOKEN_PROMPT)
    ] = ""
    response_format: Annotated[
        Literal["json", "text", "srt", "vtt", "verbose_json"], Meta(description="The form of the reply.")
    ] = "json"
    stream: Annotated[
        bool, Meta(description="Send the text as server-sent events while it is generated.")
    ] = False
    temperature: Annotated[
        Temperature | None,
        Meta(description="0 takes the likeliest token; the checkpoint's own default where none is given."),
    ] = None
    seed: Annotated[Seed | None, Meta(description="Equal requests with equal seeds get equal answers.")] = (
        None
    )
    cache_salt: Annotated[CacheSalt, Meta(description="Keeps caches apart.")] = ""
    include: list[str] | None = None


class TranscriptionForm(TranslationForm, kw_only=True):
    """The form of POST /v1/audio/transcriptions."""

    language: Annotated[
        str, Meta(description="The spoken language's code, such as en; heard where it is left out.")
    ] = ""
    timestamp_granularities: Annotated[
        list[Literal["segment"]], Meta(description="Only with response_format verbose_json.")
    ] = msgspec.field(name="timestamp_granularities[]", default_factory=list)


def form_body(form: Form) -> TranscriptionForm:
    """The form's fields; empty ones count as left out. InvalidRequest names the one that is wrong."""
    values: dict[str, object] = {"file": _file(form)}
    for name in TranscriptionForm.__struct_fields__:
        if name in ("include", "timestamp_granularities"):
            key = name if name == "include" else f"{name}[]"
            values[key] = [text for text in form.all(name) if text]
        elif name != "file" and (text := form.one(name)):
            values[name] = text
    try:
        return convert_field(values, TranscriptionForm, "", strict=False)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, param=str(error.param).partition("[")[0]) from None


@dataclass(frozen=True, slots=True)
class TranscriptionRequest:
    """A request for one file's transcript. `call` is that of its first window."""

    call: ChatCall
    response_format: str
    stream: bool
    translates: bool
    #: Of the form's fields.
    names: tuple[str, ...] = ()

    @property
    def wants_times(self) -> bool:
        return self.response_format in _TIMED


def parse_audio_form(
    raw: bytes, request_id: str, *, content_type: str, translates: bool, timeout: float
) -> TranscriptionRequest:
    """What the form that `raw` holds asks for. InvalidRequest names the field."""
    return parse_transcription(
        parse_form(content_type.encode("latin-1"), raw), request_id, translates=translates, timeout=timeout
    )


def parse_transcription(
    form: Form, request_id: str, *, translates: bool, timeout: float
) -> TranscriptionRequest:
    """What the form asks for. InvalidRequest names the field."""
    body = form_body(form)
    if body.stream and body.response_format not in ("json", "text"):
        raise InvalidRequest("stream is only allowed with response_format json or text", param="stream")
    if body.timestamp_granularities and body.response_format != "verbose_json":
        raise InvalidRequest(
            "timestamp_granularities[] is only allowed with response_format verbose_json",
            param="timestamp_granularities",
        )
    if body.include:
        raise InvalidRequest("include is not supported: verbose_json has avg_logprob", param="include")
    if translates and body.language:
        raise InvalidRequest("language: translations are English; leave it out", param="language")
    if len(body.language) > MAX_LANGUAGE or not body.language.isprintable():
        raise InvalidRequest("language must be a code such as en", param="language")
    sampling = SamplingParams(
        temperature=body.temperature,
        seed=seed_of(body.seed),
        logprobs=0 if body.response_format == "verbose_json" else None,
    )
    call = ChatCall(
        label=request_id,
        model=body.model,
        messages=(),
        sampling=check_sampling(sampling),
        timeout=timeout,
        cache_salt=check_salt(body.cache_salt),
        encoder=EncoderPrompt(AudioPart(form.files["file"], "file"), "file"),
        transcription=Transcription(
            language=body.language,
            task="translate" if translates else "transcribe",
            prompt=body.prompt,
            timestamps=body.response_format in _TIMED,
        ),
    )
    names = tuple(name.removesuffix("[]") for name in form.fields)
    return TranscriptionRequest(call, body.response_format, body.stream, translates, names)


def _file(form: Form) -> bytes:
    data = form.files.get("file")
    if data is None:
        raise InvalidRequest("file is missing: send an audio file, such as -F file=@speech.wav", param="file")
    if not data:
        raise InvalidRequest("file is empty: send an audio file", param="file")
    return data


def detection_of(call: ChatCall) -> ChatCall:
    """The call whose one output token is the file's language."""
    return replace(
        call,
        label=f"{call.label}#language",
        sampling=replace(call.sampling, max_tokens=1, temperature=0.0, logprobs=None),
        transcription=Transcription(detect_language=True),
        internal=True,
    )


def window_of(call: ChatCall, index: int, start: int, *, language: str, timestamps: bool) -> ChatCall:
    """The call of window `index`, which begins at frame `start`. Only the first one gets the prompt."""
    assert call.encoder is not None and call.transcription is not None
    return replace(
        call,
        label=call.label if index == 0 else f"{call.label}#w{index}",
        encoder=replace(call.encoder, start_frame=start),
        transcription=replace(
            call.transcription,
            language=language,
            timestamps=timestamps,
            prompt=call.transcription.prompt if index == 0 else "",
        ),
        continues=index > 0,
    )
