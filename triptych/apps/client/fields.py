"""The request fields that the clients pass on, by their OpenAI names (and vLLM's, where OpenAI has none)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any, Literal, Protocol, TypedDict, runtime_checkable

#: A JSON object, as `json` parses it: requests and replies are open to fields that have no name here.
JsonObject = Mapping[str, Any]


@runtime_checkable
class BinaryFile(Protocol):
    """A file that is open in binary mode."""

    def read(self) -> bytes: ...


#: A path, the bytes of a file, or an open one.
AudioFile = str | os.PathLike[str] | bytes | BinaryFile


class Picture(Protocol):
    """A picture in memory, such as PIL's."""

    def save(self, fp: IO[bytes], format: str) -> None: ...


#: A path, the bytes of a file, an http(s) or data: URL, or a picture of PIL.
File = AudioFile | Picture
#: One file or several.
Files = File | Iterable[File]
#: A question, or OpenAI's list of messages.
Messages = str | Sequence[JsonObject]
#: A text, token ids, or {"prompt": …} / {"prompt_token_ids": […]}.
Prompt = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]] | JsonObject


#: A text, or an object with one of `text`, `image`, `image_url` and `content`.
Content = str | JsonObject


class SamplingFields(TypedDict, total=False):
    """How tokens are chosen: the fields that chat and completions share."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[str, float]
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    bad_words: Sequence[str]
    ignore_eos: bool
    thinking_token_budget: int
    priority: int
    response_format: JsonObject
    structured_outputs: JsonObject
    guided_json: str | JsonObject
    guided_regex: str
    guided_choice: Sequence[str]
    n: int
    return_token_ids: bool
    mm_processor_kwargs: JsonObject
    cache_salt: str
    triptych_timings: bool
    user: str
    #: Further fields, which the clients do not know.
    extra_body: JsonObject


class ChatFields(SamplingFields, total=False):
    """The further fields of /v1/chat/completions."""

    max_completion_tokens: int
    logprobs: bool
    top_logprobs: int
    tools: Sequence[JsonObject]
    tool_choice: str | JsonObject
    parallel_tool_calls: bool
    chat_template_kwargs: JsonObject
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
    include_reasoning: bool
    add_generation_prompt: bool
    continue_final_message: bool
    stream_options: JsonObject


class CompletionFields(SamplingFields, total=False):
    """The further fields of /v1/completions."""

    logprobs: int
    best_of: int
    echo: bool
    suffix: str
    add_special_tokens: bool


class PooledFields(TypedDict, total=False):
    """Fields of requests without generation."""

    mm_processor_kwargs: JsonObject
    cache_salt: str
    priority: int
    #: Further fields, which the clients do not know.
    extra_body: JsonObject


class EmbeddingFields(PooledFields, total=False):
    """The further fields of /v1/embeddings."""

    dimensions: int
    pooling: Literal["last", "mean", "cls"]
    normalize: bool
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: JsonObject


class TokenVectorFields(PooledFields, total=False):
    """The further fields of /pooling."""

    dimensions: int
    use_activation: bool


class RerankFields(PooledFields, total=False):
    """The further fields of /v1/rerank."""

    top_n: int
    instruction: str


class SpeechFields(TypedDict, total=False):
    """The fields of the audio endpoints that say what is heard."""

    language: str
    prompt: str
    temperature: float
    seed: int
    cache_salt: str
    extra_body: JsonObject


class TranscriptFields(SpeechFields, total=False):
    """The further fields that choose the reply: a form that is JSON, and its timestamps."""

    response_format: Literal["json", "verbose_json"]
    timestamp_granularities: Sequence[str]
