"""Rules on a request's values and output format that both front doors share; errors name the remedy."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Protocol, get_type_hints

import msgspec
from msgspec import Meta

from triptych.base.errors import InvalidRequest, RequestError
from triptych.base.request import (
    MAX_CHOICE_TEXTS,
    MAX_DESCRIPTION,
    MAX_FORMAT,
    MAX_NAME,
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
    OutputFormat,
    SamplingParams,
    Task,
)
from triptych.proxy.call.chat import ChatCall, ChatMessage, EncoderPrompt, modality_of
from triptych.proxy.call.json_text import check_depth, decode_text

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
        raise InvalidRequest(
            f"model: {_name(call)} gives {what}: use POST {path}, or another model", param="model"
        )


def name_prompt(error: RequestError, param: str) -> RequestError:
    """A worker's complaint about the prompt, in the name of the field that the client sent."""
    if error.param != "prompt" or param == "prompt":
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


#: What a PD worker calls the field, whatever the client called it.
WORKERS_FIELD = "response_format"
JSON_OBJECT = OutputFormat("json_object")


class TextFormat(msgspec.Struct, tag="text"):
    """Plain text."""


class ObjectFormat(msgspec.Struct, tag="json_object"):
    """Any JSON object."""


class NamedSchema(msgspec.Struct, kw_only=True):
    """A JSON schema, which is always held to; `strict` false: as it is written, with nothing closed."""

    name: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    description: Annotated[str, Meta(max_length=MAX_DESCRIPTION)] | None = None
    schema: object = None
    strict: bool | None = None


class SchemaFormat(msgspec.Struct, tag="json_schema"):
    """JSON that fits a schema."""

    json_schema: NamedSchema


ResponseFormat = TextFormat | ObjectFormat | SchemaFormat


class FormatBody(Protocol):
    """The fields that name a form; at most one of them may be set."""

    response_format: ResponseFormat | None
    structured_outputs: dict[str, object] | None
    guided_json: str | dict[str, object] | bool | None
    guided_regex: str | None
    guided_choice: list[str] | None


def format_of(body: FormatBody) -> OutputFormat | None:
    """The form that the body names; None for plain text. InvalidRequest names the field."""
    formats: dict[str, OutputFormat] = {}
    if body.response_format is not None and (form := response_format(body.response_format)):
        formats["response_format"] = form
    if body.structured_outputs is not None and (form := structured_outputs(body.structured_outputs)):
        formats["structured_outputs"] = form
    if body.guided_json is not None:
        formats["guided_json"] = schema_format(body.guided_json, "guided_json")
    if body.guided_regex is not None:
        formats["guided_regex"] = regex_format(body.guided_regex, "guided_regex")
    if body.guided_choice is not None:
        formats["guided_choice"] = choice_format(body.guided_choice, "guided_choice")
    if len(formats) > 1:
        first, second, *_ = formats
        raise InvalidRequest(f"{second} contradicts {first}: leave one of them out", param=second)
    return next(iter(formats.values()), None)


def response_format(form: ResponseFormat) -> OutputFormat | None:
    """The form that OpenAI's field names."""
    if isinstance(form, TextFormat):
        return None
    if isinstance(form, ObjectFormat):
        return JSON_OBJECT
    named = form.json_schema
    param = "response_format.json_schema.schema"
    return replace(schema_format(named.schema, param), open=named.strict is False)


def structured_outputs(body: Mapping[str, object], param: str = "structured_outputs") -> OutputFormat | None:
    """vLLM's {"json" | "regex" | "choice" | "json_object": …}; grammars and structural tags are refused."""
    # What is empty is named all the same: `{}` is a schema, and no text is among no choices.
    named = [
        key
        for key in ("json", "regex", "choice", "json_object")
        if body.get(key) is not None and not (key == "json_object" and body[key] is False)
    ]
    for key in ("grammar", "structural_tag"):
        if body.get(key):
            raise InvalidRequest(
                f"{param}.{key} is not supported: use json, regex or choice", param=f"{param}.{key}"
            )
    if not named:
        return None
    if len(named) > 1:
        raise InvalidRequest(
            f"{param}.{named[1]} contradicts {param}.{named[0]}: leave one of them out",
            param=f"{param}.{named[1]}",
        )
    key, path = named[0], f"{param}.{named[0]}"
    if key == "json":
        return schema_format(body[key], path)
    if key == "regex":
        return regex_format(body[key], path)
    return choice_format(body[key], path) if key == "choice" else JSON_OBJECT


def schema_format(schema: object, param: str) -> OutputFormat:
    """A JSON schema, as an object or as the text of one. What it says is the PD worker's to judge."""
    if schema is None or schema == "":
        remedy = "send a JSON schema, or the type json_object"
        raise InvalidRequest(f"{param} is missing: {remedy}", param=param)
    if isinstance(schema, str):
        # White space and escapes in it are gone once it is encoded again.
        schema = decode_text(schema, object, param, 4 * MAX_FORMAT)
    if not isinstance(schema, Mapping) and schema is not True:
        raise InvalidRequest(f"{param} must be a JSON schema: an object", param=param)
    try:
        text = "{}" if schema is True else msgspec.json.encode(schema).decode()
    except RecursionError:
        check_depth(schema, param)
        raise
    _short(text, param)
    check_depth(schema, param)
    return OutputFormat("json_schema", text, param=param)


def regex_format(pattern: object, param: str) -> OutputFormat:
    if not isinstance(pattern, str) or not pattern:
        raise InvalidRequest(f"{param} must be a regular expression", param=param)
    return OutputFormat("regex", _short(pattern, param), param=param)


def choice_format(texts: object, param: str) -> OutputFormat:
    if (
        not isinstance(texts, list | tuple)
        or not 1 <= len(texts) <= MAX_CHOICE_TEXTS
        or not all(isinstance(text, str) and text for text in texts)
    ):
        raise InvalidRequest(
            f"{param} must be a list of 1 to {MAX_CHOICE_TEXTS} texts, none of them empty: send what the "
            "answer may be, or leave it out",
            param=param,
        )
    _short("".join(texts), param)
    return OutputFormat("choices", choices=tuple(dict.fromkeys(texts)), param=param)


def name_field(error: RequestError, form: OutputFormat | None) -> RequestError:
    """A worker's complaint about the form, in the name of the field that the client sent."""
    if form is None or error.param != WORKERS_FIELD:
        return error
    message = error.message.replace(WORKERS_FIELD, form.param, 1)
    return type(error)(message, param=form.param, retry_after=error.retry_after)


def _short(text: str, param: str, limit: int = MAX_FORMAT) -> str:
    if len(text) > limit:
        raise InvalidRequest(f"{param} must be at most {limit} characters long", param=param)
    return text
