"""A body of OpenAI's legacy completions turned into one call per prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
from msgspec import Meta

from triptych.base.errors import InvalidRequest
from triptych.base.request import MAX_TOKEN_ID, MAX_TOKEN_IDS, TokenId
from triptych.base.types import (
    Logprobs,
)
from triptych.proxy.call.chat import ChatCall, EncoderPrompt, RawPrompt
from triptych.proxy.call.validation import check_options, check_salt, check_text, check_token_count, in_range
from triptych.proxy.http.json_body import convert_field, decode_body
from triptych.proxy.media.source import AudioPart, ImagePart
from triptych.proxy.openai.fields.sampling import (
    ChoiceCount,
    ModelName,
    ProcessorOptions,
    ReturnTokenIds,
    Salt,
    SamplingBody,
    SpecialTokens,
    Stream,
    StreamUsage,
    TimingsWanted,
    late,
    refuse_unserved,
    sampling_of,
)

#: Prompts of one request.
MAX_PROMPTS = 64
MEDIA = "multi_modal_data"
_HEAD = 256


class MediaFile(msgspec.Struct, forbid_unknown_fields=True):
    """A file, in base64 or as a URL; of audio a data: URL."""

    data: str | None = None
    url: str | None = None
    format: str | None = None


class EncoderMedia(msgspec.Struct, forbid_unknown_fields=True):
    """One file for the encoder of an encoder-decoder model."""

    audio: MediaFile | None = None
    image: MediaFile | str | None = None


TokenList = Annotated[list[TokenId], Meta(max_length=MAX_TOKEN_IDS)]


class PromptBody(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt as an object: a text or token ids, under either name, and what the encoder reads."""

    prompt: str | None = None
    prompt_token_ids: TokenList | None = None
    prompt_tokens: TokenList | None = None
    multi_modal_data: EncoderMedia | None = None


Singleton = str | TokenList | PromptBody | None
#: A text, token ids, or a list of either.
Prompts = str | PromptBody | Annotated[list[str | TokenId | list[TokenId] | PromptBody], Meta(min_length=1)]


def two_prompts(
    body: CompletionBody, own: EncoderPrompt | None = None
) -> tuple[EncoderPrompt | None, RawPrompt | None]:
    """What the encoder reads, and what the decoder begins with; (None, None) where only `prompt` is given.

    `own` are media within `prompt`. `prompt` itself is not read here: beside media it is the decoder's.
    InvalidRequest names the field.
    """
    if body.encoder_prompt is None and body.decoder_prompt is None and body.multi_modal_data is None:
        return own, None
    if own is not None:
        raise InvalidRequest(
            f"prompt.{MEDIA}: send encoder and decoder prompt in one field, or in two",
            param=f"prompt.{MEDIA}",
        )
    explicit = "encoder_prompt" if body.encoder_prompt is not None else "decoder_prompt"
    if body.prompt is not None and getattr(body, explicit) is not None:
        raise InvalidRequest(
            f"prompt and {explicit} exclude each other: send encoder_prompt and decoder_prompt",
            param="prompt",
        )
    encoder = _encoder(body)
    if encoder is None:
        raise InvalidRequest(
            "decoder_prompt needs an encoder_prompt, or multi_modal_data", param="decoder_prompt"
        )
    decoder = None
    if body.decoder_prompt is not None:
        decoder, media = singleton(body.decoder_prompt, "decoder_prompt")
        if media is not None:
            raise InvalidRequest(
                f"decoder_prompt.{MEDIA}: media are the encoder's", param=f"decoder_prompt.{MEDIA}"
            )
    return encoder, decoder


def _encoder(body: CompletionBody) -> EncoderPrompt | None:
    media = None
    if body.multi_modal_data is not None:
        media = media_prompt(body.multi_modal_data, MEDIA)
    if body.encoder_prompt is None:
        return media
    prompt, own = singleton(body.encoder_prompt, "encoder_prompt")
    if (media is not None) + (own is not None) + (prompt is not None) > 1:
        raise InvalidRequest(
            "encoder_prompt: an encoder takes a single input, a text, audio or an image; put text for the "
            "decoder into decoder_prompt",
            param="encoder_prompt",
        )
    if prompt is not None:
        return EncoderPrompt(prompt, "encoder_prompt")
    return own


def singleton(
    value: str | list[int] | PromptBody, path: str
) -> tuple[RawPrompt | None, EncoderPrompt | None]:
    """One prompt in any of its forms, and its media."""
    if not isinstance(value, PromptBody):
        return _plain(value, path), None
    text, media = value.prompt, value.multi_modal_data
    name = "prompt_token_ids" if value.prompt_tokens is None else "prompt_tokens"
    ids: list[int] | None = getattr(value, name)
    given = sum(form is not None for form in (text, value.prompt_token_ids, value.prompt_tokens))
    if given > 1 or (given == 0 and media is None):
        raise InvalidRequest(
            f"{path} holds one of prompt and prompt_token_ids, and may hold {MEDIA}", param=path
        )
    encoder = None if media is None else media_prompt(media, f"{path}.{MEDIA}")
    if text is not None:
        return _plain(text, f"{path}.prompt"), encoder
    return None if ids is None else _plain(ids, f"{path}.{name}"), encoder


