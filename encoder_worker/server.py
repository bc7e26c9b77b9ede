"""The Encode stream: frames in, events out; every stream ends with ready or failed within its time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from triptych.encoder_worker.jobs.job import Failed, JobEvent, JobSpec, Ready, Waiter
from triptych.encoder_worker.jobs.limits import ItemFormat
from triptych.encoder_worker.jobs.table import JobTable
from triptych.encoder_worker.media.budget import MediaBudget
from triptych.encoder_worker.messages import event_message, parse_job
from triptych.errors import DeadlineExceeded, InternalError, InvalidRequest, RequestError
from triptych.protos import encoder_pb2, encoder_pb2_grpc
from triptych.rpc.channels import MEDIA_FRAME_BYTES

logger = logging.getLogger(__name__)

#: Seconds for the first message of a stream.
FIRST_MESSAGE_SECONDS = 10.0
#: Seconds between two messages of a stream whose media are on their way.
FRAME_SECONDS = 30.0


class EncoderServicer(encoder_pb2_grpc.EncoderServiceServicer):
    """Translates streams into calls of the job table, and its events into messages."""

    def __init__(self, jobs: JobTable, media: MediaBudget) -> None:
        self._jobs = jobs
        self._media = media

    async def Encode(
        self, request_iterator: AsyncIterator[encoder_pb2.EncodeRequest], context: Any
    ) -> AsyncIterator[encoder_pb2.EncodeEvent]:
        """One job; see the protocol."""
        events: asyncio.Queue[JobEvent] = asyncio.Queue()
        try:
            spec = await _first(request_iterator, self._jobs.format)
            waiter = Waiter(spec, time.monotonic() + spec.timeout, events.put_nowait)
            self._jobs.join(waiter)
        except RequestError as error:
            yield event_message(Failed(error, retryable=error.status == 429 or error.status >= 500))
            return
        frames = asyncio.create_task(self._read(request_iterator, waiter))
        try:
            async for event in self._events(events, waiter):
                yield event_message(event)
        finally:
            frames.cancel()
            self._jobs.leave(waiter)

    async def _events(self, events: asyncio.Queue[JobEvent], waiter: Waiter) -> AsyncIterator[JobEvent]:
        """The stream's events up to its last, which comes at the deadline if not before."""
        while True:
            try:
                async with asyncio.timeout(waiter.deadline - time.monotonic()):
                    event = await events.get()
            except TimeoutError:
                self._jobs.fail_late(waiter)
                event = await events.get()
            yield event
            if isinstance(event, Ready | Failed):
                return

    async def _read(self, requests: AsyncIterator[encoder_pb2.EncodeRequest], waiter: Waiter) -> None:
        try:
            await self._read_frames(requests, waiter)
        except RequestError as refused:
            self._jobs.fail(waiter, refused, retryable=refused.status >= 500)
        except Exception:
            # The stream is broken, or we are: either way it must not wait for its deadline.
            spec = waiter.spec
            logger.warning(
                "job %.64r of request %.128r (%.64r) could not be read",
                *(spec.job_id, spec.label, spec.request_id),
                exc_info=True,
            )
            error = InternalError("the job's stream could not be read")
            self._jobs.fail(waiter, error, retryable=True)

    async def _read_frames(self, requests: AsyncIterator[encoder_pb2.EncodeRequest], waiter: Waiter) -> None:
        """Nothing is read before there is room for the media: until then they stay with the sender."""
        frames: list[bytes] = []
        missing = waiter.spec.media_bytes
        room = await self._media.take(missing, first=waiter.spec.re_encode)
        try:
            while (request := await _next(requests, receiving=missing > 0)) is not None:
                match request.WhichOneof("body"):
                    case "media":
                        if not missing and waiter.media_wanted:
                            waiter.media_wanted, missing = False, waiter.spec.media_bytes
                            room = await self._media.take(missing, first=True)
                        missing -= _checked_frame(request.media, missing)
                        frames.append(request.media)
                        if not missing:
                            whole, frames = frames, []
                            await self._jobs.media(waiter, whole, room)
                    case "run":
                        self._jobs.run(waiter)
                    case _:
                        raise InvalidRequest("job: only the first message may carry it", param="job")
        finally:
            if missing:
                room.release()
        self._jobs.no_more(waiter, complete=not missing)


async def _next(
    requests: AsyncIterator[encoder_pb2.EncodeRequest], *, receiving: bool
) -> encoder_pb2.EncodeRequest | None:
    """The next message; None at the end. What holds room for media has to go on sending them."""
    if not receiving:
        return await anext(requests, None)
    try:
        async with asyncio.timeout(FRAME_SECONDS):
            return await anext(requests, None)
    except TimeoutError:
        raise DeadlineExceeded("the job's media come too slowly") from None


def _checked_frame(frame: bytes, missing: int) -> int:
    if not 0 < len(frame) <= MEDIA_FRAME_BYTES:
        raise InvalidRequest(f"media: a frame holds 1 to {MEDIA_FRAME_BYTES} bytes", param="media")
    if len(frame) > missing:
        raise InvalidRequest("media_bytes: more media were sent than announced", param="media_bytes")
    return len(frame)


async def _first(requests: AsyncIterator[encoder_pb2.EncodeRequest], format: ItemFormat) -> JobSpec:
    try:
        async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
            request = await anext(requests, None)
    except TimeoutError:
        raise DeadlineExceeded("the stream's first message did not come in time") from None
    if request is None or request.WhichOneof("body") != "job":
        raise InvalidRequest("job: the stream's first message must carry it", param="job")
    return parse_job(request.job, format)
