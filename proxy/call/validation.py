"""Rules on a request's values that both front doors share; errors name the remedy."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_type_hints

import msgspec
from msgspec import Meta

from triptych.base.errors import InvalidRequest, RequestError
from triptych.base.request import (
    MAX_OPTIONS_BYTES,
    MAX_PARTS,
    MAX_SALT,
    MAX_TEXT,
    MAX_TOKEN_IDS,
    Seed,
    TemplateOptions,
    check_limits,
    check_lists,
    check_within,
    limits_of,
)
from triptych.base.types import (
    SamplingParams,
    Task,
)
from triptych.proxy.call.chat import ChatCall, ChatMessage, EncoderPrompt, modality_of
from triptych.proxy.call.json_text import check_depth

#: The limits of sampling parameters, by name: looking at their types costs more than comparing.
_SAMPLING_LIMITS = {
    name: limits
    for name, kind in get_type_hints(SamplingParams, include_extras=True).items()
    if (limits := limits_of(kind)) is not None
}


def in_range(param: str, value: float | None, low: float, high: float) -> None:
    """InvalidRequest unless `low <= value <= high`: limits that are a server's settings."""
    if value is not None:
        check_within(param, value, Meta(ge=low, le=high))


def check_sampling(sampling: SamplingParams) -> SamplingParams:
    """`sampling` if every value is within its limits; top_k -1 (off) becomes 0."""
    for param, limits in _SAMPLING_LIMITS.items():
        if (value := getattr(sampling, param)) is not None:
            check_within(param, value, limits)
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest("min_tokens must not exceed max_tokens", param="min_tokens")
    check_lists(sampling)
    return replace(sampling, top_k=0) if sampling.top_k == -1 else sampling


def seed_of(seed: int | None) -> int:
    """The client's seed as 64 unsigned bits, or a drawn one."""
    if seed is None:
        return secrets.randbits(63)
    check_limits("seed", seed, Seed)
    return seed % (1 << 64)


def check_salt(salt: str) -> str:
    if len(salt) > MAX_SALT or not salt.isprintable():
        raise InvalidRequest(
            f"cache_salt must be at most {MAX_SALT} printable characters", param="cache_salt"
        )
    return salt


def check_options(options: Mapping[str, object], param: str = "mm_processor_kwargs") -> Mapping[str, object]:
    """`options` if they can be part of a key: finite numbers, 64-bit integers, bounded size and depth."""
    if not options:
        return options
    try:
        size = len(msgspec.msgpack.encode(options))
    except (ValueError, OverflowError, RecursionError) as error:
        check_depth(options, param)
        raise InvalidRequest(f"{param} holds a value that cannot be used: {error}", param=param) from None
    if size > MAX_OPTIONS_BYTES:
        raise InvalidRequest(f"{param} must be below {MAX_OPTIONS_BYTES} bytes", param=param)
    check_depth(options, param)
    if not _finite(options):
        raise InvalidRequest(f"{param} must hold finite numbers", param=param)
    return options


