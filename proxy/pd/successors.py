"""Successors: attempts at decode workers that are to take requests over from prefill workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from grpc import aio

from triptych.base.errors import Overloaded, Unavailable
from triptych.base.log import log_fields
from triptych.base.types import KeptKV
from triptych.protos import pd_pb2
from triptych.protos.convert import error_from_proto, kv_from_proto, kv_to_proto
from triptych.proxy.events import Accepted, Refused, SuccessorSent, lost
from triptych.proxy.pd.choice import worth_while
from triptych.proxy.pd.wire import submit_message
from triptych.proxy.ports import Link, RequestEvents
from triptych.proxy.requests.instructions import HandOver, TakeOver
from triptych.proxy.requests.request import InFlightRequest

logger = logging.getLogger(__name__)

#: How often a decode worker is looked for, for requests that none has room for.
LOOK_SECONDS = 0.1
#: How long a request stays where it is after a decode worker has not taken it over.
PAUSE_SECONDS = 0.5


@dataclass(slots=True)
class _Offer:
    """A request that waits for a decode worker with room, not before the moment `at`."""

    request: InFlightRequest
    attempt: int
    at: float


class Successors:
    """Requests that prefill workers have offered, and the links of their successors.

    All of them go on meanwhile: nothing is lost with a decode worker that does not take one.
    """

    def __init__(
        self,
        choose: Callable[[InFlightRequest], Link | None],
        proxy_id: str,
        events: RequestEvents,
        clock: Callable[[], float],
        spawn: Callable[[Coroutine[object, object, None]], asyncio.Task[None]],
    ) -> None:
        self._choose = choose
        self._proxy_id = proxy_id
        self._events = events
        self._clock = clock
        self._spawn = spawn
        self._offers: dict[str, _Offer] = {}
        self._submits: dict[str, asyncio.Task[None]] = {}
        #: What prefill workers' engines keep of them.
        self._kept: dict[str, KeptKV] = {}
        #: Requests that are at two workers.
        self.twice: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None

    def place(self, request: InFlightRequest, order: HandOver) -> None:
        """Submits the successor now, or as soon as a decode worker has room."""
        name, link = request.request_id, request.successor_link
        if order.kv is not None and (kept := kv_from_proto(order.kv, self._clock())) is not None:
            self._kept[name] = kept
        if order.behind and link is not None and link.attached:
            self._stop(name)
            self._send(request, order.attempt, link)
            return
        again = self._leave(request)
        self._offers[name] = _Offer(request, order.attempt, self._clock() + again * PAUSE_SECONDS)
        self._look()

    def take(self, request: InFlightRequest, order: TakeOver) -> None:
        """The successor takes over: its link is the request's from now on, and the other worker frees it."""
        name = request.request_id
        before, link = request.link, request.successor_link
        assert link is not None
        request.link, request.successor_link = link, None
        self.twice.discard(name)
        self._submits.pop(name, None)  # its answer is waited for all the same
        self._kept.pop(name, None)
        logger.info(
            "request %s goes on at PD worker %s%s",
            request.name,
            link.address,
            ", since its prefill worker is lost" if order.lost else "",
            extra=request.log_extra | log_fields(worker=link.address),
        )
        if before is not None:
            before.forget(name)
            before.cancel(name)
        if request.output.paused:
            link.pause(name, True)

    def drop(self, request: InFlightRequest) -> None:
        """Nobody takes the request over any more."""
        self._offers.pop(request.request_id, None)
        self._kept.pop(request.request_id, None)
        self._leave(request)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _leave(self, request: InFlightRequest) -> bool:
        """Frees the successor at its worker; whether there was any."""
        name = request.request_id
        self._stop(name)
        link, request.successor_link = request.successor_link, None
        self.twice.discard(name)
        if link is not None:
            link.forget(name)
            link.cancel(name)
        return link is not None

    def _stop(self, name: str) -> None:
        if (task := self._submits.pop(name, None)) is not None:
            task.cancel()

    def _look(self) -> None:
        """Submits what a decode worker has room for, and looks again later for the others."""
        now = self._clock()
        for name, offer in list(self._offers.items()):
            machine = offer.request.lifecycle
            if machine.successor != offer.attempt or not worth_while(offer.request):
                del self._offers[name]
                self._kept.pop(name, None)
                continue
            if now < offer.at or machine.lacks_items or offer.request.output.paused:
                continue
            if (link := self._choose(offer.request)) is not None:
                del self._offers[name]
                self._send(offer.request, offer.attempt, link)
        if self._offers and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._look()

    def _send(self, request: InFlightRequest, attempt: int, link: Link) -> None:
        name, machine = request.request_id, request.lifecycle
        request.successor_link = link
        self.twice.add(name)
        link.track(name, attempt, machine.output_token_ids, request.call.tenant)
        self._submits[name] = self._spawn(self._submit(request, attempt, link))

    async def _submit(self, request: InFlightRequest, attempt: int, link: Link) -> None:
        name, machine = request.request_id, request.lifecycle
        try:
            async with request.sending:
                if machine.successor != attempt:
                    return  # over while other choices were sent
                self._events.deliver(name, SuccessorSent(attempt))
                # Once: what was read may be another request's by now.
                kept = self._kept.pop(name, None)
                now = self._clock()
                seconds, kv = request.seconds_left(now), kv_to_proto(kept, now)
                message = submit_message(request, self._proxy_id, seconds, successor=attempt, kv=kv)
                reply = await link.submit(message)
        except aio.AioRpcError as error:
            self._not_taken(request, link, error.code().name)
            self._events.deliver(name, lost(attempt))
            return
        except Exception:
            logger.exception("request %s is not handed over", request.name, extra=request.log_extra)
            self._events.deliver(name, lost(attempt))
            return
        if attempt not in (machine.attempt, machine.successor):
            return
        if reply.status != pd_pb2.SubmitReply.STATUS_REFUSED:
            self._events.deliver(name, Accepted(attempt))
            return
        if kept is not None:
            self._kept[name] = kept  # a worker that refuses has read nothing
        refusal = error_from_proto(reply.error)
        self._not_taken(request, link, refusal.message)
        later = isinstance(refusal, Overloaded | Unavailable) or machine.attempt == attempt
        self._events.deliver(name, lost(attempt) if later else Refused(attempt, refusal))

    def _not_taken(self, request: InFlightRequest, link: Link, why: str) -> None:
        logger.info(
            "request %s is not taken over by PD worker %s: %s",
            request.name,
            link.address,
            why,
            extra=request.log_extra | log_fields(worker=link.address),
        )