def _plain(value: str | list[int], path: str) -> RawPrompt:
    if not value:
        raise InvalidRequest(f"{path} must not be empty", param=path)
    return value if isinstance(value, str) else tuple(value)


def media_prompt(media: EncoderMedia, path: str) -> EncoderPrompt:
    """What the encoder reads of a request's media."""
    if (media.audio is None) == (media.image is None):
        raise InvalidRequest(
            f'{path} must read {{"audio": {{"data": BASE64}}}} or {{"image": {{"url": …}}}}, with one file',
            param=path,
        )
    if media.audio is not None:
        return EncoderPrompt(_audio(media.audio, f"{path}.audio"), f"{path}.audio")
    assert media.image is not None
    return EncoderPrompt(_image(media.image, f"{path}.image"), f"{path}.image")


def _audio(audio: MediaFile, path: str) -> AudioPart:
    name, text = _content(audio, path)
    if name == "url":
        head, comma, _ = text[:_HEAD].partition(",")
        if not comma or not head.lower().startswith("data:") or not head.lower().endswith(";base64"):
            raise InvalidRequest(
                f"{path}.url must read data:audio/wav;base64,…; audio is not fetched", param=f"{path}.url"
            )
        text = text[len(head) + 1 :]
    return AudioPart(text, path)


def _image(image: MediaFile | str, path: str) -> ImagePart:
    name, text = ("url", image) if isinstance(image, str) else _content(image, path)
    path = path if isinstance(image, str) else f"{path}.{name}"
    return ImagePart(text, path) if name == "data" else ImagePart.of_url(text, path)


def _content(file: MediaFile, path: str) -> tuple[str, str]:
    """Which of "data" and "url" a file has, and its text."""
    if bool(file.data) == bool(file.url):
        raise InvalidRequest(f'{path} must read {{"data": BASE64}} or {{"url": …}}', param=path)
    return ("data", file.data) if file.data else ("url", file.url or "")


#: OpenAI's own default.
DEFAULT_MAX_TOKENS = 16
_SERVED = frozenset({"best_of", "echo", "add_special_tokens"})


class CompletionBody(SamplingBody, kw_only=True):
    """POST /v1/completions. Prompts and media are decoded late; see `two_prompts`."""

    prompt: Annotated[object, late(Prompts), Meta(description="A text, token ids, or a list of either.")] = (
        None
    )
    encoder_prompt: Annotated[
        Singleton,
        Meta(description="What an encoder-decoder model's encoder reads, in place of prompt."),
    ] = None
    decoder_prompt: Annotated[
        Singleton,
        Meta(description="What an encoder-decoder model's decoder begins with; else its own start."),
    ] = None
    multi_modal_data: Annotated[
        EncoderMedia | None,
        Meta(description="Audio or a picture for the encoder of an encoder-decoder model."),
    ] = None
    mm_processor_kwargs: ProcessorOptions = None
    model: ModelName = None
    suffix: str | None = None
    stream: Stream = None
    stream_options: StreamUsage = None
    n: ChoiceCount = None
    best_of: int | None = None
    echo: Annotated[
        bool | None, Meta(description="Put the prompt in front of the text; not with logprobs.")
    ] = None
    logprobs: Annotated[
        Logprobs | None, Meta(description="Report log-probabilities of this many of the likeliest tokens.")
    ] = None
    add_special_tokens: SpecialTokens = None
    return_token_ids: ReturnTokenIds = None
    cache_salt: Salt = None
    triptych_timings: TimingsWanted = None
    user: Annotated[str | None, Meta(description="Ignored.")] = None


_FORMS = "must be a text, token ids, an object with either, or a list of one of these"
_decoder = msgspec.json.Decoder(CompletionBody)


@dataclass(frozen=True, slots=True)
class CompletionReplyOptions:
    """The options of a request that only shape its reply; `n` choices for each of `prompts`.

    A prompt is None where an encoder-decoder model's decoder begins by itself.
    """

    prompts: tuple[RawPrompt | None, ...]
    n: int
    stream: bool
    include_usage: bool
    echo: bool
    logprobs: int | None
    return_token_ids: bool
    timings: bool
    encoder: EncoderPrompt | None = None


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """`calls` are in the order of the prompts."""

    request_id: str
    calls: tuple[ChatCall, ...]
    options: CompletionReplyOptions


