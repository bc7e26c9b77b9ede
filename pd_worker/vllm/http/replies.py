"""Replies of vLLM's token endpoint, decoded and checked."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from triptych.pd_worker.vllm.http.chunks import StreamChunk
from triptych.pd_worker.vllm.http.errors import (
    MOST_CHARS,
    EngineError,
    EngineGarbage,
    error_of_status,
)

T = TypeVar("T", bound=msgspec.Struct)


class EngineErrorBody(msgspec.Struct):
    """vLLM's form of an error."""

    message: str = ""
    code: int | str | None = None
    param: str | None = None


class StreamEvent(StreamChunk):
    """One event of a stream."""

    error: EngineErrorBody | None = None


class ModelCard(msgspec.Struct):
    id: str
    root: str | None = None
    max_model_len: int | None = None


class ModelList(msgspec.Struct):
    data: list[ModelCard]


class ServerVersion(msgspec.Struct):
    version: str


class FailureReply(msgspec.Struct):
    """The body of an answer 4xx or 5xx; older routes have the message at the top."""

    error: EngineErrorBody | None = None
    message: str = ""
    detail: str | None = None


def decode(raw: bytes, kind: type[T]) -> T:
    """The reply; EngineGarbage for one that is not of this kind."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineGarbage(f"no {kind.__name__}: {error}") from error


def error_of_event(error: EngineErrorBody) -> EngineError:
    """The failure that an error event of a stream names."""
    status = error.code if isinstance(error.code, int) else 500
    return error_of_status(status, error.message, error.param or "")


def error_of_body(status: int, raw: bytes) -> EngineError:
    """The failure of an answer that is not 200."""
    try:
        reply = msgspec.json.decode(raw, type=FailureReply)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return error_of_status(status, raw[:MOST_CHARS].decode(errors="replace"))
    if reply.error is not None:
        return error_of_status(status, reply.error.message, reply.error.param or "")
    return error_of_status(status, reply.message or reply.detail or "")
