"""Texts and pictures that are embedded or scored, in the forms of Jina, Cohere and vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from triptych.base.errors import InvalidRequest
from triptych.proxy.call.pairs import Content
from triptych.proxy.call.pooled import MAX_INPUTS
from triptych.proxy.call.validation import check_text
from triptych.proxy.media.source import ImagePart
from triptych.proxy.openai.chat.request import ImageUrl, Parts, part_of


class ContentBody(msgspec.Struct, omit_defaults=True):
    """A text, a picture, or a list of such parts."""

    text: str | None = None
    image: str | None = None
    image_url: ImageUrl | str | None = None
    content: str | Parts | None = None


ContentField = str | ContentBody
Contents = Annotated[list[ContentField], Meta(min_length=1, max_length=MAX_INPUTS)]


def parts_of(given: ContentField | Sequence[ContentField]) -> int:
    """The parts of all of them."""
    bodies = [given] if isinstance(given, str | ContentBody) else given
    contents = (body.content for body in bodies if isinstance(body, ContentBody))
    return len(bodies) + sum(len(content) for content in contents if isinstance(content, list))


def content_of(body: ContentField, path: str) -> Content:
    """InvalidRequest names what is missing, or too much."""
    if isinstance(body, str):
        return _text(body, path)
    given = [name for name in ("text", "image", "image_url", "content") if getattr(body, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(f"{path} holds one of text, image, image_url and content", param=path)
    if body.text is not None:
        return _text(body.text, f"{path}.text")
    if isinstance(body.content, str):
        return _text(body.content, f"{path}.content")
    if body.content is not None:
        if not body.content:
            raise InvalidRequest(f"{path}.content must not be empty", param=f"{path}.content")
        return tuple(part_of(f"{path}.content[{at}]", part) for at, part in enumerate(body.content))
    url = body.image if body.image is not None else body.image_url
    name = f"{path}.{given[0]}"
    if isinstance(url, ImageUrl):
        url, name = url.url, f"{name}.url"
    assert url is not None
    return (ImagePart.of_url(url, name),)


def _text(text: str, path: str) -> str:
    if not text:
        raise InvalidRequest(f"{path} must not be empty", param=path)
    check_text(len(text), path)
    return text
