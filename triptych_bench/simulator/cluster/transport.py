"""The proxy's transport in virtual time: messages arrive `rpc` seconds after they are sent, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from triptych.base.delta import Delta
from triptych.base.errors import Overloaded, RequestError
from triptych.base.types import EmbeddingSource
from triptych.pd_worker.core.request_events import EngineEvent
from triptych.protos import encoder_pb2, pd_pb2
from triptych.protos.convert import error_to_proto
from triptych.protos.encoder_pb2 import EncodeEvent
from triptych.proxy.media.source import ItemMedia
from triptych.proxy.ports import LinkOwner, PDLoadReport, RequestEvents
from triptych.registry.matching import PREFILL
from triptych_bench.simulator.cluster.context import SimulationContext
from triptych_bench.simulator.cluster.encoder import SimulatedEncoder
from triptych_bench.simulator.cluster.pd import SimulatedPD
from triptych_bench.simulator.cluster.requests import SimulatedItem, SimulatedRequest


class ClientStream:
    """What the client of one request has received: the moment of each of its tokens, which are all alike."""

    __slots__ = ("attempts", "ended", "moments", "request")

    def __init__(self, request: SimulatedRequest, ended: asyncio.Future[None]) -> None:
        self.request = request
        self.moments: list[float] = []
        #: Under way: two while a decode worker takes the request over.
        self.attempts = 0
        #: Done when no more will come.
        self.ended = ended

    def add(self, position: int, moment: float) -> None:
        """A token, not before an earlier one: a short message may overtake a long one. Of two workers' the
        client has the first."""
        if position == len(self.moments):
            self.moments.append(max(moment, self.moments[-1]) if self.moments else moment)

    def leave(self) -> None:
        """An attempt is over."""
        self.attempts -= 1
        if not self.attempts and not self.ended.done():
            self.ended.set_result(None)


@dataclass(slots=True)
class _Attempt:
    """One attempt at one worker: positions of its next token there, and of the next that the proxy gets."""

    client: ClientStream
    number: int
    position: int
    passed_on: int
    begun: bool = False


@dataclass(slots=True)
class SimulatedTransport:
    """All streams between one proxy and its workers. `clients`: by the request's label."""

    context: SimulationContext
    encoders: Mapping[str, SimulatedEncoder]
    workers: Mapping[str, SimulatedPD]
    items: Mapping[str, SimulatedItem]
    clients: dict[str, ClientStream] = field(default_factory=dict)
    links: list[SimulatedLink] = field(default_factory=list)

    def open_job(
        self,
        address: str,
        job: encoder_pb2.EncodeJob,
        media: ItemMedia,
        planned: Callable[[str, EncodeEvent], None],
        trace: object = 0,
    ) -> SimulatedJob:
        return SimulatedJob(self, address, job, planned)

    def open_link(self, address: str, events: RequestEvents, owner: LinkOwner) -> SimulatedLink:
        link = SimulatedLink(self, address, events, owner)
        self.links.append(link)
        return link


class SimulatedJob:
    """The stream of one try of an encoder job. The media arrive with its first message."""

    media_sent = True

    def __init__(
        self,
        transport: SimulatedTransport,
        address: str,
        job: encoder_pb2.EncodeJob,
        planned: Callable[[str, EncodeEvent], None],
    ) -> None:
        self.item = transport.items[job.mm_hash]
        self.re_encode = job.re_encode
        self._loop, self._rpc = transport.context.loop, transport.context.costs.rpc
        self._encoder, self._job_id, self._planned = transport.encoders[address], job.job_id, planned
        self._end: asyncio.Future[EncodeEvent] = self._loop.create_future()

    def run(self) -> None:
        self._loop.call_later(self._rpc, self._encoder.run, self)

    async def result(self) -> EncodeEvent:
        self._loop.call_later(self._rpc, self._encoder.open, self)
        try:
            return await self._end
        except asyncio.CancelledError:
            self._loop.call_later(self._rpc, self._encoder.leave, self)
            raise

    async def close(self) -> None: ...

    def send(self, event: EncodeEvent) -> None:
        """Sent by the worker."""
        if event.HasField("planned"):
            self._loop.call_later(self._rpc, self._planned, self._job_id, event)
        else:
            self._loop.call_later(self._rpc, self._finish, event)

    def _finish(self, end: EncodeEvent) -> None:
        if not self._end.done():
            self._end.set_result(end)


