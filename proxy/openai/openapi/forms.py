"""The audio endpoints' form, for the OpenAPI page: it is read field by field, no Struct describes it."""

from __future__ import annotations

from typing import Any

import msgspec

from triptych.base.request.limits import Temperature
from triptych.proxy.call.validation import MAX_SALT
from triptych.proxy.openai.audio.request import FORMATS


class TranscriptUsage(msgspec.Struct):
    type: str
    seconds: int


class TranscriptReply(msgspec.Struct):
    """`verbose_json` has more fields; srt, vtt and text are text."""

    text: str
    usage: TranscriptUsage


def _text(description: str, **limits: Any) -> dict[str, Any]:
    return {"type": "string", "description": description, **limits}


_COMMON: dict[str, Any] = {
    "file": _text("An audio file: WAV, FLAC, MP3 or Ogg.", format="binary"),
    "model": _text("A name from GET /v1/models; optional when only one model is served."),
    "prompt": _text("Text that the model takes as said before."),
    "response_format": _text("The form of the reply; json by default.", enum=list(FORMATS)),
    "stream": {
        "type": "boolean",
        "description": "Send the text as server-sent events while it is generated.",
    },
    "temperature": {
        **msgspec.json.schema(Temperature),
        "description": "0 takes the likeliest token; the checkpoint's own default where none is given.",
    },
    "seed": {"type": "integer", "description": "Equal requests with equal seeds get equal answers."},
    "cache_salt": _text("Keeps caches apart.", maxLength=MAX_SALT),
}
_TRANSCRIPTION = {
    **_COMMON,
    "language": _text("The spoken language's code, such as en; heard where it is left out.", maxLength=40),
    "timestamp_granularities[]": {
        "type": "array",
        "items": {"enum": ["segment"]},
        "description": "Only with response_format verbose_json.",
    },
}

#: Component name to schema.
FORMS: dict[str, dict[str, Any]] = {
    "TranscriptionForm": {"type": "object", "required": ["file"], "properties": _TRANSCRIPTION},
    "TranslationForm": {"type": "object", "required": ["file"], "properties": _COMMON},
}
