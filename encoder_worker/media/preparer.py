"""Media on their way to pixels: a thread pool that verifies and preprocesses them, with decoder processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, ParamSpec, TypeVar

import numpy as np
import torch
from blake3 import blake3
from PIL import Image

from triptych.base import hashing
from triptych.base.cpu.threads import use_threads_here
from triptych.base.errors import InvalidRequest
from triptych.base.types import Options
from triptych.encoder_worker.decode_places import DecodePlaces
from triptych.encoder_worker.job_spec import JobSpec
from triptych.encoder_worker.media.audio import AudioLimits, MediaAudio
from triptych.encoder_worker.media.budget import MediaBudget
from triptych.encoder_worker.media.decoder_process import DecoderProcess, package_root
from triptych.encoder_worker.media.formats import decode_image
from triptych.encoder_worker.media.jpeg import ArrayImage
from triptych.encoder_worker.media.shared_clips import ClipHold, ClipPart, SharedClips
from triptych.encoder_worker.media.video import MediaClip, VideoLimits
from triptych.encoder_worker.media.work import DecodeWork, TooHeavy
from triptych.models.base import EncoderSide, PreparedItem
from triptych.models.video.clip import SegmentEnds

#: Media up to this size are hashed in the event loop: a thread switch would take longer.
INLINE_BYTES = 1 << 20

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class VerifiedMedia:
    """Media bytes whose hash is the item's key, with the options that the key was made with.

    `file` is the same for all parts of one tenant's video; empty for other media.
    """

    data: bytes
    options: Mapping[str, object]
    modality: str = ""
    file: str = ""


class PictureProcess(DecoderProcess):
    """A picture that takes long to decode. To be closed."""

    noun: ClassVar[str] = "image"
    format: ClassVar[str] = "PNG"
    program: ClassVar[str] = "media_decoder.py"
    needs: ClassVar[tuple[str, str]] = ("PIL", "triptych")

    def __init__(self, data: bytes, max_pixels: int, work: DecodeWork) -> None:
        self._work = work
        super().__init__(data, {"pixels": max_pixels, "root": package_root()}, work.limit, work)

    def picture(self) -> Image.Image:
        with self.question(self._work):
            size = self.line("width")
            pixels = np.empty((size["height"], size["width"], 3), dtype=np.uint8)
            if not self.read_into(pixels.reshape(-1).data):
                raise self.refused()
        return ArrayImage(pixels)


class Preparer:
    """Verifies, decodes and preprocesses media, in threads beside the event loop.

    Whoever calls sees to it that no more decodes run at once than `DecodePlaces` of as many `threads` has.
    Decoded bytes are held in `decoded`.
    """

    def __init__(
        self,
        encoder: EncoderSide,
        *,
        max_pixels: int,
        threads: int,
        audio: AudioLimits | None = None,
        video: VideoLimits | None = None,
        decoded: MediaBudget | None = None,
    ) -> None:
        self._encoder = encoder
        self._max_pixels = max_pixels
        self._audio = audio or AudioLimits()
        self._video = video or VideoLimits(frame_pixels=max_pixels)
        self._decoded_bytes = decoded
        # Small pictures go through no more threads than decode them: an executor wakes its threads in turn,
        # and each has buffers of its own. The others are for what waits for processes, and one for
        # verification, which waits for no decode.
        self._threads = _executor("media", threads)
        self._beside = _executor("beside media", DecodePlaces(threads).total - threads + 1)
        self._clips = SharedClips(self._video, self._beside.submit)

    def work(self, *, tenant: str = "", heavy: bool) -> DecodeWork:
        """The work of one decode, for `prepare` and `segments`."""
        limit = self._video.decode_seconds
        return DecodeWork(tenant=tenant, heavy=heavy, limit=limit, decoded=self._decoded_bytes)

    async def verify(self, spec: JobSpec, frames: Sequence[bytes]) -> VerifiedMedia:
        """The joined media; InvalidRequest(param "mm_hash") when that is not their hash."""
        if spec.media_bytes <= INLINE_BYTES:
            return _verify(spec, frames)
        return await asyncio.get_running_loop().run_in_executor(self._beside, _verify, spec, frames)

    def hold(self, media: VerifiedMedia) -> ClipHold | None:
        """What a job holds until its end, so that one decode serves all parts of a video."""
        return self._clips.hold(media.file, media.data) if media.file else None

    async def prepare(
        self, media: VerifiedMedia, work: DecodeWork, hold: ClipHold | None = None
    ) -> PreparedItem:
        """The decoded and preprocessed item; InvalidRequest for media that the model cannot take.

        TooHeavy where the work is not; Abandoned once it is cancelled.
        """
        return await self._in_thread(work, self._prepare, media, work, hold)

    async def segments(
        self, data: bytes, options: Options, frames: int, extra_rows: int, work: DecodeWork
    ) -> SegmentEnds:
        """Where a video's segments end; empty where it is one item. Decodes nothing.

        TooLarge for one of too many pixels in all its segments.
        """

        def ends() -> SegmentEnds:
            with MediaClip(data, self._video, work) as clip:
                cut = self._encoder.video_segments(clip.info, options, frames, extra_rows)
                if cut:
                    clip.check_pixels(cut[-1][0])
                return cut

        return await self._in_thread(work, ends)

    async def _in_thread(
        self, work: DecodeWork, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """What the function returns once its thread has ended, which a cancelled task does not outlive."""

        def run() -> T:
            work.check()
            return function(*args, **kwargs)

        loop, cancelled = asyncio.get_running_loop(), False
        ended: asyncio.Future[None] = loop.create_future()

        def tell() -> None:
            if not ended.done():
                ended.set_result(None)

        def end(_: Future[T]) -> None:
            try:
                loop.call_soon_threadsafe(tell)
            except RuntimeError:
                return  # the end of the event loop

        # Straight to the waiting task: the interpreter's lock, which decoding threads hold, is asked for with
        # every turn of the loop in between, and a thread idles meanwhile.
        future = (self._beside if work.heavy else self._threads).submit(run)
        future.add_done_callback(end)
        while True:
            try:
                await ended
                break
            except asyncio.CancelledError:
                cancelled = True
                work.cancel()
                if future.done():
                    break
                ended = loop.create_future()
        work.release()
        if cancelled or future.cancelled():
            raise asyncio.CancelledError
        return future.result()

    def _prepare(self, media: VerifiedMedia, work: DecodeWork, hold: ClipHold | None) -> PreparedItem:
        if media.modality == "video":
            if hold is not None:
                return self._encoder.preprocess_video(ClipPart(hold.clip, work), media.options)
            with MediaClip(media.data, self._video, work) as clip:
                return self._encoder.preprocess_video(clip, media.options)
        if media.modality == "audio" != self._encoder.modality:
            return self._encoder.preprocess_sound(MediaAudio(media.data, self._audio, work), media.options)
        return self._encoder.preprocess(self._decoded(media.data, work), media.options)

    def _decoded(self, data: bytes, work: DecodeWork) -> MediaAudio | bytes | Image.Image:
        """The media in the form that the encoder's `preprocess` takes. Audio is decoded later, only if its
        features are not cached."""
        modality = self._encoder.modality
        if modality == "audio":
            return MediaAudio(data, self._audio, work)
        if modality == "text":
            return data

        def expect(seconds: float, nbytes: int) -> None:
            work.expect("image", seconds, nbytes)
            if work.heavy:
                raise TooHeavy  # for this thread: now that its bytes are held, a process decodes it

        try:
            return decode_image(data, max_pixels=self._max_pixels, expect=expect)
        except TooHeavy:
            if not work.heavy:
                raise
        with PictureProcess(data, self._max_pixels, work) as process:
            return process.picture()

    def close(self) -> None:
        """Ends the threads and drops queued work."""
        for executor in (self._threads, self._beside):
            executor.shutdown(wait=False, cancel_futures=True)


def _executor(name: str, threads: int) -> ThreadPoolExecutor:
    # The count of torch's threads of now: the tower's own may grow for a batch, and threads that begin then
    # would take it.
    return ThreadPoolExecutor(
        threads, thread_name_prefix=name, initializer=use_threads_here, initargs=(torch.get_num_threads(),)
    )


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
    file = ""
    if spec.modality == "video":
        # With the salt, which keeps tenants apart: none may tell by the time it takes what others decode.
        file = hashing.framed_digest([("salt", spec.salt.encode()), ("file", blake3(data).digest())])
    return VerifiedMedia(data, spec.processor_options, spec.modality, file)
