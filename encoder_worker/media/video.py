"""Videos to frames: decoded by a process of their own, within limits, which is killed at its deadline."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

from triptych.base.errors import InvalidRequest, TooLarge
from triptych.models.video.clip import ClipInfo

logger = logging.getLogger(__name__)

_PROGRAM = Path(__file__).with_name("clip_decoder.py")
#: Longest line that the process prints.
_MAX_LINE = 4096
_DAMAGED = "the file is truncated or damaged; convert it to MP4 again, or send another"


@dataclass(frozen=True, slots=True)
class VideoLimits:
    """Limits of one file: its length, pixels of a frame and of all sampled ones, frames, time to decode."""

    seconds: float = 600.0
    frame_pixels: int = 40_000_000
    sampled_pixels: int = 256_000_000
    frames: int = 120_000
    decode_seconds: float = 120.0


class MediaClip:
    """One item's file; see `triptych.models.video.clip.Clip`. To be closed: it holds a process."""

    def __init__(self, data: bytes, limits: VideoLimits) -> None:
        self._limits = limits
        if importlib.util.find_spec("av") is None:
            raise InvalidRequest(
                "video: this server decodes no videos: install triptych[video] for its encoder workers",
                param="video",
            )
        given = {"seconds": limits.seconds, "frames": limits.frames, "pixels": limits.frame_pixels}
        descriptor = os.memfd_create("video", os.MFD_CLOEXEC)
        try:
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(data)
            os.lseek(descriptor, 0, os.SEEK_SET)
            # Isolated: neither the folder nor variables of this process decide what it imports.
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_PROGRAM), str(descriptor), json.dumps(given)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[descriptor],
            )
        finally:
            os.close(descriptor)
        self._late = threading.Event()
        self._deadline = threading.Timer(limits.decode_seconds, self._kill)
        self._deadline.daemon = True
        self._deadline.start()

    def __enter__(self) -> MediaClip:
        return self

    def __exit__(self, *_: object) -> None:
        self._deadline.cancel()
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()

    @cached_property
    def info(self) -> ClipInfo:
        index = self._line()
        return ClipInfo(index["frames"], index["fps"], index["width"], index["height"])

    def frames(self, indices: Sequence[int]) -> np.ndarray:
        """uint8 [len(indices), height, width, 3] of ascending indices; TooLarge beyond the limits. Once."""
        info, count = self.info, len(indices)
        pixels = count * info.width * info.height
        if pixels > self._limits.sampled_pixels:
            raise TooLarge(
                f"video: {count} frames of {info.width}x{info.height} are more than the "
                f"{self._limits.sampled_pixels} pixels allowed; send a smaller video, or sample fewer frames",
                param="video",
            )
        frames = np.empty((count, info.height, info.width, 3), dtype=np.uint8)
        pipe = self._process.stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps([int(index) for index in indices]).encode() + b"\n")
            pipe.flush()
        except OSError:
            raise self._refused({}) from None
        for frame in frames:
            mark = self._stdout.read(1)
            view = frame.reshape(-1).data
            # Anything but a frame is the line that says why there is none.
            if mark != b"F" or self._stdout.readinto(view) != len(view):  # type: ignore[attr-defined]
                raise self._refused(_parsed(mark + self._stdout.readline(_MAX_LINE)))
        return frames

    @property
    def _stdout(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def _line(self) -> dict[str, Any]:
        line = _parsed(self._stdout.readline(_MAX_LINE))
        if "frames" not in line:
            raise self._refused(line)
        return line

    def _refused(self, line: dict[str, Any]) -> InvalidRequest:
        if self._late.is_set():
            seconds = f"{self._limits.decode_seconds:g}"
            message = f"video: it was not decoded within {seconds} s; send a shorter or smaller one"
            return TooLarge(message, param="video")
        # A process that ends without an answer has met its memory limit, or a fault of a decoder.
        message = line.get("error") or _DAMAGED
        logger.info("a video could not be decoded (%s)", line.get("cause") or message)
        return (TooLarge if line.get("large") else InvalidRequest)(f"video: {message}", param="video")

    def _kill(self) -> None:
        self._late.set()
        self._process.kill()


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(line)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
