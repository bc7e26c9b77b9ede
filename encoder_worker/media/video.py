"""Videos to frames: decoded by a process of their own, within limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from triptych.base.errors import TooLarge
from triptych.encoder_worker.media.decoder_process import DecoderProcess
from triptych.encoder_worker.media.work import DecodeWork
from triptych.models.video.clip import ClipInfo


@dataclass(frozen=True, slots=True)
class VideoLimits:
    """Limits of one file: its length, pixels of a frame and of all sampled ones, frames, time to decode."""

    seconds: float = 600.0
    frame_pixels: int = 40_000_000
    sampled_pixels: int = 256_000_000
    frames: int = 120_000
    decode_seconds: float = 30.0


class MediaClip(DecoderProcess):
    """One item's file; see `triptych.models.video.clip.Clip`. To be closed: it holds a process."""

    noun: ClassVar[str] = "video"
    format: ClassVar[str] = "MP4"

    def __init__(self, data: bytes, limits: VideoLimits, work: DecodeWork | None = None) -> None:
        self._limits = limits
        self._work = work
        given = {"seconds": limits.seconds, "frames": limits.frames, "pixels": limits.frame_pixels}
        super().__init__(data, given, limits.decode_seconds, work)

    @cached_property
    def info(self) -> ClipInfo:
        with self.question(self._work):
            index = self.line("frames")
        return ClipInfo(index["frames"], index["fps"], index["width"], index["height"])

    def check_pixels(self, count: int) -> None:
        """TooLarge for more sampled frames than the limit of pixels has room for."""
        info = self.info
        if count * info.width * info.height > self._limits.sampled_pixels:
            raise TooLarge(
                f"video: {count} frames of {info.width}x{info.height} are more than the "
                f"{self._limits.sampled_pixels} pixels allowed; send a smaller video, or sample fewer frames",
                param="video",
            )

    def frames(self, indices: Sequence[int], work: DecodeWork | None = None) -> np.ndarray:
        """uint8 [len(indices), height, width, 3] of ascending indices; TooLarge beyond the limits.

        The decoder goes on from the last call's frames where these are not behind the first of them.
        """
        info, count, work = self.info, len(indices), work or self._work
        self.check_pixels(count)
        if work is not None:
            work.hold(count * info.height * info.width * 3)
        frames = np.empty((count, info.height, info.width, 3), dtype=np.uint8)
        with self.question(self._work):
            self.ask([int(index) for index in indices])
            for frame in frames:
                mark = self.stdout.read(1)
                # Anything but a frame is the line that says why there is none.
                if mark != b"F" or not self.read_into(frame.reshape(-1).data):
                    raise self.refused(mark)
        return frames
