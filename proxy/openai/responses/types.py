"""The body of OpenAI's Responses API, with vLLM's extras. Unknown fields do not fail."""

from __future__ import annotations

from typing import Any

from triptych.proxy.openai.fields.sampling import SamplingBody


class ResponsesBody(SamplingBody, kw_only=True):
    """POST /v1/responses. Items of `input` are decoded one by one, so that errors name their index."""

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    user: str | None = None
    cache_salt: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    triptych_timings: bool | None = None