class SimulatedLink:
    """The link to one PD worker, which never fails: its stream always stands."""

    attached, set_aside = True, False

    def __init__(
        self, transport: SimulatedTransport, address: str, events: RequestEvents, owner: LinkOwner
    ) -> None:
        self.address, self._transport, context = address, transport, transport.context
        self._loop, self._rpc, self._counters = context.loop, context.costs.rpc, context.counters
        #: Seconds that the proxy takes for a token between its arrival and the client.
        self._token_seconds = context.costs.proxy.token
        self._worker = transport.workers[address]
        self._worker.attach(self)
        self._events, self._owner = events, owner
        #: By request id; None before its Submit is sent.
        self._attempts: dict[str, _Attempt | None] = {}

    @property
    def in_flight(self) -> int:
        return len(self._attempts)

    def open_to(self, tenant: str) -> bool:
        return True

    def track(self, request_id: str, attempt: int, received: Sequence[int], tenant: str = "") -> None:
        self.forget(request_id)
        self._attempts[request_id] = None

    def forget(self, request_id: str) -> None:
        if attempt := self._attempts.pop(request_id, None):
            attempt.client.leave()

    async def submit(self, message: pd_pb2.SubmitRequest) -> pd_pb2.SubmitReply:
        client = self._transport.clients[message.label]
        start = len(message.resume.output_token_ids)
        client.attempts += 1
        self._attempts[message.request_id] = _Attempt(client, message.attempt, start, start)
        self._counters.handed_over += message.resume.planned
        await asyncio.sleep(self._rpc)
        error: RequestError | None = Overloaded("too many requests wait for this worker", retry_after=1.0)
        if not self._worker.full:
            error = await self._worker.submit(client.request, message, self._loop.now + message.timeout)
        await asyncio.sleep(self._rpc)
        if error is None:
            return pd_pb2.SubmitReply(status=pd_pb2.SubmitReply.STATUS_ADMITTED)
        return pd_pb2.SubmitReply(status=pd_pb2.SubmitReply.STATUS_REFUSED, error=error_to_proto(error))

    async def set_apart(self, request_id: str, tokens: int) -> bool:
        return False

    def notify(self, mm_hashes: Sequence[str], sources: Mapping[str, EmbeddingSource]) -> None:
        self._loop.call_later(self._rpc, self._worker.items_ready, mm_hashes)

    def cancel(self, request_id: str) -> None:
        self._loop.call_later(self._rpc, self._worker.cancel, request_id)

    def pause(self, request_id: str, paused: bool) -> None:
        """Clients read everything at once."""

    def check(self, now: float) -> bool:
        return False

    def load(self, now: float) -> PDLoadReport:
        scheduler, kv = self._worker.scheduler, self._worker.kv
        usage = kv.num_used / kv.num_blocks
        return PDLoadReport(scheduler.num_running, scheduler.num_waiting, usage, 0.0, 0.0)

    # The stream stands, no worker fails, and nobody watches: there is nothing to do.
    def give_up(self, *, silent: bool = False) -> None: ...
    async def close(self) -> None: ...

    def step(self, events: list[EngineEvent], tokens: int) -> None:
        """Sent by the worker: the events of one step. Clients have its tokens once all are passed on."""
        later = self._rpc + self._token_seconds * tokens
        self._counters.tokens += tokens
        moment, attempts, prefill = self._loop.now + later, self._attempts, self._worker.role == PREFILL
        left: list[EngineEvent] = []
        for event in events:
            if not isinstance(event, Delta):
                left.append(event)
            elif (attempt := attempts.get(event.request_id)) and attempt.number == event.attempt:
                client = attempt.client
                client.add(attempt.position, moment)
                attempt.position += 1
                # What another worker begins with, or has to catch up with.
                if not attempt.begun or prefill or client.attempts > 1:
                    attempt.begun = True
                    left.append(event)
        if left:
            self._loop.call_later(self._rpc, self._deliver, left)

    def _deliver(self, events: list[EngineEvent]) -> None:
        """All that is no token, and the first one of each request. Later ones decide nothing in a proxy: it
        gets them all at once at the end, while the client has had each at its moment.
        """
        for event in events:
            attempt = self._attempts.get(event.request_id)
            if attempt is None or attempt.number != event.attempt:
                continue
            if isinstance(event, Delta) or event.HasField("finished"):
                self._pass_on(event.request_id, attempt)
            if not isinstance(event, Delta):
                self._events.deliver(event.request_id, event)
        self._owner.stepped()

    def _pass_on(self, request_id: str, attempt: _Attempt) -> None:
        """The tokens that the proxy has not yet: so many positions, which are all alike."""
        start, attempt.passed_on = attempt.passed_on, attempt.position
        tokens = [attempt.client.request.output_token] * (attempt.position - start)
        if tokens:
            self._events.tokens(request_id, attempt.number, start, tokens, "")

    def offer(self, request_id: str, attempt: int) -> None:
        """Sent by a prefill worker: another one may take the request over."""
        offered = pd_pb2.RequestEvent(request_id=request_id, attempt=attempt)
        offered.tokens.offered = True
        self._loop.call_later(self._rpc, self._deliver, [offered])
