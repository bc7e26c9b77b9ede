"""The shapes of replies, for the OpenAPI page alone: tests hold real replies against them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ErrorInfo(msgspec.Struct):
    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str


class ErrorReply(msgspec.Struct):
    error: ErrorInfo


class CachedTokens(msgspec.Struct):
    cached_tokens: int


class ReasoningDetails(msgspec.Struct):
    reasoning_tokens: int


class UsageReply(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningDetails | None = None


class FunctionReply(msgspec.Struct):
    name: str
    arguments: str


class ToolCallReply(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: FunctionReply


class MessageReply(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[ToolCallReply] = []
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: MessageReply
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatReply(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply


class LegacyLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: Literal["stop", "length"]


class TextReply(msgspec.Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReply


class CacheDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: CacheDetails
    output_tokens: int
    output_tokens_details: ReasoningDetails
    total_tokens: int


class ResponseReply(msgspec.Struct):
    """`output` holds items of type reasoning, message and function_call."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage
    store: bool
    parallel_tool_calls: bool
    tools: list[dict[str, Any]]
    tool_choice: Any
    metadata: dict[str, str]


class AnthropicErrorInfo(msgspec.Struct):
    type: str
    message: str
    param: str | None
    code: str


class AnthropicError(msgspec.Struct):
    type: Literal["error"]
    error: AnthropicErrorInfo


class ThinkingDetails(msgspec.Struct):
    thinking_tokens: int


class AnthropicUsage(msgspec.Struct):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingDetails


class AnthropicMessage(msgspec.Struct):
    """`content` holds blocks of type thinking, text and tool_use."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicCount(msgspec.Struct):
    input_tokens: int


class TranscriptUsage(msgspec.Struct):
    type: str
    seconds: int


class TranscriptReply(msgspec.Struct):
    """`verbose_json` has more fields; srt, vtt and text are text."""

    text: str
    usage: TranscriptUsage


class PooledUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class EmbeddingReply(msgspec.Struct):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsReply(msgspec.Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingReply]
    usage: PooledUsage


class TokenVectors(msgspec.Struct):
    object: Literal["pooling"]
    index: int
    data: list[list[float]] | str


class PoolingReply(msgspec.Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[TokenVectors]
    usage: PooledUsage


class RankedReply(msgspec.Struct):
    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


class RerankReply(msgspec.Struct):
    """`results` are the best first."""

    id: str
    model: str
    results: list[RankedReply]
    usage: PooledUsage


class PairScore(msgspec.Struct):
    index: int
    object: Literal["score"]
    score: float


class ScoreReply(msgspec.Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: PooledUsage


class TokenizeReply(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeReply(msgspec.Struct):
    prompt: str


class ModelReply(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    input_modalities: list[str]
    type: Literal["model"]
    display_name: str
    created_at: str


class ModelsReply(msgspec.Struct):
    object: Literal["list"]
    data: list[ModelReply]


class VersionReply(msgspec.Struct):
    version: str


class StatusReply(msgspec.Struct):
    status: str
