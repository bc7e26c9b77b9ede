"""Media on their way to pixels: a budget of host memory, and a thread pool that verifies and preprocesses."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from PIL import Image

from triptych.base import hashing
from triptych.base.cpu.threads import use_threads_here
from triptych.base.errors import InvalidRequest
from triptych.base.types import Options
from triptych.encoder_worker.job_spec import JobSpec
from triptych.encoder_worker.media.audio import AudioLimits, MediaAudio
from triptych.encoder_worker.media.formats import decode_image
from triptych.encoder_worker.media.video import MediaClip, VideoLimits
from triptych.models.base import EncoderSide, PreparedItem
from triptych.models.video.clip import SegmentEnds

#: Media up to this size are hashed in the event loop: a thread switch would take longer.
INLINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class VerifiedMedia:
    """Media bytes whose hash is the item's key, with the options that the key was made with."""

    data: bytes
    options: Mapping[str, object]
    modality: str = ""


class Preparer:
    """Verifies, decodes and preprocesses media, in `threads` threads beside the event loop."""

    def __init__(
        self,
        encoder: EncoderSide,
        *,
        max_pixels: int,
        threads: int,
        audio: AudioLimits | None = None,
        video: VideoLimits | None = None,
    ) -> None:
        self._encoder = encoder
        self._max_pixels = max_pixels
        self._audio = audio or AudioLimits()
        self._video = video or VideoLimits(frame_pixels=max_pixels)
        # The count of now: the tower's own may grow for a batch, and threads that begin then would take it.
        self._pool = ThreadPoolExecutor(
            threads,
            thread_name_prefix="media",
            initializer=use_threads_here,
            initargs=(torch.get_num_threads(),),
        )

    async def verify(self, spec: JobSpec, frames: Sequence[bytes]) -> VerifiedMedia:
        """The joined media; InvalidRequest(param "mm_hash") when that is not their hash."""
        if spec.media_bytes <= INLINE_BYTES:
            return _verify(spec, frames)
        return await asyncio.get_running_loop().run_in_executor(self._pool, _verify, spec, frames)

    async def prepare(self, media: VerifiedMedia) -> PreparedItem:
        """The decoded and preprocessed item; InvalidRequest for media that the model cannot take."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._prepare, media)

    async def segments(self, data: bytes, options: Options, frames: int, extra_rows: int) -> SegmentEnds:
        """Where a video's segments end; empty where it is one item. Decodes nothing.

        TooLarge for one of too many pixels in all its segments.
        """

        def ends() -> SegmentEnds:
            with MediaClip(data, self._video) as clip:
                cut = self._encoder.video_segments(clip.info, options, frames, extra_rows)
                if cut:
                    clip.check_pixels(cut[-1][0])
                return cut

        return await asyncio.get_running_loop().run_in_executor(self._pool, ends)

    def _prepare(self, media: VerifiedMedia) -> PreparedItem:
        if media.modality == "video":
            with MediaClip(media.data, self._video) as clip:
                return self._encoder.preprocess_video(clip, media.options)
        if media.modality == "audio" != self._encoder.modality:
            return self._encoder.preprocess_sound(MediaAudio(media.data, self._audio), media.options)
        return self._encoder.preprocess(self._decoded(media.data), media.options)

    def _decoded(self, data: bytes) -> MediaAudio | bytes | Image.Image:
        """The media in the form that the encoder's `preprocess` takes. Audio is decoded later, only if its
        features are not cached."""
        modality = self._encoder.modality
        if modality == "audio":
            return MediaAudio(data, self._audio)
        return data if modality == "text" else decode_image(data, max_pixels=self._max_pixels)

    def close(self) -> None:
        """Ends the pool and drops queued work."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _verify(spec: JobSpec, frames: Sequence[bytes]) -> VerifiedMedia:
    data = b"".join(frames)
    key = hashing.mm_hash(
        data,
        namespace=spec.namespace,
        modality=spec.modality,
        processor_options=spec.processor_options,
        salt=spec.salt,
    )
    if key != spec.mm_hash:
        raise InvalidRequest(
            "mm_hash: not the hash of the media, options and salt that were sent; "
            "send the same bytes that were hashed",
            param="mm_hash",
        )
    return VerifiedMedia(data, spec.processor_options, spec.modality)


class MediaBudget:
    """A first-come-first-served semaphore over bytes: at most `limit`, or one item alone that is larger.

    An admitted item needs only the media threads to release it, so every wait ends.
    """

    def __init__(self, limit: int) -> None:
        self.nbytes = 0
        self._limit = limit
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, nbytes: int, *, first: bool = False) -> MediaReservation:
        """Room for one item, before its first frame is read; `first` queues it before all other waiters."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (nbytes, granted)
        if first:
            self._waiting.appendleft(entry)
        else:
            self._waiting.append(entry)
        self._serve_waiting()
        try:
            await granted
        except BaseException:
            if granted.done() and not granted.cancelled():
                self.release(nbytes)
            else:
                self._waiting.remove(entry)
                self._serve_waiting()
            raise
        return MediaReservation(self, nbytes)

    def _serve_waiting(self) -> None:
        while self._waiting:
            nbytes, granted = self._waiting[0]
            if self.nbytes and self.nbytes + nbytes > self._limit:
                return
            if granted.done():
                return  # cancelled: it leaves the queue when its task runs, which serves the queue again
            self._waiting.popleft()
            self.nbytes += nbytes
            granted.set_result(None)

    def release(self, nbytes: int) -> None:
        """Returns bytes to the budget."""
        self.nbytes -= nbytes
        self._serve_waiting()


class MediaReservation:
    """One item's share of the budget, until `release`."""

    def __init__(self, budget: MediaBudget, nbytes: int) -> None:
        self._budget = budget
        self._nbytes = nbytes

    def release(self) -> None:
        """Returns all bytes to the budget. Idempotent."""
        nbytes, self._nbytes = self._nbytes, 0
        if nbytes:
            self._budget.release(nbytes)