def parse_completion(
    raw: bytes, request_id: str, *, timeout: float, max_choices: int = 1
) -> CompletionRequest:
    """The request that `raw` (JSON) holds. InvalidRequest names what is wrong with it."""
    body = decode_body(_decoder, raw)
    _refuse(body)
    in_range("n", body.n, 1, max_choices)
    n = body.n or 1
    if body.best_of not in (None, n):
        raise InvalidRequest("best_of must be equal to n: the server returns all it makes", param="best_of")
    own = None
    if isinstance(body.prompt, dict) and MEDIA in body.prompt:
        prompt, own = singleton(convert_field(body.prompt, PromptBody, "prompt"), "prompt")
        body.prompt = list(prompt) if isinstance(prompt, tuple) else prompt
    encoder, decoder = two_prompts(body, own)
    prompts: tuple[RawPrompt | None, ...] = (decoder,)
    if encoder is None or body.prompt is not None:
        prompts = raw_prompts(body.prompt)
    if encoder is not None and body.echo:
        raise InvalidRequest("echo is not supported with encoder_prompt", param="echo")
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    first = ChatCall(
        label=request_id,
        model=body.model or "",
        messages=(),
        sampling=sampling_of(body, max_tokens=limit, logprobs=body.logprobs),
        timeout=timeout,
        cache_salt=check_salt(body.cache_salt or ""),
        processor_options=_processor_options(body, encoder),
        n=n,
        priority=body.priority or 0,
        prompt=prompts[0],
        prompt_param="decoder_prompt" if body.decoder_prompt is not None else "prompt",
        encoder=encoder,
        whole=not body.stream,
    )
    calls = [first]
    for index, prompt in enumerate(prompts[1:], start=1):
        # Equal seeds for unequal prompts: a prompt's answer does not depend on its place in the list.
        calls.append(replace(first, label=f"{request_id}#p{index}", prompt=prompt))
    form = CompletionReplyOptions(
        prompts=prompts,
        n=n,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        echo=bool(body.echo),
        logprobs=body.logprobs,
        return_token_ids=bool(body.return_token_ids),
        timings=bool(body.triptych_timings),
        encoder=encoder,
    )
    return CompletionRequest(request_id, tuple(calls), form)


def _processor_options(body: CompletionBody, encoder: EncoderPrompt | None) -> Mapping[str, object]:
    options = check_options(body.mm_processor_kwargs or {})
    if options and (encoder is None or encoder.modality != "image"):
        raise InvalidRequest(
            "mm_processor_kwargs is only allowed with multi_modal_data.image", param="mm_processor_kwargs"
        )
    return options


def _refuse(body: CompletionBody) -> None:
    refuse_unserved(body, _SERVED)
    if body.suffix:
        raise InvalidRequest("suffix is not supported: put the text into prompt", param="suffix")
    if body.add_special_tokens is False:
        raise InvalidRequest(
            "add_special_tokens: false is not supported: send the prompt as token ids",
            param="add_special_tokens",
        )
    if body.echo and body.logprobs is not None:
        raise InvalidRequest(
            "echo with logprobs is not supported: only output tokens have logprobs", param="echo"
        )


def raw_prompts(prompt: object, param: str = "prompt", limit: int = MAX_PROMPTS) -> tuple[RawPrompt, ...]:
    """The prompts of the four forms of the field `param`."""
    if prompt is None:
        raise InvalidRequest(f"{param} is missing: send a text or token ids", param=param)
    if not prompt:
        raise InvalidRequest(f"{param} must not be empty", param=param)
    if not isinstance(prompt, list) or type(prompt[0]) is int:
        return (_checked(prompt, param),)
    if len(prompt) > limit:
        raise InvalidRequest(f"{param} takes at most {limit}: send several requests", param=param)
    if len({type(item) for item in prompt}) > 1:
        raise InvalidRequest(f"{param} {_FORMS}", param=param)
    return tuple(_checked(item, f"{param}[{at}]") for at, item in enumerate(prompt))


def _checked(prompt: object, path: str) -> RawPrompt:
    if isinstance(prompt, dict):
        value, media = singleton(convert_field(prompt, PromptBody, path), path)
        if media is not None or value is None:
            raise InvalidRequest(
                f"{path}.{MEDIA}: send it as encoder_prompt.{MEDIA}", param=f"{path}.{MEDIA}"
            )
        prompt = list(value) if isinstance(value, tuple) else value
    if isinstance(prompt, str | list) and not prompt:
        raise InvalidRequest(f"{path} must not be empty", param=path)
    if isinstance(prompt, str):
        check_text(len(prompt), path)
        return prompt
    if not isinstance(prompt, list):
        raise InvalidRequest(f"{path} {_FORMS}", param=path)
    check_token_count(len(prompt), path)
    if any(type(token) is not int or not 0 <= token <= MAX_TOKEN_ID for token in prompt):
        raise InvalidRequest(f"{path} must hold token ids: integers from 0", param=path)
    return tuple(prompt)
