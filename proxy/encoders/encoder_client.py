"""gRPC stream of one try of an encoder job: media out on credit, plan and result back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from grpc import aio

from triptych.base.errors import Unavailable
from triptych.base.rpc.channels import MEDIA_FRAME_BYTES
from triptych.base.tracing.context import SpanContext, metadata
from triptych.protos import encoder_pb2, encoder_pb2_grpc
from triptych.proxy.media.source import ItemMedia
from triptych.proxy.pool import WorkerPool

#: How long a worker may take to close the stream of a job that has ended.
CLOSING_SECONDS = 1.0


class EncodeStream:
    """One try's stream. `run` may come at any time; the media are sent as often as the worker asks."""

    def __init__(
        self,
        channel: aio.Channel,
        job: encoder_pb2.EncodeJob,
        media: ItemMedia,
        planned: Callable[[str, encoder_pb2.EncodeEvent], None],
        phase_timeout: float,
        trace: SpanContext | None = None,
    ) -> None:
        self._metadata = None if trace is None else metadata(trace)
        stub = encoder_pb2_grpc.EncoderServiceStub(channel)
        self._encode: aio.StreamStreamMultiCallable[encoder_pb2.EncodeRequest, encoder_pb2.EncodeEvent]
        self._encode = stub.Encode
        self._job = job
        self._media = media
        self._planned = planned
        self._phase_timeout = phase_timeout
        self._to_send: asyncio.Queue[str] = asyncio.Queue()
        self._deadline: asyncio.Timeout | None = None
        self._call: aio.StreamStreamCall[encoder_pb2.EncodeRequest, encoder_pb2.EncodeEvent] | None = None
        #: Whether the worker has been sent the whole item: it was there, and may be at work on it.
        self.media_sent = False

    def run(self) -> None:
        """The item may use the tower; from now on the worker has `phase_timeout` seconds."""
        self._to_send.put_nowait("run")
        self._extend(self._phase_timeout)

    async def result(self) -> encoder_pb2.EncodeEvent:
        """The try's end, `ready` or `failed`. Unavailable when the worker is silent for too long; grpc errors
        pass through."""
        self._to_send.put_nowait("media")
        self._media.retain()
        call = self._call = self._encode(self._requests(), metadata=self._metadata)
        try:
            async with asyncio.timeout(self._phase_timeout) as self._deadline:
                async for event in call:
                    match event.WhichOneof("body"):
                        case "planned":
                            self._deadline.reschedule(None)  # until `run` the job waits for the proxy
                            self._planned(self._job.job_id, event)
                        case "waits":
                            self._extend(self._phase_timeout)  # others are in the tower, which makes progress
                        case "need_media":
                            self._to_send.put_nowait("media")
                        case "ready" | "failed":
                            return event
            raise Unavailable("the encoder worker ended the job without an answer")
        except TimeoutError:
            self._break_off()
            raise Unavailable("the encoder worker did not answer in time") from None
        except BaseException:
            self._break_off()
            raise

    async def close(self) -> None:
        """Ends the stream after its result: ended by both sides, it leaves no cycle of tasks in memory."""
        if self._call is None:
            return
        self._to_send.put_nowait("end")
        try:
            with contextlib.suppress(TimeoutError, aio.AioRpcError):  # the job has its result
                async with asyncio.timeout(CLOSING_SECONDS):
                    async for _ in self._call:
                        pass
        finally:
            self._break_off()

    def _break_off(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._to_send.put_nowait("end")  # a call that the worker has ended leaves its sender waiting
            self._call = None
            self._media.release()

    async def _requests(self) -> AsyncIterator[encoder_pb2.EncodeRequest]:
        yield encoder_pb2.EncodeRequest(job=self._job)
        while True:
            match await self._to_send.get():
                case "run":
                    yield encoder_pb2.EncodeRequest(run=encoder_pb2.RunJob())
                case "media":
                    async for frame in self._media.frames(MEDIA_FRAME_BYTES):
                        yield encoder_pb2.EncodeRequest(media=frame)
                    self.media_sent = True
                case _:
                    return

    def _extend(self, seconds: float) -> None:
        """The worker has this many seconds from now."""
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time() + seconds)


def open_stream(
    pool: WorkerPool,
    phase_timeout: float,
    address: str,
    job: encoder_pb2.EncodeJob,
    media: ItemMedia,
    planned: Callable[[str, encoder_pb2.EncodeEvent], None],
    trace: SpanContext | None = None,
) -> EncodeStream:
    """The stream of one try, over the pool's channel to the worker."""
    return EncodeStream(pool.channel("encoder", address), job, media, planned, phase_timeout, trace)
