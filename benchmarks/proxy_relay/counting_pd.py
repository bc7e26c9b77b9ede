"""A PD worker whose engine only counts: real event streams and steps at a real pace, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

from triptych.pd_worker.core.request_events import EngineEvent, NewTokens, RequestAdmitted, RequestFinished
from triptych.pd_worker.events.streams import EventStreams
from triptych.protos import pd_pb2, pd_pb2_grpc
from triptych.types import FinishReason, PDTimings, Usage

#: Above the 10 ms from which on the proxy writes every token as it comes.
STEP_SECONDS = 0.0125
#: Steps between two looks for finished requests.
SWEEP_STEPS = 40


class CountingPD(pd_pb2_grpc.PDServiceServicer):
    """A PD worker whose engine puts out a token of every running request in each step, and nothing else."""

    def __init__(self) -> None:
        self._streams = EventStreams(lambda ids, proxy_id: None)
        #: Requests with their output tokens so far.
        self._running: dict[str, tuple[pd_pb2.SubmitRequest, int]] = {}

    async def Submit(self, request: pd_pb2.SubmitRequest, context: Any) -> pd_pb2.SubmitReply:
        self._streams.open(request.proxy_id, request.request_id, request.attempt)
        self._running[request.request_id] = (request, 0)
        return pd_pb2.SubmitReply(status=pd_pb2.SubmitReply.STATUS_ADMITTED)

    async def Attach(self, request: pd_pb2.AttachRequest, context: Any) -> AsyncIterator[pd_pb2.StepEvents]:
        await context.send_initial_metadata(())
        stream = self._streams.attach(
            request.proxy_id, request.requests, step_tokens=request.reads_step_tokens
        )
        while (message := await stream.next()) is not None:
            yield message

    async def run(self) -> None:
        """Steps until it is cancelled."""
        for number in count():
            await asyncio.sleep(STEP_SECONDS)
            events = [event for held in list(self._running.values()) for event in self._step(*held)]
            self._streams.deliver(events)
            if number % SWEEP_STEPS == 0:
                self._streams.sweep()

    def _step(self, request: pd_pb2.SubmitRequest, position: int) -> list[EngineEvent]:
        """One token; before the first one the admission, after the last one the end."""
        name, limit = request.request_id, request.sampling.max_tokens
        who: Any = {"request_id": name, "attempt": request.attempt, "proxy_id": request.proxy_id}
        tokens = NewTokens(position=position, token_ids=(1000 + position,), text=" token", **who)
        self._running[name] = (request, position + 1)
        if position == 0:
            return [RequestAdmitted(prompt_token_ids=(1, 2, 3), placements=(), **who), tokens]
        if position + 1 < limit:
            return [tokens]
        del self._running[name]
        usage = Usage(3, limit, 0)
        end = RequestFinished(reason=FinishReason.LENGTH, usage=usage, timings=PDTimings(0, 0, 0, 0), **who)
        return [tokens, end]