def _finite(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(_finite(item) for item in value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return all(_finite(item) for item in value)
    return not isinstance(value, float) or math.isfinite(value)


def check_parts(count: int, param: str = "messages") -> None:
    """Every message, part and call costs, however short its text: to be asked before each is looked at."""
    if count > MAX_PARTS:
        raise InvalidRequest(
            f"{param} holds {count} messages, parts and tool calls; this server takes at most {MAX_PARTS}: "
            "join texts",
            param=param,
        )


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


def check_image_count(count: int, limit: int, param: str = "messages") -> None:
    if count > limit:
        raise InvalidRequest(
            f"{param} holds {count} images; this server takes at most {limit} in one request",
            param=param,
        )


def template_options(
    last: ChatMessage,
    *,
    tools: bytes,
    variables: Mapping[str, object],
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


_READS = {"image": "pictures", "audio": "sound", "text": "text"}


@dataclass(frozen=True, slots=True)
class ModelKind:
    """What a model takes: `modality` is that of its items ("image", "audio", "text")."""

    encoder_decoder: bool = False
    modality: str = "image"
    #: Its PD workers take requests without generation; "generate", "embed" or "score" is what it is made for.
    pools: bool = False
    task: Task = "generate"
    #: The modalities of a prompt's items, where its PD workers name them.
    items: tuple[str, ...] = ()

    @property
    def input_modalities(self) -> tuple[str, ...]:
        """What a prompt may consist of: an encoder-decoder model reads the one kind that its encoder does."""
        return (self.modality,) if self.encoder_decoder else ("text", *(self.items or (self.modality,)))


def fit(call: ChatCall, kind: ModelKind) -> ChatCall:
    """The call as a model of this kind takes it; InvalidRequest names the field that the model cannot take.

    Of a text model, a prompt that stands alone is the encoder's.
    """
    encoder = call.encoder
    _check_task(call, kind)
    if not kind.encoder_decoder:
        if encoder is not None:
            remedy = "messages with the picture" if encoder.modality == "image" else "prompt or messages"
            raise InvalidRequest(
                f"{encoder.param}: {_name(call)} is not an encoder-decoder model; send {remedy}",
                param=encoder.param,
            )
        for part in call.items():
            if kind.items and modality_of(part) not in kind.items:
                takes = f"{_name(call)} takes {', '.join(kind.input_modalities)}"
                raise InvalidRequest(
                    f"{part.param}: {takes} and no {modality_of(part)} in messages: leave it out",
                    param=part.param,
                )
        return call
    if call.messages:
        raise InvalidRequest(
            f"messages: {_name(call)} is an encoder-decoder model, which does not support conversations: use "
            + _remedy(kind),
            param="messages",
        )
    if encoder is None and kind.modality == "text" and call.prompt is not None:
        return replace(call, encoder=EncoderPrompt(call.prompt, "prompt"), prompt=None)
    if encoder is None or encoder.modality != kind.modality:
        param = encoder.param if encoder is not None else "prompt"
        reads = _READS.get(kind.modality, kind.modality)
        raise InvalidRequest(
            f"{param}: the encoder of {_name(call)} reads {reads}: use {_remedy(kind)}", param=param
        )
    return call


#: What models that generate nothing give, and where.
_GIVES: dict[Task, tuple[str, str]] = {
    "embed": ("embeddings", "/v1/embeddings"),
    "score": ("scores", "/v1/rerank"),
    "token_embed": ("a vector for each token", "/pooling or /v1/rerank"),
}
_TOKEN_VECTORS = "a vector for each token needs a late-interaction one, such as ColPali"


def _check_task(call: ChatCall, kind: ModelKind) -> None:
    """Generation is of generating models, a score of a reranker, a vector of each token of a retriever.

    Models other than these two give embeddings as well.
    """
    if call.pooling is None and kind.task != "generate":
        what, path = _GIVES[kind.task]
        raise InvalidRequest(
            f"model: {_name(call)} gives {what} and generates nothing: use POST {path}, or another model",
            param="model",
        )
    if call.pooling is not None and not kind.pools:
        why = "is an encoder-decoder model" if kind.encoder_decoder else "has PD workers that pool nothing"
        raise InvalidRequest(
            f"model: {_name(call)} {why}: it gives no embeddings and no scores, use another model",
            param="model",
        )
    if call.pooling is not None and call.pooling.tokens != (kind.task == "token_embed"):
        what, path = _GIVES.get(kind.task, _GIVES["embed"])
        needed = f", or another model: {_TOKEN_VECTORS}" if call.pooling.tokens else ", or another model"
        raise InvalidRequest(f"model: {_name(call)} gives {what}: use POST {path}{needed}", param="model")


def name_prompt(error: RequestError, param: str) -> RequestError:
    """A worker's complaint about the prompt, in the name of the field that the client sent."""
    if error.param not in ("prompt", "messages") or param in ("prompt", error.param):
        return error
    return type(error)(f"{param}: {error.message}", param=param, retry_after=error.retry_after)


def _name(call: ChatCall) -> str:
    return f"model {call.model[:80]!r}" if call.model else "the model"


def _remedy(kind: ModelKind) -> str:
    if kind.modality == "audio":
        return "POST /v1/audio/transcriptions, or multi_modal_data.audio in POST /v1/completions"
    if kind.modality == "image":
        return "multi_modal_data.image in POST /v1/completions"
    return "prompt or encoder_prompt in POST /v1/completions"
