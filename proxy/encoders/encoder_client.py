"""One try of one encoder job: media out on credit, plan and readiness back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from grpc import aio

from triptych.errors import Unavailable
from triptych.protos import encoder_pb2, encoder_pb2_grpc
from triptych.protos.convert import plan_from_proto
from triptych.proxy.media.spool import SpooledMedia
from triptych.rpc.channels import MEDIA_FRAME_BYTES
from triptych.types import ItemPlan

#: How long a worker may take to close the stream of a job that has ended.
CLOSING_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class JobReady:
    """The embedding is in the store."""

    plan: ItemPlan
    already_stored: bool
    encode_seconds: float
    save_seconds: float


@dataclass(frozen=True, slots=True)
class JobFailure:
    """The try ended without an embedding, by the worker's own word."""

    code: str
    message: str
    param: str
    retryable: bool
    owner_address: str
    owner_token: str


class EncoderJob:
    """The stream of one try. `permit` may come at any time; the media are sent as often as asked for."""

    def __init__(
        self,
        channel: aio.Channel,
        job: encoder_pb2.EncodeJob,
        media: SpooledMedia,
        *,
        on_planned: Callable[[ItemPlan], None],
        phase_timeout: float,
    ) -> None:
        self._stub: Any = encoder_pb2_grpc.EncoderServiceStub(channel)  # type: ignore[no-untyped-call]
        self._job = job
        self._media = media
        self._on_planned = on_planned
        self._phase_timeout = phase_timeout
        self._outbox: asyncio.Queue[str] = asyncio.Queue()
        self._deadline: asyncio.Timeout | None = None
        #: Whether the worker has been sent the whole item: it was there, and may be at work on it.
        self.media_sent = False

    def permit(self) -> None:
        """The item may use the tower; from now on the worker has `phase_timeout` seconds."""
        self._outbox.put_nowait("run")
        self._extend(self._phase_timeout)

    async def run(self) -> JobReady | JobFailure:
        """The try's end. Unavailable when the worker is silent for too long; grpc errors pass through."""
        self._outbox.put_nowait("media")
        media = self._media.retain()
        call = self._stub.Encode(self._requests())
        end: JobReady | JobFailure | None = None
        try:
            async with asyncio.timeout(self._phase_timeout) as self._deadline:
                async for event in call:
                    if end is None and (end := self._take(event)) is not None:
                        # Ended by both sides a stream frees itself; broken off, it is a cycle of tasks and
                        # generators that waits for the garbage collector.
                        self._outbox.put_nowait("end")
                        self._extend(CLOSING_SECONDS)
        except TimeoutError:
            if end is None:
                raise Unavailable("the encoder worker did not answer in time") from None
        except aio.AioRpcError:
            if end is None:
                raise
        finally:
            call.cancel()
            media.release()
        if end is None:
            raise Unavailable("the encoder worker ended the job without an answer")
        return end

    def _take(self, event: encoder_pb2.EncodeEvent) -> JobReady | JobFailure | None:
        kind = event.WhichOneof("body")
        if kind == "planned":
            if self._deadline is not None:
                self._deadline.reschedule(None)  # until `permit` the job waits for the proxy
            self._on_planned(plan_from_proto(event.planned))
        elif kind == "waits":
            self._extend(self._phase_timeout)  # others have the tower, and it gets on
        elif kind == "need_media":
            self._outbox.put_nowait("media")
        elif kind == "ready":
            ready = event.ready
            return JobReady(
                plan_from_proto(ready.plan), ready.already_stored, ready.encode_seconds, ready.save_seconds
            )
        elif kind == "failed":
            error = event.failed.error
            return JobFailure(
                error.code,
                error.message,
                error.param,
                event.failed.retryable,
                event.failed.owner_address,
                event.failed.owner_token,
            )
        return None

    async def _requests(self) -> AsyncIterator[encoder_pb2.EncodeRequest]:
        yield encoder_pb2.EncodeRequest(job=self._job)
        while True:
            match await self._outbox.get():
                case "run":
                    yield encoder_pb2.EncodeRequest(run=encoder_pb2.RunJob())
                case "media":
                    async for frame in self._media.frames(MEDIA_FRAME_BYTES):
                        yield encoder_pb2.EncodeRequest(media=frame)
                    self.media_sent = True
                case _:
                    return

    def _extend(self, seconds: float) -> None:
        """The worker has so many seconds from now."""
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time() + seconds)
