"""The prompts of an encoder-decoder model as a completions body spells them.

Text: `encoder_prompt` and, if wanted, `decoder_prompt`. Audio or a picture: `multi_modal_data`, and the text
or token ids are the decoder's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from triptych.base.errors import InvalidRequest
from triptych.base.request.limits import MAX_TOKEN_ID
from triptych.proxy.call.chat import RawPrompt
from triptych.proxy.call.encoder_prompt import EncoderPrompt
from triptych.proxy.media.source import AudioPart, ImagePart, parse_image_url

MEDIA = "multi_modal_data"
_TEXT, _IDS = "prompt", "prompt_token_ids"
_HEAD = 256


class TwoPromptsBody(Protocol):
    """The body fields that hold the two prompts."""

    prompt: Any
    encoder_prompt: Any
    decoder_prompt: Any
    multi_modal_data: Any


def two_prompts(body: TwoPromptsBody) -> tuple[EncoderPrompt | None, RawPrompt | None]:
    """What the encoder reads, and what the decoder begins with; (None, None) where only `prompt` is given.

    `prompt` itself is not read here: beside media it is the decoder's. InvalidRequest names the field.
    """
    if body.encoder_prompt is None and body.decoder_prompt is None and body.multi_modal_data is None:
        return None, None
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


def _encoder(body: TwoPromptsBody) -> EncoderPrompt | None:
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


def singleton(value: Any, path: str) -> tuple[RawPrompt | None, EncoderPrompt | None]:
    """One prompt in any of its forms: a text, token ids, {"prompt"}, {"prompt_token_ids"}; and its media."""
    if isinstance(value, str) or (isinstance(value, list) and all(type(token) is int for token in value)):
        return _plain(value, path), None
    if not isinstance(value, Mapping):
        raise InvalidRequest(
            f'{path} must be a text, token ids, {{"{_TEXT}": …}} or {{"{_IDS}": […]}}', param=path
        )
    unknown = sorted(set(value) - {_TEXT, _IDS, MEDIA})
    given = [name for name in (_TEXT, _IDS) if value.get(name) is not None]
    if unknown or len(given) > 1 or not (given or value.get(MEDIA)):
        raise InvalidRequest(f"{path} holds one of {_TEXT} and {_IDS}, and may hold {MEDIA}", param=path)
    media = None
    if value.get(MEDIA) is not None:
        media = media_prompt(value[MEDIA], f"{path}.{MEDIA}")
    if not given:
        return None, media
    name = given[0]
    kind = str if name == _TEXT else list
    if not isinstance(value[name], kind):
        raise InvalidRequest(f"{path}.{name} must be a {kind.__name__}", param=f"{path}.{name}")
    return _plain(value[name], f"{path}.{name}"), media


def _plain(value: Any, path: str) -> RawPrompt:
    if not value:
        raise InvalidRequest(f"{path} must not be empty", param=path)
    if isinstance(value, str):
        return value
    if any(type(token) is not int or not 0 <= token <= MAX_TOKEN_ID for token in value):
        raise InvalidRequest(f"{path} must hold token ids: integers from 0", param=path)
    return tuple(value)


def media_prompt(value: Any, path: str) -> EncoderPrompt:
    """{"audio": …} or {"image": …} as what the encoder reads."""
    if not isinstance(value, Mapping) or set(value) not in ({"audio"}, {"image"}):
        raise InvalidRequest(
            f'{path} must read {{"audio": {{"data": BASE64}}}} or {{"image": {{"url": …}}}}, with one file',
            param=path,
        )
    (name,) = value
    where = f"{path}.{name}"
    source = _audio(value[name], where) if name == "audio" else _image(value[name], where)
    return EncoderPrompt(source, where)


def _audio(audio: Any, path: str) -> AudioPart:
    """The file of {"data": BASE64}, or of {"url"}, a data: URL."""
    name, text = _content(audio, path, "data:…")
    if name == "url":
        head, comma, _ = text[:_HEAD].partition(",")
        if not comma or not head.lower().startswith("data:") or not head.lower().endswith(";base64"):
            raise InvalidRequest(
                f"{path}.url must read data:audio/wav;base64,…; audio is not fetched", param=f"{path}.url"
            )
        text = text[len(head) + 1 :]
    return AudioPart(text, path)


def _image(image: Any, path: str) -> ImagePart:
    """The picture of {"data": BASE64} or {"url"}; the URL may stand alone."""
    if isinstance(image, str):
        return ImagePart(parse_image_url(image, path), path)
    name, text = _content(image, path, "…")
    path += f".{name}"
    return ImagePart(text if name == "data" else parse_image_url(text, path), path)


def _content(file: Any, path: str, url: str) -> tuple[str, str]:
    """Which of "data" and "url" a file has, and its text."""
    if not isinstance(file, Mapping) or not (set(file) <= {"data", "format"} or set(file) == {"url"}):
        raise InvalidRequest(f'{path} must read {{"data": BASE64}} or {{"url": "{url}"}}', param=path)
    name = "url" if "url" in file else "data"
    text = file.get(name)
    if not isinstance(text, str) or not text:
        raise InvalidRequest(f"{path}.{name} must be a text", param=f"{path}.{name}")
    return name, text
