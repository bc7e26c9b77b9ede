"""Event streams: one per proxy, written by the engine, which never waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from triptych.base.errors import InternalError
from triptych.base.types import KeptKV
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.core.request_events import EngineEvent
from triptych.pd_worker.events.attempt_trace import AttemptTrace
from triptych.pd_worker.events.request_log import RequestLog
from triptych.pd_worker.events.stream_message import StreamMessage
from triptych.pd_worker.events.token_texts import TokenTexts
from triptych.protos import pd_pb2

logger = logging.getLogger(__name__)

#: How long the requests of a proxy without a stream are kept.
KEEP_DETACHED_SECONDS = 2.0
#: How long a finished request can be reattached after its last event was sent, and how long after its
#: removal the same attempt is refused.
KEEP_FINISHED_SECONDS = 10.0
#: About the most that one message of a stream holds: far below gRPC's limit.
MESSAGE_BYTES = 4 << 20
#: Requests of one message that are worth a message of its own for the few of them that are others'.
CROWD = 16
#: Requests that one proxy may reattach at once.
MAX_NAMED = 1 << 20


class EventStream:
    """The stream of one Attach call: a message per step, or several steps in one while the proxy is slow."""

    def __init__(self, proxy_id: str, clock: Callable[[], float], *, step_tokens: bool = False) -> None:
        self.proxy_id = proxy_id
        self._clock = clock
        #: Whether the proxy reads `StepEvents.tokens`.
        self._step_tokens = step_tokens
        self._new: dict[str, RequestLog] = {}
        self._lost: list[pd_pb2.RequestEvent] = []
        self._beat: pd_pb2.Beat | None = None
        self._wake = asyncio.Event()
        self._closed = False
        #: The stream is to end as if the process had: see `EventStreams.lose_engine`.
        self.broken = False

    @property
    def idle(self) -> bool:
        return not self._new and not self._lost

    def add(self, log: RequestLog) -> None:
        self._new[log.request_id] = log
        self._wake.set()

    def forget(self, request_id: str) -> None:
        self._new.pop(request_id, None)

    def lose(self, request_id: str, attempt: int) -> None:
        self._lost.append(pd_pb2.RequestEvent(request_id=request_id, attempt=attempt, lost=pd_pb2.Lost()))
        self._wake.set()

    def beat(self, beat: pd_pb2.Beat) -> None:
        """Queues the engine's beat, in place of one that was not sent yet."""
        self._beat = beat
        self._wake.set()

    def close(self) -> None:
        """Ends the stream after the queued events."""
        self._closed = True
        self._wake.set()

    def abandon(self) -> None:
        """Ends the stream at once: another one has replaced it."""
        self._new.clear()
        self._lost.clear()
        self.close()

    def break_off(self) -> None:
        """Ends the stream at once, with an error."""
        self.broken = True
        self.abandon()

    async def next(self) -> pd_pb2.StepEvents | None:
        """The next message; None at the end. Waits as long as the call lives."""
        while True:
            beat, self._beat = self._beat, None
            if (message := self._drain().to_proto(beat)) is not None:
                return message
            if self._closed:
                return None
            self._wake.clear()
            await self._wake.wait()

    def _drain(self) -> StreamMessage:
        """What is queued for one message; losses come after all tokens."""
        message = StreamMessage()
        budget = MESSAGE_BYTES
        for request_id, log in self._next_logs():
            if budget <= 0:
                break
            budget -= log.unsent_bytes
            del self._new[request_id]
            self._add_unsent(log, message)
            if log.has_unsent:
                self._new[request_id] = log
        if not self._new:
            message.events.extend(self._lost)
            self._lost.clear()
        return message

    def _next_logs(self) -> list[tuple[str, RequestLog]]:
        """What goes with the next message: what others have goes before the crowd of one tenant, since the
        proxy handles a message as a whole."""
        logs = list(self._new.items())
        if len(logs) < CROWD:
            return logs
        [(crowd, count)] = Counter(log.tenant for _, log in logs).most_common(1)
        if count == len(logs) or 2 * count < len(logs):
            return logs
        return [entry for entry in logs if entry[1].tenant != crowd]

    def _add_unsent(self, log: RequestLog, message: StreamMessage) -> None:
        """Unsent output of one request; where it cannot be encoded, an error for this request alone."""
        try:
            if self._step_tokens and (plain := log.drain_plain()) is not None:
                message.add_tokens(log.request_id, log.attempt, *plain)
            else:
                message.events.extend(log.drain(self._clock()))
        except Exception:
            logger.exception("request %s: its events cannot be sent", log.request_id, extra=log.log_extra)
            log.fail(InternalError("the request's output could not be sent"))
            message.events.extend(log.drain_end(self._clock()))


