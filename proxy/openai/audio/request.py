"""The form of OpenAI's audio endpoints turned into a call, or into an error that names the field."""

from __future__ import annotations

from dataclasses import dataclass, replace

from triptych.base.errors import InvalidRequest
from triptych.base.types import SamplingParams
from triptych.proxy.call.chat import ChatCall, EncoderPrompt, Transcription
from triptych.proxy.call.validation import check_salt, check_sampling, seed_of
from triptych.proxy.http.form_body import Form
from triptych.proxy.media.source import AudioPart

FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
FIELDS = (
    *("model", "language", "prompt", "response_format", "stream", "temperature", "seed", "cache_salt"),
    *("timestamp_granularities", "include", "file"),
)
_TIMED = frozenset({"srt", "vtt", "verbose_json"})
_MAX_PROMPT = 32 << 10
_MAX_LANGUAGE = 40
_TRUE, _FALSE = frozenset({"true", "1"}), frozenset({"", "false", "0"})


@dataclass(frozen=True, slots=True)
class TranscriptionRequest:
    """A request for one file's transcript. `call` is its first window's; `response_format` one of FORMATS."""

    call: ChatCall
    response_format: str
    stream: bool
    translates: bool
    #: Of the form's fields.
    names: tuple[str, ...] = ()

    @property
    def wants_times(self) -> bool:
        return self.response_format in _TIMED


def parse_transcription(
    form: Form, request_id: str, *, translates: bool, timeout: float
) -> TranscriptionRequest:
    """What the form asks for. InvalidRequest names the field."""
    response_format = form.one("response_format") or "json"
    if response_format not in FORMATS:
        raise InvalidRequest(f"response_format must be one of {', '.join(FORMATS)}", param="response_format")
    stream = _flag(form, "stream")
    if stream and response_format not in ("json", "text"):
        raise InvalidRequest("stream is only allowed with response_format json or text", param="stream")
    _check_granularities(form, response_format)
    if form.all("include"):
        raise InvalidRequest("include is not supported: verbose_json has avg_logprob", param="include")
    language, prompt = form.one("language"), form.one("prompt")
    if translates and language:
        raise InvalidRequest("language: translations are English; leave it out", param="language")
    if len(language) > _MAX_LANGUAGE or not language.isprintable():
        raise InvalidRequest("language must be a code such as en", param="language")
    if len(prompt) > _MAX_PROMPT:
        raise InvalidRequest(f"prompt must have at most {_MAX_PROMPT} characters", param="prompt")
    sampling = SamplingParams(
        temperature=_number(form, "temperature"),
        seed=seed_of(_seed(form)),
        logprobs=0 if response_format == "verbose_json" else None,
    )
    call = ChatCall(
        label=request_id,
        model=form.one("model"),
        messages=(),
        sampling=check_sampling(sampling),
        timeout=timeout,
        cache_salt=check_salt(form.one("cache_salt")),
        encoder=EncoderPrompt(AudioPart(_file(form), "file"), "file"),
        transcription=Transcription(
            language=language,
            task="translate" if translates else "transcribe",
            prompt=prompt,
            timestamps=response_format in _TIMED,
        ),
    )
    names = tuple(name.removesuffix("[]") for name in form.fields)
    return TranscriptionRequest(call, response_format, stream, translates, names)


def _file(form: Form) -> bytes:
    data = form.files.get("file")
    if data is None:
        raise InvalidRequest("file is missing: send an audio file, such as -F file=@speech.wav", param="file")
    if not data:
        raise InvalidRequest("file is empty: send an audio file", param="file")
    return data


def _check_granularities(form: Form, response_format: str) -> None:
    wanted = form.all("timestamp_granularities")
    if any(name not in ("segment", "") for name in wanted):
        raise InvalidRequest(
            "timestamp_granularities[]: only segment is served", param="timestamp_granularities"
        )
    if any(wanted) and response_format != "verbose_json":
        raise InvalidRequest(
            "timestamp_granularities[] is only allowed with response_format verbose_json",
            param="timestamp_granularities",
        )


def _flag(form: Form, name: str) -> bool:
    value = form.one(name).lower()
    if value not in _TRUE | _FALSE:
        raise InvalidRequest(f"{name} must be true or false", param=name)
    return value in _TRUE


def _number(form: Form, name: str) -> float | None:
    text = form.one(name)
    try:
        return float(text) if text else None
    except ValueError:
        raise InvalidRequest(f"{name} must be a number", param=name) from None


def _seed(form: Form) -> int | None:
    text = form.one("seed")
    if not text:
        return None
    if not text.removeprefix("-").isdecimal() or len(text) > 20:
        raise InvalidRequest("seed must be a 64-bit integer", param="seed")
    return int(text)


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
