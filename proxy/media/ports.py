"""Protocols of media: the bytes of an item, and their source."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from triptych.proxy.media.source import AudioPart, ImagePart
from triptych.proxy.media.spool import MediaHold

T = TypeVar("T")


class ItemMedia(Protocol):
    """The bytes of one item, kept until the last holder releases them."""

    nbytes: int

    def retain(self) -> ItemMedia: ...
    def release(self) -> None: ...
    def frames(self, size: int) -> AsyncIterator[bytes]: ...
    def view(self) -> AbstractContextManager[bytes | memoryview]:
        """All bytes at once."""

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Runs `work` on the bytes in a thread."""


class MediaSource(Protocol):
    """The loader of media that requests contain or refer to."""

    @property
    def full(self) -> bool:
        """Whether there is no room for new media."""

    @property
    def held_bytes(self) -> int: ...

    async def load(self, part: ImagePart | AudioPart, hold: MediaHold) -> ItemMedia:
        """The part's bytes, which `hold` keeps. InvalidRequest or TooLarge names the part's field."""

    async def keep_text(self, text: object, encoded: Callable[[], bytes], hold: MediaHold) -> ItemMedia:
        """The bytes of a text encoder's input, which `hold` keeps."""

    def close(self) -> None: ...
