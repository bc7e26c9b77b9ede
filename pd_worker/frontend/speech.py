"""The conversation by which a decoder-only model transcribes a file, as its own processor writes it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping

import msgspec

from triptych.base.errors import InvalidRequest
from triptych.base.request import AudioSlot, Message, TemplateOptions, TextPart
from triptych.protos import common_pb2

#: What GLM-ASR's processor asks where the client says nothing.
_GLM_PROMPT = "Please transcribe this audio into text"


def transcription_chat(task: common_pb2.Transcription, model_type: str) -> tuple[bytes, TemplateOptions]:
    """Submit's JSON messages about one sound, and how the template writes them.

    InvalidRequest, naming the field, for a model that transcribes in no form of its own, or not so.
    """
    if task.timestamps or task.detect_language:
        raise InvalidRequest(
            "response_format: this model says no times: send json or text", param="response_format"
        )
    if task.task not in ("", "transcribe"):
        raise InvalidRequest(
            "model: this model translates in chats only: send input_audio to /v1/chat/completions",
            param="model",
        )
    sound = Message("user", [AudioSlot()])
    match model_type:
        case "qwen3_asr":
            system = [Message("system", [TextPart(task.prompt)])] if task.prompt else []
            if not task.language:
                return _encoded([*system, sound]), TemplateOptions()
            return _begun([*system, sound], f"language {_name_of(task.language)}<asr_text>")
        case "voxtral":
            if task.prompt:
                raise InvalidRequest("prompt: this model takes none: leave it out", param="prompt")
            if not re.fullmatch("([a-z]{2})?", task.language):
                raise InvalidRequest("language: give a code of two letters, such as en", param="language")
            language = f"lang:{task.language}" if task.language else ""
            return _begun([sound], f"{language}[TRANSCRIBE]")
        case "glmasr":
            if task.language:
                raise InvalidRequest(
                    "language: this model recognises it: leave it out, or name it in prompt", param="language"
                )
            prompt = TextPart(task.prompt or _GLM_PROMPT)
            return _encoded([Message("user", [AudioSlot(), prompt])]), TemplateOptions()
    raise InvalidRequest(
        "model: this model has no form for transcripts: send input_audio and a question to "
        "/v1/chat/completions",
        param="model",
    )


def _begun(messages: list[Message], answer: str) -> tuple[bytes, TemplateOptions]:
    """The messages, and the beginning of the answer to them."""
    options = TemplateOptions(generation_prompt=False, continue_final_message=True)
    return _encoded([*messages, Message("assistant", [TextPart(answer)])]), options


def _encoded(messages: list[Message]) -> bytes:
    return msgspec.json.encode(messages)


def _name_of(language: str) -> str:
    module = importlib.import_module("transformers.models.qwen3_asr.processing_qwen3_asr")
    names: Mapping[str, str] = module.LANGUAGE_CODE_TO_NAME
    known = {**names, **{name.lower(): name for name in names.values()}}
    if (name := known.get(language.lower())) is None:
        raise InvalidRequest(
            f"language: {language!r} is unknown; this model has {', '.join(sorted(names))}", param="language"
        )
    return name
