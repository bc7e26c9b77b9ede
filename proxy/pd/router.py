"""Router of requests to PD workers: links, the queue of requests that wait for a worker, hand-over."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import closing
from functools import partial

from grpc import aio

from triptych.base.errors import ContextTooLong, InternalError, Overloaded, RequestError, Unavailable
from triptych.base.log import log_fields
from triptych.protos import pd_pb2
from triptych.protos.convert import error_from_proto
from triptych.proxy.events import Accepted, Refused, RequestFailed, lost
from triptych.proxy.pd.choice import PDChoice
from triptych.proxy.pd.lengths import min_tokens, takes, too_long
from triptych.proxy.pd.link import OUR_FAULT
from triptych.proxy.pd.stall_watch import LOOK_SECONDS
from triptych.proxy.pd.successors import Successors
from triptych.proxy.pd.waiting import WaitingSubmits
from triptych.proxy.pd.wire import submit_message
from triptych.proxy.ports import Link, ProcessEnd, RequestEvents, Transport
from triptych.proxy.requests.instructions import EndAttempt, HandOver, Submit, TakeOver
from triptych.proxy.requests.request import InFlightRequest
from triptych.proxy.routing import CLEARING_TOKENS, MAX_LOSSES, PrefixAffinity, Suspects
from triptych.proxy.workers import KnownWorkers

logger = logging.getLogger(__name__)

#: How long a request keeps away from a worker that refused it, or failed to take it.
BACK_OFF_SECONDS = 0.5
#: In a worker's capacity: 1 where its KV cache keeps what items gave, else 0. A worker that does not say
#: does not know of items that nobody encodes.
KEEPS_ITEMS = "keeps_items"


class PDRouter:
    """Hands requests over by rank: suspects first and alone, then resumed requests, then new ones."""

    def __init__(
        self,
        pool: KnownWorkers,
        proxy_id: str,
        transport: Transport,
        events: RequestEvents,
        clock: Callable[[], float],
        *,
        on_poison: Callable[[], None] = lambda: None,
        prefill_threshold: int = 0,
    ) -> None:
        self._on_poison = on_poison
        self._pool = pool
        self._proxy_id = proxy_id
        self._transport = transport
        self._events = events
        self._clock = clock
        self.suspects: Suspects[str] = Suspects()
        self._alone: dict[str, InFlightRequest] = {}
        self._links: dict[str, Link] = {}
        self._waiting = WaitingSubmits()
        #: Hand-overs under way, by request id.
        self._handing: dict[str, asyncio.Task[None]] = {}
        self._affinity = PrefixAffinity()
        self._choice = PDChoice(
            pool, self._links, self._affinity, lambda: self.suspects.apart, clock, prefill_threshold
        )
        self._successors = Successors(self._choose_successor, proxy_id, events, clock, self._spawn)
        self._tasks: set[asyncio.Task[None]] = set()
        self._pumping = False
        self._checking = asyncio.create_task(self._check_links(), name="stalls of PD workers")

    async def close(self) -> None:
        self._successors.close()
        tasks = [*self._tasks, self._checking]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self._links.values()))

    def sync(self) -> None:
        """One link per known PD worker."""
        known = [address for pool, address in self._pool.workers if pool == "pd"]
        for address in self._links.keys() - set(known):
            self._spawn(self._links.pop(address).close())
        for address in known:
            if address not in self._links:
                self._links[address] = self._transport.open_link(address, self._events, self)
        for address in set(self._pool.silent("pd")) - self.suspects.apart:
            if address in self._links:
                self._links[address].give_up(silent=True)
        for request, order in self._waiting:
            self._refuse_too_long(request, order)
        self.pump()

    async def _check_links(self) -> None:
        """Sets workers aside whose engines stand still, until they move again."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for link in list(self._links.values()):
                try:
                    if link.check(self._clock()):
                        self.pump()
                except Exception:
                    logger.exception("PD worker %s could not be checked", link.address)

    def lose(self, address: str) -> None:
        """The worker has stalled or gone: its requests are lost."""
        if link := self._links.get(address):
            link.give_up()

    @property
    def links(self) -> Mapping[str, Link]:
        """The links to all known PD workers, by address."""
        return self._links

    @property
    def load(self) -> tuple[int, int]:
        """Requests that are at a worker or wait for one, and those that wait."""
        waiting = len(self._waiting)
        at_workers = sum(link.in_flight for link in self._links.values()) - len(self._successors.twice)
        return waiting + at_workers, waiting

    @property
    def idle(self) -> bool:
        """No request is at a PD worker or waits for one, as far as is known."""
        now, links = self._clock(), self._links.values()
        reports = [report for link in links if (report := link.load(now)) is not None]
        return bool(links) and not self.load[0] and not any(each.running or each.waiting for each in reports)

    def known_prefixes(self, request: InFlightRequest) -> int:
        """How many prefixes of its chain the worker has had that would get the request now; 0 where that one
        does not keep what it computes."""
        link = self._choice.choose(request)
        if link is None or not self._capacity(link).get(KEEPS_ITEMS, 0):
            return 0
        return self._affinity.depth(request.content.chain, link.address)

    def waits(self, request: InFlightRequest) -> bool:
        """Whether the request is in the queue for a worker."""
        return request.request_id in self._waiting

    def submit(self, request: InFlightRequest, order: Submit) -> None:
        """Hands the request over now, or as soon as a worker can take it."""
        plans = [request.lifecycle.items[item.mm_hash].plan for item in request.content.items]
        items = [plan.length for plan in plans if plan is not None]
        machine = request.lifecycle
        known = None if machine.prompt_token_ids is None else len(machine.prompt_token_ids)
        tokens = min_tokens(request.call, items, known, len(machine.output_token_ids))
        request.min_tokens = max(request.min_tokens, tokens)
        if not self._waiting and not self.suspects and (link := self._choice.choose(request, open=True)):
            self._send(request, order, link)  # nobody is before it, and turns begin equal again
            return
        self._waiting.add(request, order)
        self._refuse_too_long(request, order)
        self.pump()

    def _refuse_too_long(self, request: InFlightRequest, order: Submit) -> None:
        """Fails a new request that no known worker takes; one that was under way waits for such a worker."""
        limits = self._pool.max_model_lens(request.bound)
        taken = not limits or any(takes(limit, request.min_tokens) for limit in limits)
        if taken or order.resumes:
            return
        error = too_long(request.call, request.min_tokens, max(limits))
        self._events.deliver(request.request_id, Refused(order.attempt, error))

    def hand_over(self, request: InFlightRequest, order: HandOver) -> None:
        """Its prefill worker offers the request: a decode worker is to take it over."""
        self._successors.place(request, order)

    def keep(self, request: InFlightRequest) -> None:
        """No decode worker takes it over any more."""
        self._successors.drop(request)

    def take_over(self, request: InFlightRequest, order: TakeOver) -> None:
        """The decode worker's attempt is the request's now: the prefill worker frees it."""
        self._successors.take(request, order)

    def _choose_successor(self, request: InFlightRequest) -> Link | None:
        """One that may have ended workers stays where it is."""
        alone = request.request_id in self._alone or self.suspects.suspect(request.request_id)
        return None if alone else self._choice.choose_successor(request)

    def withdraw(self, request: InFlightRequest) -> None:
        """The request has ended: it leaves the queue, and no worker keeps it."""
        self._waiting.discard(request.request_id)
        self._successors.drop(request)
        self._stop_handing(request)
        self._alone.pop(request.request_id, None)
        self._cancel_stale(request, None)
        if self.suspects.forget(request.request_id):
            self.pump()

    def notify(self, request: InFlightRequest, mm_hashes: Sequence[str]) -> None:
        """Reports to the request's worker that these items are in the store."""
        if request.link is not None:
            items = {key: request.lifecycle.items[key] for key in mm_hashes}
            sources = {key: item.source for key, item in items.items() if item.source is not None}
            request.link.notify(mm_hashes, sources)

    def pause(self, request: InFlightRequest, paused: bool) -> None:
        """Has the request's workers put out nothing for it, or go on."""
        for link in (request.link, request.successor_link):
            if link is not None:
                link.pause(request.request_id, paused)

    def release(self, request: InFlightRequest, order: EndAttempt) -> None:
        """The request's attempt is over."""
        if order.back_off and request.link is not None:
            self._back_off(request, request.link)
        self._waiting.discard(request.request_id)
        self._successors.drop(request)
        self._stop_handing(request)
        self._alone.pop(request.request_id, None)
        if self.suspects.retreat(request.request_id):
            asyncio.get_running_loop().call_soon(self.pump)
        if request.link is None:
            return
        request.link.forget(request.request_id)
        if order.cancel:
            request.stale_link = request.link
        request.link = None
        if order.now:
            self._cancel_stale(request, None)

    def pump(self) -> None:
        """Hands over whatever a worker can take now, of tenants for whom any is open."""
        if self._pumping or not self._waiting:
            return
        self._pumping = True
        try:
            if self.suspects:
                self._place_suspects()
            with closing(self._waiting.in_turns(self._open_to)) as waiting:
                for request, order in waiting:
                    suspect = self.suspects.suspect(request.request_id)
                    if not suspect and (link := self._choice.choose(request, open=True)):
                        self._waiting.hand_over(request)
                        self._send(request, order, link)
        finally:
            self._pumping = False

    def _place_suspects(self) -> None:
        """Has a worker set apart for a suspect, unless another one is tried; it waits until then."""
        for request, order in sorted(self._waiting, key=lambda entry: entry[0].order):
            if not self.suspects.suspect(request.request_id):
                continue
            loads = self._choice.candidates(request)
            address = self.suspects.place(request.request_id, request.bound.model_key, loads)
            if address is not None:
                self._spawn(self._run_alone(request, order, self._links[address]))

    def _open_to(self, tenant: str) -> bool:
        return any(link.open_to(tenant) for link in self._links.values())

    def _send(self, request: InFlightRequest, order: Submit, link: Link) -> None:
        request.link = link
        link.track(request.request_id, order.attempt, request.lifecycle.output_token_ids, request.call.tenant)
        task = self._spawn(self._hand_over(request, order, link))
        self._handing[request.request_id] = task
        task.add_done_callback(partial(self._handed, request.request_id))

    def _handed(self, request_id: str, task: asyncio.Task[None]) -> None:
        """The Submit is answered, or not waited for any more: there may be room for another one."""
        if self._handing.get(request_id) is task:
            del self._handing[request_id]
        self.pump()

    def _stop_handing(self, request: InFlightRequest) -> None:
        """The attempt is over: its Submit is not waited for, and not repeated."""
        if (task := self._handing.pop(request.request_id, None)) is not None:
            task.cancel()

    async def _run_alone(self, request: InFlightRequest, order: Submit, link: Link) -> None:
        request_id = request.request_id
        taken = False
        try:
            taken = await link.set_apart(request_id, CLEARING_TOKENS)
        except Exception:
            logger.exception("request %s", request.name, extra=request.log_extra)
        if self._waiting.order_of(request_id) is not order:
            link.cancel(request_id)  # it has ended meanwhile
            return
        if not taken:
            self._back_off(request, link)
            self.suspects.retreat(request_id)
            self.pump()
            return
        logger.info(
            "request %s runs alone at PD worker %s",
            request.name,
            link.address,
            extra=request.log_extra | log_fields(worker=link.address),
        )
        self.suspects.alone(request_id, len(request.lifecycle.output_token_ids))
        self._alone[request_id] = request
        self._waiting.hand_over(request)
        self._send(request, order, link)

    def attached(self, incarnation: str) -> None:
        if incarnation:
            self.suspects.returned(incarnation)
        self.pump()

    def stepped(self) -> None:
        """Clears suspects that have made enough progress alone."""
        for request_id, request in list(self._alone.items()) if self._alone else ():
            if self.suspects.progress(request_id, len(request.lifecycle.output_token_ids)):
                logger.info("request %s is cleared", request.name, extra=request.log_extra)
                del self._alone[request_id]
                self.pump()

    def ended(self, end: ProcessEnd) -> None:
        """Notes the loss: what the worker had, and has not had alone, is at most a suspect."""
        logger.warning(
            "PD worker %s is lost with %d requests",
            end.address,
            len(end.requests),
            extra=log_fields(worker=end.address),
        )
        for request_id in self.suspects.lost(end.address, end.incarnation, end.requests, final=end.final):
            self._fail_poison(self._alone[request_id])
        asyncio.get_running_loop().call_soon(self.pump)

    def _fail_poison(self, request: InFlightRequest) -> None:
        """The request was alone when a PD worker ended, and present twice before: it is not tried again."""
        self._on_poison()
        error_id = secrets.token_hex(8)
        logger.error(
            "request %s ended %d PD workers, error id %s",
            request.name,
            MAX_LOSSES,
            error_id,
            extra=request.log_extra,
        )
        message = (
            f"{MAX_LOSSES} PD workers ended while the request was at work in them, the last one with "
            f"nothing else; it is not tried again (error id {error_id})"
        )
        self._events.deliver(request.request_id, RequestFailed(InternalError(message)))

    async def _hand_over(self, request: InFlightRequest, order: Submit, link: Link) -> None:
        machine = request.lifecycle
        if machine.attempt != order.attempt:
            return  # over before it began: nobody would ever cancel it at the worker
        self._cancel_stale(request, link)
        keeps = KEEPS_ITEMS in self._capacity(link)
        try:
            async with request.sending:
                if machine.attempt != order.attempt:
                    return  # over while other choices were sent
                seconds, may = request.seconds_left(self._clock()), self._choice.may_hand_over(request, link)
                message = submit_message(
                    request, self._proxy_id, seconds, keeps_items=keeps, may_hand_over=may
                )
                reply = await link.submit(message)
        except aio.AioRpcError as error:
            self._not_taken(request, order, link, error)
            return
        except Exception:
            logger.exception("request %s", request.name, extra=request.log_extra)
            reason = InternalError("an unexpected error in the proxy")
            self._events.deliver(request.request_id, Refused(order.attempt, reason))
            return
        if machine.attempt != order.attempt:
            return  # the worker has given the request up meanwhile
        if reply.status == pd_pb2.SubmitReply.STATUS_REFUSED:
            self._refused(request, order, link, error_from_proto(reply.error))
        elif machine.ended:
            link.forget(request.request_id)
            link.cancel(request.request_id)
        else:
            self._affinity.record(request.content.chain, link.address)
            self._events.deliver(request.request_id, Accepted(order.attempt))
            if request.output.paused:
                link.pause(request.request_id, True)

    def _not_taken(self, request: InFlightRequest, order: Submit, link: Link, error: aio.AioRpcError) -> None:
        """The worker's calls fail, and its stream stands: it may have the request, which goes on elsewhere as
        the next attempt. Others that are there are not disturbed."""
        logger.info(
            "PD worker %s did not take a request: %s",
            link.address,
            error.code().name,
            extra=request.log_extra | log_fields(worker=link.address),
        )
        if error.code() in OUR_FAULT:
            reason = InternalError(f"the PD worker rejected the call: {error.code().name}")
            self._events.deliver(request.request_id, Refused(order.attempt, reason))
            return
        self._back_off(request, link)
        self._events.deliver(request.request_id, lost(order.attempt))

    def _refused(self, request: InFlightRequest, order: Submit, link: Link, error: RequestError) -> None:
        """A worker that is full or stopping is no reason to fail while another one may take the request."""
        link.forget(request.request_id)
        if isinstance(error, ContextTooLong) and self._longer_than(request, link):
            self._events.deliver(request.request_id, lost(order.attempt))
            return
        if error.param == "request_id":
            # Ids are ours: a call broke, and this is one more. A worker of an earlier release takes none.
            self._back_off(request, link)
            self._events.deliver(request.request_id, lost(order.attempt))
            return
        if not isinstance(error, (Overloaded, Unavailable)):
            self._events.deliver(request.request_id, Refused(order.attempt, error))
            return
        self._back_off(request, link)
        if isinstance(error, Overloaded) and not order.resumes and not self._choice.candidates(request):
            self._events.deliver(request.request_id, Refused(order.attempt, error))
            return
        self._events.deliver(request.request_id, lost(order.attempt))

    def _longer_than(self, request: InFlightRequest, link: Link) -> bool:
        """Whether another worker takes more tokens than this one, which has counted too many for itself."""
        limit = self._capacity(link).get("max_model_len", 0)
        if limit == 0 or max(self._pool.max_model_lens(request.bound)) <= limit:
            return False
        request.min_tokens = max(request.min_tokens, limit + 1)
        return True

    def _capacity(self, link: Link) -> Mapping[str, int]:
        """What its worker has registered; empty where it is not known any more."""
        worker = self._pool.workers.get(("pd", link.address))
        return worker.info.capacity if worker is not None else {}

    def _back_off(self, request: InFlightRequest, link: Link) -> None:
        request.refused_by.add(link.address)
        asyncio.get_running_loop().call_later(BACK_OFF_SECONDS, self._end_back_off, request, link.address)

    def _end_back_off(self, request: InFlightRequest, address: str) -> None:
        request.refused_by.discard(address)
        self.pump()

    def _cancel_stale(self, request: InFlightRequest, link: Link | None) -> None:
        """An attempt that was given up may still run; on the same worker the new attempt replaces it."""
        if request.stale_link is not None and request.stale_link is not link:
            request.stale_link.cancel(request.request_id)
        request.stale_link = None

    def _spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
