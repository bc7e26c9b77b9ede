"""The body of OpenAI's legacy completions, with vLLM's extras. Unknown fields do not fail."""

from __future__ import annotations

from typing import Any

from triptych.proxy.openai.chat.types import StreamOptions
from triptych.proxy.openai.fields.sampling import SamplingBody


class CompletionBody(SamplingBody, kw_only=True):
    """POST /v1/completions. `prompt`: a text, token ids, or a list of either.

    `encoder_prompt`, `decoder_prompt` and `multi_modal_data` are decoded late; see `two_prompts`.
    """

    prompt: str | list[str | int | list[int]] | None = None
    encoder_prompt: Any = None
    decoder_prompt: Any = None
    multi_modal_data: Any = None
    mm_processor_kwargs: dict[str, Any] | None = None
    model: str | None = None
    suffix: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    triptych_timings: bool | None = None
    user: str | None = None
