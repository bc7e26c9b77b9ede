"""The Encode RPC: media frames in, events out; every stream ends with `ready` or `failed` by its deadline."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Mapping

from grpc import aio

from triptych.base.errors import DeadlineExceeded, InternalError, InvalidRequest, RequestError, TooLarge
from triptych.base.hashing import canonical, check_mm_hash
from triptych.base.rpc.channels import MEDIA_FRAME_BYTES
from triptych.base.tracing.context import context_of
from triptych.base.tracing.tracer import Tracer
from triptych.encoder_worker.job_spec import ItemFormat, JobSpec
from triptych.encoder_worker.jobs.job import StreamTrace, Waiter
from triptych.encoder_worker.jobs.segments import SegmentPlanner
from triptych.encoder_worker.jobs.table import JobStreams
from triptych.encoder_worker.media.budget import MediaBudget
from triptych.encoder_worker.media.formats import MAX_MEDIA_BYTES
from triptych.protos import encoder_pb2, encoder_pb2_grpc
from triptych.protos.job_events import failed

#: Longest timeout of a job in seconds.
MAX_TIMEOUT = 3600.0
_MAX_OPTIONS_CHARS = 64 << 10
#: Longest fields that are stored or logged unchanged.
_MAX_CHARS = {"job_id": 512, "request_id": 256, "label": 256, "salt": 1024, "failed_lease_token": 256}
_DIGEST = re.compile(r"([0-9a-f]{40})?")
_TENANT = re.compile(r"([0-9a-f]{16})?")


def parse_job(job: encoder_pb2.EncodeJob, format: ItemFormat) -> JobSpec:
    """The job, checked against what this worker encodes; InvalidRequest naming the field."""
    if job.namespace != format.namespace:
        raise InvalidRequest("namespace: not the one that this worker encodes for", param="namespace")
    if job.modality not in format.modalities:
        known = " and ".join(map(repr, format.modalities))
        raise InvalidRequest(f"modality: this worker encodes {known} only", param="modality")
    if job.media_bytes < 1:
        raise InvalidRequest("media_bytes: the item has no media", param="media_bytes")
    if job.media_bytes > MAX_MEDIA_BYTES:
        raise TooLarge(f"media_bytes: more than {MAX_MEDIA_BYTES} bytes", param="media_bytes")
    if not job.timeout > 0:
        raise InvalidRequest("timeout: seconds that the job may take, above 0", param="timeout")
    if not _DIGEST.fullmatch(job.damaged_digest):
        raise InvalidRequest("damaged_digest: 40 lower-case hex characters", param="damaged_digest")
    if not _TENANT.fullmatch(job.tenant):
        raise InvalidRequest("tenant: 16 lower-case hex characters, or none", param="tenant")
    for field, limit in _MAX_CHARS.items():
        if len(getattr(job, field)) > limit:
            raise InvalidRequest(f"{field}: more than {limit} characters", param=field)
    return JobSpec(
        job_id=job.job_id,
        request_id=job.request_id,
        label=job.label,
        mm_hash=check_mm_hash(job.mm_hash),
        namespace=job.namespace,
        modality=job.modality,
        processor_options=_options(job.processor_options),
        salt=job.salt,
        media_bytes=job.media_bytes,
        timeout=min(job.timeout, MAX_TIMEOUT),
        failed_lease_token=job.failed_lease_token,
        damaged_digest=job.damaged_digest,
        re_encode=job.re_encode,
        direct=job.direct,
        tenant=job.tenant,
        priority=job.priority,
    )


def _options(text: str) -> Mapping[str, object]:
    error = InvalidRequest("processor_options: a small JSON object of options", param="processor_options")
    if len(text) > _MAX_OPTIONS_CHARS:
        raise error
    try:
        options = json.loads(text or "{}")
        if not isinstance(options, dict):
            raise error
        canonical(options)  # raises for what cannot be hashed: huge numbers, lone surrogates, deep nesting
    except (ValueError, OverflowError, RecursionError):
        raise error from None
    return options


logger = logging.getLogger(__name__)

#: Timeout of a stream's first message in seconds.
FIRST_MESSAGE_SECONDS = 10.0
#: Timeout between two media frames in seconds.
FRAME_SECONDS = 30.0
#: Seconds that the client has to close the stream of a ready item.
CLOSING_SECONDS = 1.0

Requests = AsyncIterator[encoder_pb2.EncodeRequest]


class EncoderServicer(encoder_pb2_grpc.EncoderServiceServicer):
    """The gRPC servicer: turns messages into calls of `JobStreams`, whose events it sends."""

    def __init__(
        self,
        streams: JobStreams,
        media: MediaBudget,
        format: ItemFormat,
        tracer: Tracer | None = None,
        splitter: SegmentPlanner | None = None,
    ) -> None:
        self._splitter = splitter
        self._streams = streams
        self._media = media
        self._format = format
        self._tracer = tracer

    async def Encode(
        self,
        request_iterator: Requests,
        context: aio.ServicerContext[encoder_pb2.EncodeRequest, encoder_pb2.EncodeEvent],
    ) -> AsyncIterator[encoder_pb2.EncodeEvent]:
        """One job; see the protocol."""
        events: asyncio.Queue[encoder_pb2.EncodeEvent] = asyncio.Queue()
        try:
            spec = await _first(request_iterator, self._format)
            waiter = self._streams.join(spec, events.put_nowait, self._trace(context))
        except RequestError as error:
            yield failed(error, retryable=error.status == 429 or error.status >= 500)
            return
        frames = asyncio.create_task(self._read(request_iterator, waiter))
        kind = None
        try:
            while kind not in ("ready", "failed"):
                try:
                    async with asyncio.timeout(waiter.deadline - time.monotonic()):
                        event = await events.get()
                except TimeoutError:
                    self._streams.fail_late(waiter)
                    event = await events.get()
                kind = event.WhichOneof("body")
                yield event
            if kind == "ready":
                # A stream that both sides close is freed at once; if only the server does, gRPC's
                # message receiver stays in a reference cycle until garbage collection.
                await asyncio.wait([frames], timeout=CLOSING_SECONDS)
        finally:
            frames.cancel()
            if not waiter.ended:
                self._streams.leave(waiter)

    async def SplitVideo(
        self,
        request_iterator: Requests,
        context: aio.ServicerContext[encoder_pb2.EncodeRequest, encoder_pb2.VideoSegments],
    ) -> encoder_pb2.VideoSegments:
        """A video's segments; none for what cannot be divided, or read at all."""
        try:
            spec = await _first(request_iterator, self._format)
            if self._splitter is None or spec.modality != "video":
                return encoder_pb2.VideoSegments()
            async with asyncio.timeout(spec.timeout):
                reservation = await self._media.acquire(spec.media_bytes, spec.tenant)
                try:
                    data = await _all_media(request_iterator, spec.media_bytes)
                    ends, extra_rows = await self._splitter.ends(data, spec.processor_options, spec.tenant)
                finally:
                    reservation.release()
        except RequestError:
            return encoder_pb2.VideoSegments()
        except TimeoutError:
            raise DeadlineExceeded("the video was not divided in time") from None
        frames, seconds = [frame for frame, _ in ends], [second for _, second in ends]
        return encoder_pb2.VideoSegments(ends=frames, seconds=seconds, extra_rows=extra_rows)

    def _trace(
        self, context: aio.ServicerContext[encoder_pb2.EncodeRequest, encoder_pb2.EncodeEvent]
    ) -> StreamTrace | None:
        if self._tracer is None:
            return None
        return StreamTrace(self._tracer, context_of(context.invocation_metadata() or ()))

    async def _read(self, requests: Requests, waiter: Waiter) -> None:
        try:
            await self._read_frames(requests, waiter)
        except RequestError as refused:
            self._streams.fail(waiter, refused, retryable=refused.status >= 500)
        except Exception:
            # A broken stream, or an error of this worker: do not wait for the deadline.
            spec = waiter.spec
            logger.warning(
                "job %.64r of request %.128r (%.64r) could not be read",
                *(spec.job_id, spec.label, spec.request_id),
                exc_info=True,
                extra=waiter.log_extra,
            )
            error = InternalError("the job's stream could not be read")
            self._streams.fail(waiter, error, retryable=True)

    async def _read_frames(self, requests: Requests, waiter: Waiter) -> None:
        """Reads frames once there is room for the media; until then flow control keeps them at the client.

        A client that has room has to keep sending: FRAME_SECONDS bound each wait.
        """
        frames: list[bytes] = []
        missing = waiter.spec.media_bytes
        reservation = await self._media.acquire(missing, waiter.spec.tenant, first=waiter.spec.re_encode)
        now = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(None) as patience:
                while True:
                    patience.reschedule(now() + FRAME_SECONDS if missing else None)
                    if (request := await anext(requests, None)) is None:
                        break
                    patience.reschedule(None)
                    match request.WhichOneof("body"):
                        case "media":
                            if not missing and waiter.media_needed:
                                waiter.media_needed, missing = False, waiter.spec.media_bytes
                                reservation = await self._media.acquire(
                                    missing, waiter.spec.tenant, first=True
                                )
                            missing -= _checked_frame(request.media, missing)
                            frames.append(request.media)
                            if not missing:
                                whole, frames = frames, []
                                await self._streams.media(waiter, whole, reservation)
                        case "run":
                            self._streams.permit(waiter)
                        case _:
                            raise InvalidRequest("job: only the first message may carry it", param="job")
        except TimeoutError:
            raise DeadlineExceeded("the job's media arrive too slowly") from None
        finally:
            if missing:
                reservation.release()
        if not waiter.ended:
            self._streams.close(waiter, complete=not missing)


async def _all_media(requests: Requests, missing: int) -> bytes:
    frames = []
    while missing:
        if (request := await anext(requests, None)) is None:
            raise InvalidRequest("media: fewer bytes were sent than announced", param="media")
        missing -= _checked_frame(request.media, missing)
        frames.append(request.media)
    # Up to 64 MiB: beside the event loop.
    return await asyncio.to_thread(b"".join, frames)


def _checked_frame(frame: bytes, missing: int) -> int:
    if not 0 < len(frame) <= MEDIA_FRAME_BYTES:
        raise InvalidRequest(f"media: a frame holds 1 to {MEDIA_FRAME_BYTES} bytes", param="media")
    if len(frame) > missing:
        raise InvalidRequest("media_bytes: more media were sent than announced", param="media_bytes")
    return len(frame)


async def _first(requests: Requests, format: ItemFormat) -> JobSpec:
    try:
        async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
            request = await anext(requests, None)
    except TimeoutError:
        raise DeadlineExceeded("the stream's first message did not arrive in time") from None
    if request is None or request.WhichOneof("body") != "job":
        raise InvalidRequest("job: the stream's first message must carry it", param="job")
    return parse_job(request.job, format)
