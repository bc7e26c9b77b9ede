"""gRPC link to one PD worker: unary calls out, one stream of events and engine beats back."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import grpc
from grpc import aio

from triptych.base.least_service import RecentHolders
from triptych.base.log import log_fields
from triptych.base.rpc.channels import INCARNATION_HEADER
from triptych.base.types import EmbeddingSource
from triptych.protos import pd_pb2
from triptych.protos.convert import source_to_proto
from triptych.proxy.events import lost
from triptych.proxy.pd.load_reports import LoadReports
from triptych.proxy.pd.stall_watch import StallWatch
from triptych.proxy.pd.window import ALONE, SHARED, SubmitWindow
from triptych.proxy.pd.wire import PDStub, connect, deliver
from triptych.proxy.pool import WorkerPool
from triptych.proxy.ports import LinkOwner, PDLoadReport, ProcessEnd, RequestEvents

logger = logging.getLogger(__name__)

#: A PD worker keeps the requests of a proxy without a stream for as long.
REATTACH_SECONDS = 2.0
RETRY_SECONDS = 0.1
#: Longest pause after an error of our own, which comes again at once where it has a lasting cause.
LAST_RETRY_SECONDS = 5.0
CALL_TIMEOUT = 10.0
#: Seconds before a Submit that has broken is sent again, to the same worker and as the same attempt. Together
#: they are longer than a link takes to find that its worker has gone.
REPEAT_PAUSES = (0.5, 1.0, 2.0)
OUR_FAULT = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAUTHENTICATED,
)
#: Requests, and keys of items, that one message names at most.
NAMED_AT_ONCE = 16384
KEYS_AT_ONCE = 4096
#: A worker that sends no initial metadata counts as attached when the call has not failed by then.
ATTACH_SECONDS = 0.5


def retry_pause(failures: int) -> float:
    """Seconds before the stream is opened again, after this many errors of our own in a row."""
    return min(RETRY_SECONDS * 2.0**failures, LAST_RETRY_SECONDS)


@dataclass(slots=True)
class _Tracked:
    attempt: int
    received: Sequence[int]


class PDLink:
    """Stream of one PD worker, and the requests on it. A request is reported as lost at most once."""

    def __init__(
        self,
        address: str,
        channel: Callable[[], aio.Channel],
        proxy_id: str,
        events: RequestEvents,
        owner: LinkOwner,
        stall_timeout: float = 0.0,
    ) -> None:
        self.address = address
        self._log = logging.LoggerAdapter(logger, log_fields(worker=address))
        self.attached = False
        self.set_aside = False
        self._stall = StallWatch(stall_timeout)
        self._tenants = RecentHolders()
        self._alone, self._shared = SubmitWindow(ALONE), SubmitWindow(SHARED)
        self._loads = LoadReports()
        self._channel = channel
        self._used = channel()
        self._connected = connect(self._used)
        self._proxy_id = proxy_id
        self._events = events
        self._owner = owner
        self._requests: dict[str, _Tracked] = {}
        #: Attempts at requests that are handed over and not taken yet, each with its tenant.
        self._unanswered: dict[str, tuple[int, str]] = {}
        self._notices: dict[str, EmbeddingSource | None] = {}
        self._cancels: list[str] = []
        #: Requests to pause (True) or to resume, where the worker does not know it yet.
        self._pauses: dict[str, bool] = {}
        #: Requests that the Attach under way names: they are to be cancelled once it stands.
        self._named: set[str] = set()
        self._flush: asyncio.Task[None] | None = None
        self._call: aio.UnaryStreamCall[pd_pb2.AttachRequest, pd_pb2.StepEvents] | None = None
        self._incarnation = ""
        #: The worker has ended the stream itself, as one that drains.
        self._left = False
        self._task = asyncio.create_task(self._run(), name=f"attach {address}")

    @property
    def _stub(self) -> PDStub:
        """Over the channel for new calls, which is another one after certificates have changed."""
        if (channel := self._channel()) is not self._used:
            self._used, self._connected = channel, connect(channel)
        return self._connected

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    @property
    def _window(self) -> SubmitWindow:
        return self._shared if self._tenants.several else self._alone

    def open_to(self, tenant: str) -> bool:
        """One that has none unanswered waits for nobody's."""
        unanswered = self._unanswered
        return self._window.open(len(unanswered)) or all(other != tenant for _, other in unanswered.values())

    async def close(self) -> None:
        tasks = [task for task in (self._task, self._flush) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def give_up(self, *, silent: bool = False) -> None:
        stalled = self.attached and not silent
        self.reattach()
        self._lose_all(final=stalled)

    def reattach(self) -> None:
        if self._call is not None:
            self._call.cancel()

    def load(self, now: float) -> PDLoadReport | None:
        return self._loads.latest(now)

    def check(self, now: float) -> bool:
        """Whether `set_aside` has changed. Nothing is known of a worker without a stream."""
        if not self.attached or (stalled := self._stall.stalled(now)) is self.set_aside:
            return False
        self.set_aside = stalled
        if stalled:
            self._log.warning("PD worker %s stands still: its requests go on elsewhere", self.address)
            self.give_up()
        else:
            self._log.info("PD worker %s moves again", self.address)
        return True

    def track(self, request_id: str, attempt: int, received: Sequence[int], tenant: str = "") -> None:
        self._tenants.note(tenant)
        self._requests[request_id] = _Tracked(attempt, received)
        self._unanswered[request_id] = attempt, tenant

    async def submit(self, message: pd_pb2.SubmitRequest) -> pd_pb2.SubmitReply:
        """Waits as long as the request may live: a worker that stands still is found by its stream.

        A call that breaks is made again: an attempt that comes twice is served once. Meanwhile the stream may
        say that the worker has it not; whoever ends the attempt then cancels this.
        """
        try:
            for pause in REPEAT_PAUSES:
                try:
                    return await self._submit(message)
                except aio.AioRpcError as error:
                    if error.code() in OUR_FAULT:
                        raise
                    self._log.info("PD worker %s broke a Submit: %s", self.address, error.code().name)
                await asyncio.sleep(pause)
            return await self._submit(message)
        finally:
            if self._unanswered.get(message.request_id, (0, ""))[0] == message.attempt:
                del self._unanswered[message.request_id]

    async def _submit(self, message: pd_pb2.SubmitRequest) -> pd_pb2.SubmitReply:
        if message.request_id in self._cancels and self._flush is not None:
            await asyncio.wait([self._flush])  # a cancel names no attempt
        now = asyncio.get_running_loop().time
        sent_at = now()
        reply = await self._stub.Submit(message, timeout=message.timeout + CALL_TIMEOUT)
        window = self._window
        if window.answered(sent_at, now()):
            size = window.size
            self._log.debug("PD worker %s takes requests slowly: %d at once", self.address, size)
        return reply

    async def set_apart(self, request_id: str, tokens: int) -> bool:
        message = pd_pb2.SetApartRequest(proxy_id=self._proxy_id, request_id=request_id, tokens=tokens)
        try:
            call = self._stub.SetApart(message, timeout=CALL_TIMEOUT)
            reply, answered_by = await call, await _incarnation(call)
        except aio.AioRpcError as error:
            self._log.info("PD worker %s is not set apart: %s", self.address, error.code().name)
            return False
        if reply.HasField("error"):
            self._log.info("PD worker %s is not set apart: %s", self.address, reply.error.message)
            return False
        # The stream may be that of a process before this one: its end would be this request's fault.
        return self.attached and answered_by in ("", self._incarnation)

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._unanswered.pop(request_id, None)
        self._pauses.pop(request_id, None)

    def notify(self, mm_hashes: Sequence[str], sources: Mapping[str, EmbeddingSource]) -> None:
        """Sent in one message with all notices of this iteration of the event loop."""
        self._notices.update((mm_hash, sources.get(mm_hash)) for mm_hash in mm_hashes)
        self._start_flush()

    def cancel(self, request_id: str) -> None:
        """Without a stream nothing is sent: the next Attach does not name the request."""
        if self.attached or request_id in self._named:
            self._cancels.append(request_id)
        if self.attached:
            self._start_flush()

    def pause(self, request_id: str, paused: bool) -> None:
        """Told after a break of the stream, too: a request that nobody resumes would never end."""
        self._pauses[request_id] = paused
        if self.attached:
            self._start_flush()

    def _start_flush(self) -> None:
        if self._flush is None or self._flush.done():
            self._flush = asyncio.create_task(self._send_pending(), name=f"notices {self.address}")

    async def _send_pending(self) -> None:
        """Repeats until the worker has everything; failures for 2 s on a live stream end it."""
        started = asyncio.get_running_loop().time()
        while self.attached and self._pending:
            notices = dict(islice(self._notices.items(), KEYS_AT_ONCE))
            cancels = self._cancels[:NAMED_AT_ONCE]
            pauses = dict(islice(self._pauses.items(), NAMED_AT_ONCE))
            try:
                if cancels:
                    request = pd_pb2.CancelRequest(proxy_id=self._proxy_id, request_ids=cancels)
                    await self._stub.Cancel(request, timeout=CALL_TIMEOUT)
                    del self._cancels[: len(cancels)]
                if notices:
                    sources = map(source_to_proto, notices.values() if any(notices.values()) else ())
                    notice = pd_pb2.ItemsNotice(
                        proxy_id=self._proxy_id, mm_hashes=notices, sources=list(sources)
                    )
                    await self._stub.NotifyItems(notice, timeout=CALL_TIMEOUT)
                    for mm_hash in notices:
                        self._notices.pop(mm_hash, None)
                if pauses:
                    await self._stub.Pause(self._pause_message(pauses), timeout=CALL_TIMEOUT)
                    self._pauses = dict(self._pauses.items() - pauses.items())
            except aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED and pauses:
                    self._pauses.clear()  # an older worker, which cannot pause
                    continue
                if asyncio.get_running_loop().time() - started > REATTACH_SECONDS:
                    self._log.warning("PD worker %s took no notices: %s", self.address, error.code().name)
                    self.give_up()
                    return
                await asyncio.sleep(RETRY_SECONDS)
            except Exception:
                self._log.exception(
                    "PD worker %s was sent no notices; its requests go on elsewhere", self.address
                )
                self.reattach()
                self._lose_all(ours=True)
                return

    @property
    def _pending(self) -> bool:
        return bool(self._notices or self._cancels or self._pauses)

    def _pause_message(self, pauses: dict[str, bool]) -> pd_pb2.PauseRequest:
        paused = [request_id for request_id, pause in pauses.items() if pause]
        return pd_pb2.PauseRequest(
            proxy_id=self._proxy_id, paused=paused, resumed=list(pauses.keys() - set(paused))
        )

    async def _run(self) -> None:
        """Keeps the stream: reattaches after a break; requests are lost when that takes above 2 s.

        An unexpected error loses them at once: what made it would be sent again.
        """
        loop = asyncio.get_running_loop()
        broken_at = loop.time()
        failures = 0
        while True:
            try:
                self._left = await self._attach(broken_at + REATTACH_SECONDS if self._requests else None)
                failures = 0
            except (aio.AioRpcError, TimeoutError) as error:
                failures = 0
                self._log.debug("no stream of PD worker %s: %s", self.address, error)
            except Exception:
                failures += 1
                logger.exception(
                    "the stream of PD worker %s failed; its requests go on elsewhere", self.address
                )
                self.attached = False
                self._lose_all(ours=True)
            if self.attached:
                broken_at = loop.time()
                self._log.info("the stream of PD worker %s broke", self.address)
            self.attached = False
            self._cancels.clear()
            self._named.clear()
            if loop.time() - broken_at >= REATTACH_SECONDS:
                self._lose_all()
            await asyncio.sleep(retry_pause(failures))

    async def _attach(self, deadline: float | None) -> bool:
        """One stream, from its start to its end: whether it was the worker that ended it.

        TimeoutError when it is not established in time.
        """
        async with asyncio.timeout_at(deadline) as limit:
            request = await self._name_requests(limit)
        call = self._call = self._stub.Attach(request)
        try:
            async with asyncio.timeout_at(limit.when()):
                known = await self._established(call)
            self.attached = True
            self._owner.attached(self._incarnation if known else "")
            if self._pending:
                self._start_flush()
            async for step in call:
                self._stall.observe(step)
                if step.HasField("beat"):
                    self._loads.observe(step.beat, asyncio.get_running_loop().time())
                if not known:
                    known = True
                    await self._identify(call)
                deliver(step, self._events)
                self._owner.stepped()
            return True
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise  # this task is being ended; else the call was, by `reattach`
        finally:
            call.cancel()
        return False

    async def _name_requests(self, limit: asyncio.Timeout) -> pd_pb2.AttachRequest:
        """Attach's message; what it cannot hold is named in calls before it, which extend `limit`."""
        named = [
            pd_pb2.Reattach(request_id=request_id, attempt=tracked.attempt, position=len(tracked.received))
            for request_id, tracked in self._requests.items()
        ]
        self._named = set(self._requests)
        pieces = [named[at : at + NAMED_AT_ONCE] for at in range(0, len(named), NAMED_AT_ONCE)] or [[]]
        *before, last = pieces
        request = pd_pb2.AttachRequest(proxy_id=self._proxy_id, requests=last, reads_step_tokens=True)
        if before:
            request.round = secrets.token_hex(8)
            request.named_before = len(named) - len(last)
        for piece in before:
            message = pd_pb2.AttachRequest(proxy_id=self._proxy_id, round=request.round, requests=piece)
            await self._stub.NameRequests(message, timeout=CALL_TIMEOUT)
            if limit.when() is not None:
                limit.reschedule(asyncio.get_running_loop().time() + REATTACH_SECONDS)
        return request

    async def _established(self, call: aio.UnaryStreamCall[pd_pb2.AttachRequest, pd_pb2.StepEvents]) -> bool:
        """Waits until the stream stands; returns whether the process at its other end is known."""
        known = False
        await call.wait_for_connection()
        try:
            async with asyncio.timeout(ATTACH_SECONDS):
                await self._identify(call)
                known = True
        except TimeoutError:
            self._log.debug("PD worker %s sends no initial metadata", self.address)
        if call.done():
            code = await call.code()
            if code is not grpc.StatusCode.OK:
                raise aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), await call.details())
        return known

    async def _identify(self, call: aio.UnaryStreamCall[pd_pb2.AttachRequest, pd_pb2.StepEvents]) -> None:
        """Another process than before has none of the requests."""
        incarnation = await _incarnation(call)
        if incarnation and self._incarnation and incarnation != self._incarnation:
            self._lose_all(final=True)
        self._incarnation = incarnation or self._incarnation
        self._left = False

    def _lose_all(self, *, final: bool = False, ours: bool = False) -> None:
        """The requests go on elsewhere; `ours`: after an error of this process, which makes none suspect."""
        self._notices.clear()
        self._cancels.clear()
        self._pauses.clear()
        requests, self._requests = self._requests, {}
        if requests and not self._left and not ours:
            self._owner.ended(ProcessEnd(self.address, self._incarnation, tuple(requests), final))
        for request_id, tracked in requests.items():
            try:
                self._events.deliver(request_id, lost(tracked.attempt))
            except Exception:  # of one request: the others are lost all the same
                logger.exception(
                    "request %s of PD worker %s",
                    request_id,
                    self.address,
                    extra=log_fields(request_id=request_id, attempt=tracked.attempt, worker=self.address),
                )


async def _incarnation(call: aio.Call) -> str:
    return str(dict(await call.initial_metadata() or ()).get(INCARNATION_HEADER, ""))


def open_link(
    pool: WorkerPool,
    proxy_id: str,
    stall_timeout: float,
    address: str,
    events: RequestEvents,
    owner: LinkOwner,
) -> PDLink:
    """The link to a PD worker, over the pool's channel to it."""
    connection = pool.connection("pd", address)
    return PDLink(address, lambda: connection.channel, proxy_id, events, owner, stall_timeout)
