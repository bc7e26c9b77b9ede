"""Media from `file:` URLs, below the folder of --allowed-media-folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from triptych.base.config import format_size
from triptych.base.errors import ConfigError, InvalidRequest, TooLarge


def checked_folder(folder: str) -> str:
    """The folder's real path; empty stays empty. ConfigError when it is not a folder that may be served."""
    if not folder:
        return ""
    real = os.path.realpath(folder)
    if not os.path.isdir(real) or real == "/":
        raise ConfigError(f"--allowed-media-folder {folder!r} is not a folder that can be served")
    return real


class MediaFolder:
    """The files below `folder` (a real path; empty: none), of at most `max_bytes` each."""

    def __init__(self, folder: str, max_bytes: int) -> None:
        self._folder = checked_folder(folder)
        self._max_bytes = max_bytes

    def read(self, path: str, param: str) -> bytes:
        """The regular file's bytes. Blocks: call it in a thread.

        InvalidRequest with one message for all files that may not or cannot be read, so that clients learn
        nothing about files outside the folder.
        """
        if not self._folder:
            raise InvalidRequest(f"{param}: file: URLs are not served here", param=param)
        refusal = InvalidRequest(f"{param}: no such file below the folder that is served", param=param)
        try:
            real = os.path.realpath(path)
            if not Path(real).is_relative_to(self._folder):
                raise refusal
            # NOFOLLOW: the last part may be a link by now. NONBLOCK: a pipe would wait for a writer.
            descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError):
            raise refusal from None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode) or not self._holds(descriptor):
                raise refusal
            data = _read(descriptor, self._max_bytes + 1)
        except OSError:
            raise refusal from None
        finally:
            os.close(descriptor)
        if len(data) > self._max_bytes:
            raise TooLarge(f"{param}: the file is above {format_size(self._max_bytes)}", param=param)
        return data

    def _holds(self, descriptor: int) -> bool:
        """Whether the opened file lies below the folder: a part of the path may be a link by now."""
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(self._folder)


def _read(descriptor: int, limit: int) -> bytes:
    pieces: list[bytes] = []
    while limit and (piece := os.read(descriptor, min(limit, 1 << 20))):
        pieces.append(piece)
        limit -= len(piece)
    return b"".join(pieces)
