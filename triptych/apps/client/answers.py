"""The replies of a cluster, as plain values."""

from __future__ import annotations

import base64
import struct
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from typing import TypeAlias

from triptych.apps.client.fields import JsonObject
from triptych.base.errors import InternalError
from triptych.base.types import Usage


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asks for; `arguments` is JSON as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. `raw` is the reply as it came, with everything that has no field here.

    `reasoning` is what a model put out before its answer, empty where it did not reason.
    """

    text: str
    finish_reason: str
    usage: Usage
    tool_calls: tuple[ToolCall, ...]
    raw: JsonObject
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed answer: new text or reasoning, and the reason in the piece that ends it."""

    text: str
    finish_reason: str | None
    raw: JsonObject
    reasoning: str = ""


Chunks: TypeAlias = Generator[Chunk, None, None]
AsyncChunks: TypeAlias = AsyncGenerator[Chunk, None]


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer to prompts, with the prompts as token ids; `encoder_prompt_token_ids` of text encoders."""

    text: str
    finish_reason: str
    usage: Usage
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    encoder_prompt_token_ids: tuple[int, ...]
    raw: JsonObject


@dataclass(frozen=True, slots=True)
class Segment:
    """The text spoken from `start` to `end`, in seconds."""

    start: float
    end: float
    text: str


@dataclass(frozen=True, slots=True)
class Transcript:
    """The text of an audio file; `duration` in seconds."""

    text: str
    language: str
    duration: float
    segments: tuple[Segment, ...]
    raw: JsonObject


@dataclass(frozen=True, slots=True)
class Vectors:
    """One vector for each input, in order."""

    vectors: tuple[tuple[float, ...], ...]
    usage: Usage


@dataclass(frozen=True, slots=True)
class TokenVectors:
    """For each input, in order, a vector for each of its tokens."""

    vectors: tuple[tuple[tuple[float, ...], ...], ...]
    usage: Usage


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document by its place in the request, and its score."""

    index: int
    score: float


@dataclass(frozen=True, slots=True)
class Ranking:
    """The documents, the best first."""

    results: tuple[Ranked, ...]
    usage: Usage


def embeddings_of(raw: JsonObject) -> Vectors:
    """The reply to /v1/embeddings in base64; InternalError when it is none."""
    try:
        return Vectors(tuple(_floats(item["embedding"]) for item in raw["data"]), usage_of(raw["usage"]))
    except (KeyError, TypeError, ValueError, struct.error) as error:
        raise InternalError(f"the server's reply holds no embeddings: {error!r}") from None


def token_vectors_of(raw: JsonObject) -> TokenVectors:
    """The reply to /pooling in base64; InternalError when it is none."""
    try:
        inputs, usage = [_floats(item["data"]) for item in raw["data"]], usage_of(raw["usage"])
        width, rest = divmod(sum(map(len, inputs)), usage.prompt_tokens)
        if rest or any(len(numbers) % width for numbers in inputs):
            raise ValueError("not as many numbers for each token")
        vectors = tuple(
            tuple(numbers[start : start + width] for start in range(0, len(numbers), width))
            for numbers in inputs
        )
        return TokenVectors(vectors, usage)
    except (KeyError, TypeError, ValueError, ArithmeticError, struct.error) as error:
        raise InternalError(f"the server's reply holds no vectors of tokens: {error!r}") from None


def _floats(text: str) -> tuple[float, ...]:
    """Little-endian float32 in base64."""
    data = base64.b64decode(text, validate=True)
    return struct.unpack(f"<{len(data) // 4}f", data)


def ranking_of(raw: JsonObject) -> Ranking:
    """The reply to /v1/rerank; InternalError when it is none."""
    try:
        results = [Ranked(result["index"], result["relevance_score"]) for result in raw["results"]]
        return Ranking(tuple(results), usage_of(raw["usage"]))
    except (KeyError, TypeError) as error:
        raise InternalError(f"the server's reply is not a ranking: {error!r}") from None


def completion_of(raw: JsonObject) -> Completion:
    """The reply to /v1/completions with return_token_ids; InternalError when it is none."""
    try:
        choice = raw["choices"][0]
        return Completion(
            text=choice["text"],
            finish_reason=choice["finish_reason"],
            usage=usage_of(raw["usage"]),
            token_ids=tuple(choice.get("token_ids") or ()),
            prompt_token_ids=tuple(choice.get("prompt_token_ids") or ()),
            encoder_prompt_token_ids=tuple(choice.get("encoder_prompt_token_ids") or ()),
            raw=raw,
        )
    except (KeyError, IndexError, TypeError) as error:
        raise InternalError(f"the server's reply is not a completion: {error!r}") from None


def transcript_of(raw: JsonObject) -> Transcript:
    """The reply of the audio endpoints, verbose or not; InternalError when it is none."""
    try:
        return Transcript(
            text=raw["text"],
            language=raw.get("language", ""),
            duration=float(raw.get("duration", 0.0)),
            segments=tuple(Segment(it["start"], it["end"], it["text"]) for it in raw.get("segments") or ()),
            raw=raw,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InternalError(f"the server's reply is not a transcript: {error!r}") from None


def answer_of(raw: JsonObject) -> Answer:
    """The reply to a chat request; InternalError when it is none."""
    try:
        choice = raw["choices"][0]
        message = choice["message"]
        return Answer(
            text=message["content"] or "",
            finish_reason=choice["finish_reason"],
            usage=usage_of(raw["usage"]),
            tool_calls=tuple(_tool_call(call) for call in message.get("tool_calls") or ()),
            raw=raw,
            reasoning=message.get("reasoning_content") or "",
        )
    except (KeyError, IndexError, TypeError) as error:
        raise InternalError(f"the server's reply is not a chat completion: {error!r}") from None


def chunk_of(raw: JsonObject) -> Chunk:
    """One event of a stream; events without a choice (usage) have no text."""
    try:
        if not raw["choices"]:
            return Chunk("", None, raw)
        choice = raw["choices"][0]
        text, reasoning = (choice["delta"].get(name) or "" for name in ("content", "reasoning_content"))
        return Chunk(text, choice["finish_reason"], raw, reasoning)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise InternalError(f"the server's event is not a chunk of a chat completion: {error!r}") from None


def usage_of(raw: JsonObject) -> Usage:
    """The token counts of a reply."""
    cached = (raw.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Usage(raw["prompt_tokens"], raw.get("completion_tokens", 0), cached)


def _tool_call(raw: JsonObject) -> ToolCall:
    return ToolCall(raw["id"], raw["function"]["name"], raw["function"]["arguments"])
