"""Rules on a request's values that both front doors share. Every error names the field and the remedy."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import msgspec

from triptych.chat import MAX_DEPTH, TemplateOptions
from triptych.errors import InvalidRequest
from triptych.proxy.call.chat import ChatMessage
from triptych.types import SamplingParams

MAX_STOP_STRINGS = 16
MAX_SALT = 256
#: Messages and content parts of one request.
MAX_PARTS = 4096
MAX_BIASES = 1024
#: Characters of all texts of one request, and token ids of one prompt: above what any model takes.
MAX_TEXT = 8 << 20
MAX_TOKEN_IDS = 1 << 18
#: Likeliest tokens of one position.
MAX_LOGPROBS = 20
MAX_TOKENS = 1 << 24
_INT64 = 1 << 63
_MAX_OPTIONS_BYTES = 16 << 10


def in_range(
    param: str,
    value: float | None,
    low: float,
    high: float,
    *,
    above: bool = False,
) -> None:
    """InvalidRequest unless `low <= value <= high` (`low <` when `above`). None passes."""
    if value is None:
        return
    too_low = value <= low if above else value < low
    if not math.isfinite(value) or too_low or value > high:
        left = f"above {low:.15g}" if above else f"at least {low:.15g}"
        raise InvalidRequest(f"{param} must be {left} and at most {high:.15g}", param=param)


def check_sampling(sampling: SamplingParams) -> SamplingParams:
    """`sampling` if every value is in range; top_k -1 (off) becomes 0."""
    in_range("temperature", sampling.temperature, 0, 2)
    in_range("top_p", sampling.top_p, 0, 1, above=True)
    in_range("top_k", sampling.top_k, 0, 1 << 31)
    in_range("max_tokens", sampling.max_tokens, 1, MAX_TOKENS)
    in_range("min_tokens", sampling.min_tokens, 0, MAX_TOKENS)
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest("min_tokens must not exceed max_tokens", param="min_tokens")
    in_range("presence_penalty", sampling.presence_penalty, -2, 2)
    in_range("frequency_penalty", sampling.frequency_penalty, -2, 2)
    in_range("repetition_penalty", sampling.repetition_penalty, 0, 10, above=True)
    in_range("min_p", sampling.min_p, 0, 1)
    in_range("logprobs", sampling.logprobs, 0, MAX_LOGPROBS)
    _check_bias(sampling)
    if len(sampling.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop takes at most {MAX_STOP_STRINGS} strings", param="stop")
    if any(not text for text in sampling.stop):
        raise InvalidRequest("stop must not hold an empty string", param="stop")
    if any(not 0 <= token < 1 << 32 for token in sampling.stop_token_ids):
        raise InvalidRequest("stop_token_ids must be token ids", param="stop_token_ids")
    return sampling


def _check_bias(sampling: SamplingParams) -> None:
    if len(sampling.logit_bias) > MAX_BIASES:
        raise InvalidRequest(f"logit_bias takes at most {MAX_BIASES} tokens", param="logit_bias")
    for token, bias in sampling.logit_bias:
        if not 0 <= token < 1 << 32:
            raise InvalidRequest("logit_bias must name token ids", param="logit_bias")
        in_range("logit_bias", bias, -100, 100)


def seed_of(seed: int | None) -> int:
    """The client's seed as 64 unsigned bits, or a drawn one."""
    if seed is None:
        return secrets.randbits(63)
    if not -_INT64 <= seed < _INT64:
        raise InvalidRequest("seed must be a 64-bit integer", param="seed")
    return seed % (1 << 64)


def check_salt(salt: str) -> str:
    if len(salt) > MAX_SALT or not salt.isprintable():
        raise InvalidRequest(
            f"cache_salt must be at most {MAX_SALT} printable characters", param="cache_salt"
        )
    return salt


def check_options(options: Mapping[str, Any], param: str = "mm_processor_kwargs") -> Mapping[str, Any]:
    """`options` if they can be part of a key: finite numbers, 64-bit integers, bounded size and depth."""
    check_depth(options, param)
    try:
        size = len(msgpack.packb(options))
    except (ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"{param} holds a value that cannot be used: {error}", param=param) from None
    if size > _MAX_OPTIONS_BYTES:
        raise InvalidRequest(f"{param} must be below {_MAX_OPTIONS_BYTES} bytes", param=param)
    if not _finite(options):
        raise InvalidRequest(f"{param} must hold finite numbers", param=param)
    return options


def check_depth(value: object, param: str, depth: int = 0) -> None:
    """InvalidRequest when lists and objects are nested so deep that later readers would fail."""
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{param} must not be nested deeper than {MAX_DEPTH}", param=param)
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return
    for inner in value:
        check_depth(inner, param, depth + 1)


def _finite(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(_finite(item) for item in value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return all(_finite(item) for item in value)
    return not isinstance(value, float) or math.isfinite(value)


def part_count(messages: Sequence[ChatMessage]) -> int:
    return sum(1 if isinstance(message.content, str) else len(message.content) for message in messages)


def check_parts(count: int) -> None:
    """Every message and part costs, however short its text."""
    if count > MAX_PARTS:
        raise InvalidRequest(
            f"messages holds {count} messages and parts; this server takes at most {MAX_PARTS}: join texts",
            param="messages",
        )


def text_length(messages: Sequence[ChatMessage]) -> int:
    """Characters of all texts."""
    return sum(message.text_length for message in messages)


def check_text(characters: int, param: str) -> None:
    """Texts are copied on their way to a PD worker, which would refuse these in the end."""
    if characters > MAX_TEXT:
        raise InvalidRequest(
            f"{param} holds {characters} characters; this server takes at most {MAX_TEXT}: send less",
            param=param,
        )


def check_token_count(count: int, param: str) -> None:
    if count > MAX_TOKEN_IDS:
        raise InvalidRequest(f"{param} takes at most {MAX_TOKEN_IDS} ids", param=param)


def check_image_count(count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequest(
            f"messages holds {count} images; this server takes at most {limit} in one request",
            param="messages",
        )


def template_options(
    last: ChatMessage,
    *,
    tools: bytes,
    variables: Mapping[str, Any],
    generation_prompt: bool | None,
    continue_final_message: bool,
) -> TemplateOptions:
    """What the chat template gets; `last` is the conversation's last message."""
    check_options(variables, "chat_template_kwargs")
    if continue_final_message and generation_prompt:
        raise InvalidRequest(
            "continue_final_message leaves no room for add_generation_prompt: set one of them",
            param="continue_final_message",
        )
    if continue_final_message and last.role != "assistant":
        raise InvalidRequest(
            "continue_final_message needs an assistant message at the end", param="continue_final_message"
        )
    return TemplateOptions(
        tools=tools,
        variables=msgspec.json.encode(variables) if variables else b"",
        generation_prompt=not continue_final_message and generation_prompt is not False,
        continue_final_message=continue_final_message,
    )
