"""Replies of vLLM's token and pooling endpoints, decoded and checked, and what else can become of a call."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from triptych.base.errors import printable
from triptych.base.types import prepared
from triptych.pd_worker.core.outputs import RawLogprobs

#: Characters of a message of vLLM that go into ours.
MAX_CHARS = 500


class EngineError(Exception):
    """The root of all failures of a call; the message is for logs."""


class EngineUnreachable(EngineError):
    """The engine is dead, or there is no connection, or one that broke before the answer was whole."""


class EngineSilent(EngineUnreachable):
    """No answer in time, from an engine that may still live."""


class EngineRejected(EngineError):
    """An answer 4xx: the same request would be refused again. `message` is vLLM's own."""

    def __init__(self, status: int, message: str, param: str = "") -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.param = param


class EngineBusy(EngineError):
    """An answer 429 or 503: the same request may be taken later."""


class EngineFailed(EngineError):
    """An answer 5xx, or an error event: vLLM has failed on this request, for example for a lost embedding."""


class EngineGarbage(EngineError):
    """An answer that is not of the endpoint."""


class EngineLost(Exception):
    """The engine has ended, with all of its requests."""


def error_of_status(status: int, message: str, param: str = "") -> EngineError:
    """The failure that an HTTP status names."""
    message = printable(" ".join(message.split())[:MAX_CHARS])
    if status in (429, 503):
        return EngineBusy(f"{status}: {message}")
    if 400 <= status < 500:
        return EngineRejected(status, message, param)
    if status >= 500:
        return EngineFailed(f"{status}: {message}")
    return EngineGarbage(f"status {status}")


class RankedToken(msgspec.Struct):
    """A token of one position; `rank` 1 is the likeliest."""

    token_id: int
    logprob: float
    rank: int | None = None


class ChosenToken(RankedToken):
    """The chosen token of one position, and the likeliest ones."""

    top_logprobs: list[RankedToken] = []

    def raw(self, maximum: int) -> RawLogprobs:
        """As the native sampler reports them, with the `maximum` likeliest tokens."""
        ranked = sorted((one for one in self.top_logprobs if one.rank), key=lambda one: one.rank or 0)
        top = tuple((one.token_id, one.logprob) for one in ranked[:maximum])
        return RawLogprobs((self.token_id, self.logprob), top)


class TokenLogprobs(msgspec.Struct):
    content: list[ChosenToken] | None = None


class StreamChoice(msgspec.Struct):
    """New tokens of the request; `finish_reason` comes with the last ones."""

    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: TokenLogprobs | None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class StreamUsage(msgspec.Struct):
    prompt_tokens_details: PromptDetails | None = None


class StreamChunk(msgspec.Struct):
    """New tokens, or what is known of the request at its end."""

    choices: list[StreamChoice] = []
    usage: StreamUsage | None = None

    @property
    def cached_tokens(self) -> int:
        details = self.usage and self.usage.prompt_tokens_details
        return (details and details.cached_tokens) or 0


class WholeAnswer(StreamChunk):
    """All tokens of a call, and where the KV of its prompt is kept for another server."""

    kv_transfer_params: dict[str, object] | None = None


class PooledData(msgspec.Struct):
    #: Float32 numbers, in base64.
    data: str


class PooledCount(msgspec.Struct):
    prompt_tokens: int


class PooledAnswer(msgspec.Struct):
    """What one prompt was pooled to."""

    data: Annotated[list[PooledData], msgspec.Meta(min_length=1, max_length=1)]
    usage: PooledCount


class PlaceholderRange(msgspec.Struct):
    offset: int
    length: int


class RenderedItems(msgspec.Struct):
    mm_placeholders: dict[str, list[PlaceholderRange]]


class RenderedPrompt(msgspec.Struct):
    """A conversation as vLLM would compute it."""

    token_ids: list[int]
    features: RenderedItems | None = None

    def places(self, modality: str) -> list[tuple[int, int]]:
        """Offset and length of each item's tokens."""
        known = self.features.mm_placeholders if self.features is not None else {}
        return [(place.offset, place.length) for place in known.get(modality, [])]


def check_tokens(chunk: StreamChunk, vocab_size: int) -> None:
    """EngineGarbage for token ids that the model lacks, or log-probabilities that are not theirs."""
    for choice in chunk.choices:
        token_ids = choice.token_ids or []
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise EngineGarbage(f"token ids beyond {vocab_size - 1}")
        logprobs = choice.logprobs and choice.logprobs.content
        if logprobs and [one.token_id for one in logprobs] != token_ids:
            raise EngineGarbage("log-probabilities of other tokens")


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
    #: Of a LoRA adapter, the model that it is of.
    parent: str | None = None
    max_model_len: int | None = None


class ModelList(msgspec.Struct):
    data: list[ModelCard]


class ConnectorAnswer(msgspec.Struct):
    """What a call's answer has of the connector."""

    ec_transfer_params: dict[str, object] | None = None


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
        return msgspec.json.decode(raw, type=prepared(kind))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineGarbage(f"no {kind.__name__}: {error}") from error


def error_of_event(error: EngineErrorBody) -> EngineError:
    """The failure that an error event of a stream names."""
    status = error.code if isinstance(error.code, int) else 500
    return error_of_status(status, error.message, error.param or "")


def error_of_body(status: int, raw: bytes) -> EngineError:
    """The failure of an answer that is not 200."""
    try:
        reply = msgspec.json.decode(raw, type=prepared(FailureReply))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return error_of_status(status, raw[:MAX_CHARS].decode(errors="replace"))
    if reply.error is not None:
        return error_of_status(status, reply.error.message, reply.error.param or "")
    return error_of_status(status, reply.message or reply.detail or "")