@dataclass(slots=True)
class _Naming:
    """Requests that the next Attach will reattach."""

    round: str
    named: list[pd_pb2.Reattach] = field(default_factory=list)


@dataclass(slots=True)
class _Proxy:
    """One proxy's requests. `detached_at` is None while it has a stream."""

    detached_at: float | None
    stream: EventStream | None = None
    requests: dict[str, RequestLog] = field(default_factory=dict)
    #: Attempts that were removed, and when, in that order: the engine may still emit events of them.
    past: dict[str, tuple[int, float]] = field(default_factory=dict)
    naming: _Naming | None = None

    def knows(self, request_id: str, attempt: int) -> bool:
        """Whether this attempt, or a later one, was submitted before."""
        log = self.requests.get(request_id)
        latest = self.past.get(request_id, (-1, 0.0))[0] if log is None else log.attempt
        return latest >= attempt

    def forget_past(self, before: float) -> None:
        for request_id, (_, at) in list(self.past.items()):
            if at >= before:
                return
            del self.past[request_id]


class EventStreams:
    """The streams of all proxies, and the event logs of their requests.

    Belongs to the event loop; only `emit` may be called from another thread. `cancel(request_ids, proxy_id)`
    ends requests in the engine: those of a proxy that does not reattach, or does not name them when it does.
    `texts` are the vocabulary's, for log-probabilities. `offers`: this is a prefill worker.
    """

    def __init__(
        self,
        cancel: Callable[[Sequence[str], str], None],
        clock: Callable[[], float] = time.monotonic,
        texts: TokenTexts | None = None,
        *,
        offers: bool = False,
    ) -> None:
        self._texts = texts
        #: Whether requests are offered to decode workers with their first tokens.
        self.offers_at_first_token = offers
        self._cancel_in_engine = cancel
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._proxies: dict[str, _Proxy] = {}
        #: Requests that were opened and have not ended, by tenant. Not to be changed.
        self.unfinished_of_tenants = Counter[str]()

    @property
    def unfinished(self) -> int:
        """Requests that were opened and have not ended."""
        return self.unfinished_of_tenants.total()

    @property
    def idle(self) -> bool:
        """No request is unfinished, and every attached proxy has been sent everything."""
        streams = (proxy.stream for proxy in self._proxies.values())
        return self.unfinished == 0 and all(stream is None or stream.idle for stream in streams)

    def emit(self, events: list[EngineEvent]) -> None:
        """All events of one engine step; called from the engine's thread, which goes on at once."""
        try:
            self._loop.call_soon_threadsafe(self.deliver, events)
        except RuntimeError:
            logger.warning("%d events came after the end of the event loop", len(events))

    def deliver(self, events: Iterable[EngineEvent]) -> None:
        """Logs the events and wakes the streams; events of removed requests are dropped."""
        for event in events:
            proxy = self._proxies.get(event.proxy_id)
            log = proxy.requests.get(event.request_id) if proxy else None
            if proxy is None or log is None or log.attempt != event.attempt:
                continue
            if log.finished is not None:
                continue  # It failed here, before the engine was asked to cancel it.
            try:
                log.add(event)
            except Exception:
                logger.exception(
                    "request %s: one of its events cannot be logged", event.request_id, extra=log.log_extra
                )
                log.fail(InternalError("the request's output could not be sent"))
                self._cancel_in_engine([event.request_id], event.proxy_id)
            if self.offers_at_first_token:
                log.offered = True
            if proxy.stream is not None:
                proxy.stream.add(log)

    def offer(self, proxy_id: str, request_id: str, attempt: int, kv: KeptKV | None = None) -> None:
        """A decode worker may take the request over, as its next tokens say: with the `kv` that is kept for
        it, else with what it finds by content. See `call_offer`."""
        proxy = self._proxies.get(proxy_id)
        log = proxy.requests.get(request_id) if proxy else None
        if log is not None and log.attempt == attempt:
            log.offered, log.kv = True, kv

    def call_offer(self, proxy_id: str, request_id: str, attempt: int) -> None:
        """As `offer`, from any thread."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self.offer, proxy_id, request_id, attempt)

    def open(
        self,
        proxy_id: str,
        request_id: str,
        attempt: int,
        resumed_tokens: int = 0,
        trace: AttemptTrace | None = None,
        tenant: str = "",
    ) -> bool:
        """Opens the log of an attempt. False when it, or a later one, is known already."""
        proxy = self._proxies.setdefault(proxy_id, _Proxy(detached_at=self._clock()))
        if proxy.knows(request_id, attempt):
            return False
        self.cancel(proxy_id, [request_id])
        proxy.requests[request_id] = RequestLog(
            request_id,
            attempt,
            resumed_tokens,
            self._texts,
            trace,
            tenant=tenant,
            unfinished=self.unfinished_of_tenants,
        )
        return True

    def follow(self, request: EngineRequest) -> None:
        """The request of an attempt that is open: an offer tells what the engine finds for it."""
        self._proxies[request.proxy_id].requests[request.request_id].request = request

    def close(self, proxy_id: str, request_id: str, attempt: int) -> None:
        """Removes a request that was refused."""
        if self.holds(proxy_id, request_id, attempt):
            self._drop(self._proxies[proxy_id], request_id)

    def holds(self, proxy_id: str, request_id: str, attempt: int) -> bool:
        """Whether this attempt is open."""
        proxy = self._proxies.get(proxy_id)
        log = proxy.requests.get(request_id) if proxy else None
        return log is not None and log.attempt == attempt

    def cancel(self, proxy_id: str, request_ids: Iterable[str]) -> None:
        """Removes these requests and cancels them in the engine. Unknown ones are ignored."""
        proxy = self._proxies.get(proxy_id)
        known = [name for name in dict.fromkeys(request_ids) if proxy and name in proxy.requests]
        if proxy is None or not known:
            return
        running = [request_id for request_id in known if proxy.requests[request_id].finished is None]
        for request_id in known:
            self._drop(proxy, request_id)
        if running:
            logger.info("%d requests of proxy %s are cancelled", len(running), proxy_id)
            self._cancel_in_engine(running, proxy_id)

    def items_ready(self, proxy_id: str, mm_hashes: Sequence[str]) -> None:
        """These embeddings are in the store again: ItemMissing events of them are obsolete."""
        if proxy := self._proxies.get(proxy_id):
            for log in proxy.requests.values():
                for mm_hash in mm_hashes:
                    log.item_ready(mm_hash)

    def name(self, proxy_id: str, round: str, named: Sequence[pd_pb2.Reattach]) -> bool:
        """Adds requests that the Attach of this round will reattach. False when there are too many."""
        proxy = self._proxies.setdefault(proxy_id, _Proxy(detached_at=self._clock()))
        if proxy.naming is None or proxy.naming.round != round:
            proxy.naming = _Naming(round)
        if len(proxy.naming.named) + len(named) > MAX_NAMED:
            return False
        proxy.naming.named += named
        if proxy.detached_at is not None:
            proxy.detached_at = self._clock()  # It is about to attach.
        return True

    def named(self, proxy_id: str, round: str) -> list[pd_pb2.Reattach]:
        """The requests named in this round, which ends."""
        proxy = self._proxies.get(proxy_id)
        naming = proxy.naming if proxy else None
        if proxy is not None:
            proxy.naming = None
        return naming.named if naming is not None and naming.round == round else []

    def attach(
        self, proxy_id: str, named: Sequence[pd_pb2.Reattach], *, step_tokens: bool = False
    ) -> EventStream:
        """The proxy's stream from now on, in place of any other; `step_tokens`: it reads StepTokens.

        Named requests are sent again from their position, or Lost; those not named are cancelled.
        """
        proxy = self._proxies.setdefault(proxy_id, _Proxy(detached_at=None))
        if proxy.stream is not None:
            proxy.stream.abandon()
        stream = proxy.stream = EventStream(proxy_id, self._clock, step_tokens=step_tokens)
        proxy.detached_at = None
        abandoned = proxy.requests.keys() - {reattach.request_id for reattach in named}
        for reattach in named:
            log = proxy.requests.get(reattach.request_id)
            if log is not None and log.attempt == reattach.attempt and log.rewind(reattach.position):
                stream.add(log)
            else:
                stream.lose(reattach.request_id, reattach.attempt)
                abandoned |= proxy.requests.keys() & {reattach.request_id}
        self.cancel(proxy_id, sorted(abandoned))
        return stream

    def detach(self, stream: EventStream) -> None:
        """The stream's call has ended. Its proxy has a little time to come back."""
        proxy = self._proxies.get(stream.proxy_id)
        if proxy is not None and proxy.stream is stream:
            proxy.stream, proxy.detached_at = None, self._clock()

    def beat(self, count: int, patience: float, load: pd_pb2.PDLoad | None = None) -> None:
        """Sends the engine's beat, with the worker's load, to every proxy. Called once a second."""
        message = pd_pb2.Beat(count=count, patience=patience, load=load)
        for proxy in self._proxies.values():
            if proxy.stream is not None:
                proxy.stream.beat(message)

    def sweep(self) -> None:
        """Cancels requests of proxies that did not reattach; removes finished ones. Called regularly."""
        now = self._clock()
        for proxy_id, proxy in list(self._proxies.items()):
            if proxy.detached_at is not None and now - proxy.detached_at > KEEP_DETACHED_SECONDS:
                self.cancel(proxy_id, list(proxy.requests))
                del self._proxies[proxy_id]
                continue
            for request_id, log in list(proxy.requests.items()):
                taken = log.finished_sent_at
                if taken is not None and now - taken > KEEP_FINISHED_SECONDS:
                    self._drop(proxy, request_id)
            proxy.forget_past(now - KEEP_FINISHED_SECONDS)

    def produced(self, proxy_id: str, request_id: str) -> int | None:
        """New output tokens of this attempt; None where it has ended or is unknown."""
        proxy = self._proxies.get(proxy_id)
        log = proxy.requests.get(request_id) if proxy else None
        return log.produced if log is not None and log.finished is None else None

    def hand_over(self) -> None:
        """Ends all unfinished requests here; the proxies resume them at another worker."""
        for proxy_id, proxy in self._proxies.items():
            unfinished = [log for log in proxy.requests.values() if log.finished is None]
            self.cancel(proxy_id, [log.request_id for log in unfinished])
            if proxy.stream is not None:
                for log in unfinished:
                    proxy.stream.lose(log.request_id, log.attempt)

    def lose_engine(self) -> None:
        """Forgets all requests and breaks all streams: the engine has ended, as this process might have.

        The proxies find another incarnation when they attach again, and resume the requests elsewhere.
        """
        for proxy in self._proxies.values():
            for request_id in list(proxy.requests):
                self._drop(proxy, request_id)
            if proxy.stream is not None:
                proxy.stream.break_off()

    def shut_down(self) -> None:
        """Ends every stream after its last events; the proxies resume unfinished requests elsewhere."""
        for proxy in self._proxies.values():
            if proxy.stream is None:
                continue
            for log in proxy.requests.values():
                if log.finished is None:
                    proxy.stream.lose(log.request_id, log.attempt)
            proxy.stream.close()

    def _drop(self, proxy: _Proxy, request_id: str) -> None:
        log = proxy.requests.pop(request_id)
        log.removed()
        attempt = log.attempt
        proxy.past.pop(request_id, None)
        proxy.past[request_id] = (attempt, self._clock())
        if proxy.stream is not None:
            proxy.stream.forget(request_id)
