"""Video files that several jobs decode parts of: one process serves them all, front to back."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from triptych.base.errors import InvalidRequest, TooLarge
from triptych.encoder_worker.media.video import MediaClip, VideoLimits
from triptych.encoder_worker.media.work import Abandoned, DecodeWork
from triptych.models.video.clip import ClipInfo


class SharedClip:
    """One file's decoder, from the first job that holds it to the last.

    Jobs ask in threads of their own, one at a time; of those that wait, the one whose frames come first
    behind the last ones decoded is next, so that one decode serves all segments of a file. A decoder that has
    refused is started anew for the next job; one that came to its deadline is not.
    """

    def __init__(self, data: bytes, limits: VideoLimits) -> None:
        self._data = data
        self._limits = limits
        #: Of all its jobs: it ends with the last one.
        self._work = DecodeWork(limit=limits.decode_seconds)
        self._clip: MediaClip | None = None
        self._failed: InvalidRequest | None = None
        self._reached = 0
        self._turn = threading.Condition()
        self._busy = False
        self._waiting: list[tuple[int, int]] = []
        self._numbers = itertools.count()
        #: Jobs that it decodes for, or will.
        self.holders = 0

    def info(self, work: DecodeWork) -> ClipInfo:
        with _Turn(self, -1, work):
            return self._open().info

    def frames(self, indices: Sequence[int], work: DecodeWork) -> np.ndarray:
        with _Turn(self, indices[0], work):
            frames = self._open().frames(indices, work)
            self._reached = indices[-1]
            return frames

    def kill(self) -> None:
        """No job is left: ends the process, without waiting for it."""
        self._work.cancel()
        with self._turn:
            if self._clip is not None:
                self._clip.kill()
            self._turn.notify_all()

    def close(self) -> None:
        """Waits for the end of a process that was killed; where a job is at it, its thread does."""
        with self._turn:
            if self._busy:
                return
            clip, self._clip = self._clip, None
        if clip is not None:
            clip.__exit__()

    def _open(self) -> MediaClip:
        if self._failed is not None:
            raise self._failed
        if self._clip is None:
            self._clip, self._reached = MediaClip(self._data, self._limits, self._work), 0
        return self._clip

    def _enter(self, first: int, work: DecodeWork) -> None:
        entry = (first, next(self._numbers))
        with self._turn:
            self._waiting.append(entry)
            try:
                while self._busy or self._next() != entry:
                    work.check()
                    self._turn.wait()
                work.check()
                self._busy = True
            finally:
                self._waiting.remove(entry)
                self._turn.notify_all()

    def _next(self) -> tuple[int, int]:
        ahead = [entry for entry in self._waiting if entry[0] < 0 or entry[0] >= self._reached]
        return min(ahead or self._waiting)

    def _leave(self, error: BaseException | None) -> None:
        ended = None
        with self._turn:
            if isinstance(error, TooLarge) and self._clip is not None and self._clip.late:
                self._failed = error
            # A job that has left before it asked leaves the decoder to the others.
            alone = isinstance(error, Abandoned) and not self._work.cancelled
            if self._work.cancelled or (error is not None and not alone):
                ended, self._clip = self._clip, None
        try:
            if ended is not None:
                ended.__exit__()
        finally:
            with self._turn:
                self._busy = False
                self._turn.notify_all()

    def wake(self) -> None:
        """A job that may wait for its turn has been cancelled."""
        with self._turn:
            self._turn.notify_all()


class _Turn:
    """One job's turn at the decoder."""

    def __init__(self, clip: SharedClip, first: int, work: DecodeWork) -> None:
        self._clip, self._first, self._work = clip, first, work

    def __enter__(self) -> None:
        with self._work.ended_by(self._clip.wake):
            self._clip._enter(self._first, self._work)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._clip._leave(error)


class ClipHold:
    """One job's hold of a shared clip, until `release`."""

    def __init__(self, clips: SharedClips, key: str, clip: SharedClip) -> None:
        self._clips, self._key, self.clip = clips, key, clip
        self._held = True

    def release(self) -> None:
        """The job is over; the decoder ends with the last one. Idempotent."""
        if self._held:
            self._held = False
            self._clips.drop(self._key, self.clip)


class SharedClips:
    """The video files that jobs of one worker hold, by the digest of each. Used in one event loop."""

    def __init__(self, limits: VideoLimits, in_thread: Callable[[Callable[[], None]], object]) -> None:
        """`in_thread` has a function called beside the event loop."""
        self._limits, self._in_thread = limits, in_thread
        self._clips: dict[str, SharedClip] = {}

    def hold(self, key: str, data: bytes) -> ClipHold:
        """The file's clip, for one more job."""
        clip = self._clips.get(key)
        if clip is None:
            clip = self._clips[key] = SharedClip(data, self._limits)
        clip.holders += 1
        return ClipHold(self, key, clip)

    def drop(self, key: str, clip: SharedClip) -> None:
        """One job less."""
        clip.holders -= 1
        if not clip.holders:
            del self._clips[key]
            clip.kill()
            self._in_thread(clip.close)


class ClipPart:
    """A shared clip as one job sees it; see `triptych.models.video.clip.Clip`."""

    def __init__(self, clip: SharedClip, work: DecodeWork) -> None:
        self._clip, self._work = clip, work

    @cached_property
    def info(self) -> ClipInfo:
        return self._clip.info(self._work)

    def frames(self, indices: Sequence[int]) -> np.ndarray:
        return self._clip.frames(indices, self._work)
