"""Ports of media: the bytes of items, and where they come from."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from triptych.proxy.media.source import AudioPart, ImagePart
from triptych.proxy.media.spool import MediaHold

T = TypeVar("T")


class ItemMedia(Protocol):
    """Bytes of one item, kept until the last holder releases them."""

    nbytes: int

    def retain(self) -> ItemMedia: ...
    def release(self) -> None: ...
    def frames(self, size: int) -> AsyncIterator[bytes]: ...
    def view(self) -> AbstractContextManager[bytes | memoryview]:
        """All bytes at once."""

    async def in_thread(self, work: Callable[[], T]) -> T:
        """`work` on the bytes, beside the event loop."""


class MediaSource(Protocol):
    """Source of the media that requests name."""

    @property
    def full(self) -> bool:
        """Whether new media would find no room."""

    @property
    def held_bytes(self) -> int: ...

    async def load(self, part: ImagePart | AudioPart, hold: MediaHold) -> ItemMedia:
        """The part's bytes, which `hold` keeps. InvalidRequest or TooLarge names the part's field."""

    async def keep_text(self, text: object, encoded: Callable[[], bytes], hold: MediaHold) -> ItemMedia:
        """The bytes of a text encoder's input, which `hold` keeps."""

    def close(self) -> None: ...
