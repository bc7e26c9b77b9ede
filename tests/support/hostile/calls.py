"""What is left of a request once it is read, and how much it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import msgspec

from triptych.base.errors import RequestError
from triptych.proxy.call.chat import ChatCall
from triptych.proxy.media.source import AudioPart, ImagePart, VideoPart
from triptych.proxy.splitter import split

#: Characters and numbers of a call beside its text.
BESIDE_TEXT = 1 << 20


async def refused_later(read: Any) -> bool:
    """Whether a call without media is refused before it goes anywhere."""
    for call in calls_in(read):
        if not call.items() and (call.encoder is None or isinstance(call.encoder.source, str | tuple)):
            try:
                await split(call, "n", NO_MEDIA)
            except RequestError:
                return True
    return False


class _NoMedia:
    async def keep_text(self, source: Any, content: Any, hold: Any) -> Any:
        async def in_thread(work: Any) -> str:
            return "0" * 64

        return SimpleNamespace(in_thread=in_thread)


NO_MEDIA: Any = _NoMedia()


def calls_in(value: Any) -> Iterator[ChatCall]:
    if isinstance(value, ChatCall):
        yield value
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from calls_in(inner)
    elif is_dataclass(value):
        for field in fields(value):
            yield from calls_in(getattr(value, field.name))


def weight(value: Any) -> int:
    """Characters, bytes and numbers in a value, those of media left out."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, ImagePart | AudioPart | VideoPart):
        return 0
    if isinstance(value, dict):
        return sum(weight(key) + weight(inner) for key, inner in value.items())
    if isinstance(value, tuple | list | frozenset):
        return sum(map(weight, value))
    if isinstance(value, msgspec.Struct):
        return sum(weight(getattr(value, field)) for field in value.__struct_fields__)
    if is_dataclass(value) and not isinstance(value, type):
        return sum(weight(getattr(value, field.name)) for field in fields(value) if field.name != "media")
    return 2 if isinstance(value, int | float) else 0
