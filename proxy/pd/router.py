"""Which PD worker gets which request: the links, the requests that wait for one, and the handing over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio

from triptych.errors import ContextTooLong, InternalError, Overloaded, RequestError, Unavailable
from triptych.protos import pd_pb2
from triptych.protos.convert import error_from_proto, plan_to_proto, sampling_to_proto
from triptych.proxy.pd.context_length import least_tokens, takes, too_long
from triptych.proxy.pd.link import LinkSink, PDLink, ProcessEnd
from triptych.proxy.pd.stall_watch import LOOK_SECONDS
from triptych.proxy.pd.suspects import CLEARING_TOKENS, Suspects
from triptych.proxy.pd.wire import (
    encoder_prompt_to_proto,
    prompt_to_proto,
    resume_to_proto,
    template_to_proto,
    transcription_to_proto,
)
from triptych.proxy.pool import WorkerPool
from triptych.proxy.requests.flow import Flow
from triptych.proxy.requests.lifecycle import Submit
from triptych.proxy.routing import PDLoad, PrefixAffinity, choose_pd

logger = logging.getLogger(__name__)

#: How long a worker that refused a request, or failed to take it, is left in peace by it.
REFUSAL_SECONDS = 0.5
DEFAULT_SEQS = 64
_OUR_FAULT = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAUTHENTICATED,
)


@dataclass(frozen=True, slots=True)
class RouterSink:
    """Where the router's news goes."""

    events: Callable[[Iterable[pd_pb2.RequestEvent]], None]
    lost: Callable[[str, int], None]
    accepted: Callable[[Flow, int], None]
    refused: Callable[[Flow, int, RequestError], None]
    #: A request that ends every worker.
    poison: Callable[[str], None]


class PDRouter:
    """Requests taken up again go before new ones, suspects before all others and alone."""

    def __init__(
        self, pool: WorkerPool, proxy_id: str, sink: RouterSink, *, stall_timeout: float = 0.0
    ) -> None:
        self._pool = pool
        self._proxy_id = proxy_id
        self._sink = sink
        self._link_sink = LinkSink(self._events, sink.lost, self._attached, self._ended)
        self.suspects = Suspects()
        self._alone: dict[str, Flow] = {}
        self._links: dict[str, PDLink] = {}
        self._waiting: dict[str, tuple[Flow, Submit]] = {}
        self._affinity = PrefixAffinity()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pumping = False
        self._stall_timeout = stall_timeout
        self._looking = asyncio.create_task(self._look(), name="stalls of PD workers")

    async def close(self) -> None:
        tasks = [*self._tasks, self._looking]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self._links.values()))

    def sync(self) -> None:
        """One link per known PD worker."""
        known = {address: w for (pool, address), w in self._pool.workers.items() if pool == "pd"}
        for address in self._links.keys() - known.keys():
            self._spawn(self._links.pop(address).close())
        for address, worker in known.items():
            if address not in self._links:
                self._links[address] = PDLink(
                    address, worker.channel, self._proxy_id, self._link_sink, self._stall_timeout
                )
        for flow, order in list(self._waiting.values()):
            self._refuse_too_long(flow, order)
        self.pump()

    async def _look(self) -> None:
        """Sets workers aside whose engines stand still, until they move again."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for link in list(self._links.values()):
                try:
                    if link.look(loop.time()):
                        self.pump()
                except Exception:
                    logger.exception("PD worker %s could not be looked at", link.address)

    def lose(self, address: str) -> None:
        """The worker has stalled or gone; its requests are told as lost."""
        if link := self._links.get(address):
            link.give_up()

    def waits(self, flow: Flow) -> bool:
        return flow.request_id in self._waiting

    def submit(self, flow: Flow, order: Submit) -> None:
        """Hands the request over now, or as soon as a worker can take it."""
        self._waiting[flow.request_id] = (flow, order)
        plans = flow.lifecycle.plans
        items = (plans[item.mm_hash].length for item in flow.split.items) if flow.split else ()
        tokens = least_tokens(flow.call, items, order.resume)
        flow.least_tokens = max(flow.least_tokens, tokens)
        self._refuse_too_long(flow, order)
        self.pump()

    def _refuse_too_long(self, flow: Flow, order: Submit) -> None:
        """A new request that no known worker takes fails; one that some worker took waits for its like."""
        assert flow.binding is not None
        limits = self._pool.max_model_lens(flow.binding.model_key)
        if order.resume is not None or not limits or any(takes(limit, flow.least_tokens) for limit in limits):
            return
        self._sink.refused(flow, order.attempt, too_long(flow.call, flow.least_tokens, max(limits)))

    def withdraw(self, flow: Flow) -> None:
        """The request has ended: it waits no longer, and no worker keeps it."""
        self._waiting.pop(flow.request_id, None)
        self._alone.pop(flow.request_id, None)
        self._cancel_stale(flow, None)
        if self.suspects.forget(flow.request_id):
            self.pump()

    def leave_in_peace(self, flow: Flow) -> None:
        """The worker that has the request gets it no more for half a second."""
        if flow.link is not None:
            self._leave_in_peace(flow, flow.link)

    def release(self, flow: Flow, *, cancel: bool, now: bool = False) -> None:
        """The request's attempt is over. Its worker has to hear of that, `now` or with the next attempt."""
        self._waiting.pop(flow.request_id, None)
        self._alone.pop(flow.request_id, None)
        if self.suspects.retreat(flow.request_id):
            asyncio.get_running_loop().call_soon(self.pump)
        if flow.link is None:
            return
        flow.link.forget(flow.request_id)
        if cancel:
            flow.stale_link = flow.link
        flow.link = None
        if now:
            self._cancel_stale(flow, None)

    def pump(self) -> None:
        """Hands over whatever a worker can take now."""
        if self._pumping or not self._waiting:
            return
        self._pumping = True
        try:
            for flow, order in sorted(self._waiting.values(), key=self._rank):
                if self.suspects.suspect(flow.request_id):
                    self._place(flow, order)
                elif link := self._choose(flow):
                    self._send(flow, order, link)
        finally:
            self._pumping = False

    def _rank(self, entry: tuple[Flow, Submit]) -> tuple[bool, bool, int]:
        flow = entry[0]
        return (not self.suspects.suspect(flow.request_id), not flow.resumed, flow.order)

    def _send(self, flow: Flow, order: Submit, link: PDLink) -> None:
        del self._waiting[flow.request_id]
        flow.link = link
        link.track(flow.request_id, order.attempt, flow.lifecycle.output_token_ids.__len__)
        self._spawn(self._hand_over(flow, order, link))

    def _place(self, flow: Flow, order: Submit) -> None:
        """Has a worker set apart for the suspect, if it is its turn. It waits until that is so."""
        assert flow.binding is not None
        loads = self._candidates(flow)
        address = self.suspects.place(flow.request_id, flow.binding.model_key, loads)
        if address is not None:
            self._spawn(self._run_alone(flow, order, self._links[address]))

    async def _run_alone(self, flow: Flow, order: Submit, link: PDLink) -> None:
        request_id = flow.request_id
        taken = False
        try:
            taken = await link.set_apart(request_id, CLEARING_TOKENS)
        except Exception:
            logger.exception("request %s", flow.name)
        if self._waiting.get(request_id, (flow, None))[1] is not order:
            link.cancel(request_id)  # it has ended meanwhile
            return
        if not taken:
            self._leave_in_peace(flow, link)
            self.suspects.retreat(request_id)
            self.pump()
            return
        logger.info("request %s runs alone at PD worker %s", flow.name, link.address)
        self.suspects.alone(request_id, len(flow.lifecycle.output_token_ids))
        self._alone[request_id] = flow
        self._send(flow, order, link)

    def _events(self, events: Iterable[pd_pb2.RequestEvent]) -> None:
        self._sink.events(events)
        for request_id, flow in list(self._alone.items()):
            if self.suspects.progress(request_id, len(flow.lifecycle.output_token_ids)):
                logger.info("request %s is cleared", flow.name)
                del self._alone[request_id]
                self.pump()

    def _attached(self, incarnation: str) -> None:
        if incarnation:
            self.suspects.returned(incarnation)
        self.pump()

    def _ended(self, end: ProcessEnd) -> None:
        """A worker is lost: what it had, and has not had alone, is at most a suspect."""
        logger.warning("PD worker %s is lost with %d requests", end.address, len(end.requests))
        for request_id in self.suspects.lost(end.address, end.incarnation, end.requests, final=end.final):
            self._sink.poison(request_id)
        asyncio.get_running_loop().call_soon(self.pump)

    def _candidates(self, flow: Flow) -> list[PDLoad]:
        assert flow.binding is not None
        loads = []
        closed = flow.refused_by | self.suspects.apart
        for worker in self._pool.serving("pd"):
            info = worker.info
            link = self._links.get(info.address)
            if link is None or not link.attached or link.set_aside or info.address in closed:
                continue
            if not takes(info.capacity.get("max_model_len", 0), flow.least_tokens):
                continue
            if info.model_key == flow.binding.model_key:
                seqs = max(info.capacity.get("max_num_seqs", DEFAULT_SEQS), 1)
                loads.append(PDLoad(info.address, link.in_flight, seqs))
        return loads

    def _choose(self, flow: Flow) -> PDLink | None:
        assert flow.split is not None
        address = choose_pd(self._candidates(flow), flow.split.chain, self._affinity)
        return None if address is None else self._links[address]

    async def _hand_over(self, flow: Flow, order: Submit, link: PDLink) -> None:
        self._cancel_stale(flow, link)
        machine = flow.lifecycle
        try:
            message = self._message(flow, order)
            reply = await link.submit(message)
        except aio.AioRpcError as error:
            logger.info("PD worker %s did not take a request: %s", link.address, error.code().name)
            self._leave_in_peace(flow, link)
            if error.code() in _OUR_FAULT:
                reason = InternalError(f"the PD worker rejected the call: {error.code().name}")
                self._sink.refused(flow, order.attempt, reason)
            else:
                link.reattach()  # and hear what became of it, and of the worker
            return
        except Exception:
            logger.exception("request %s", flow.name)
            self._sink.refused(flow, order.attempt, InternalError("an unexpected error in the proxy"))
            return
        if machine.attempt != order.attempt:
            return  # the worker has told meanwhile that it gives the request up
        if reply.status == pd_pb2.SubmitReply.STATUS_REFUSED:
            self._refused(flow, order, link, error_from_proto(reply.error))
        elif machine.ended:
            link.forget(flow.request_id)
            link.cancel(flow.request_id)
        else:
            assert flow.split is not None
            self._affinity.record(flow.split.chain, link.address)
            self._sink.accepted(flow, order.attempt)

    def _refused(self, flow: Flow, order: Submit, link: PDLink, error: RequestError) -> None:
        """A worker that is full or stopping is no reason to fail while another one may take the request."""
        link.forget(flow.request_id)
        if isinstance(error, ContextTooLong) and self._longer_than(flow, link):
            self._sink.lost(flow.request_id, order.attempt)
            return
        if not isinstance(error, (Overloaded, Unavailable)):
            self._sink.refused(flow, order.attempt, error)
            return
        self._leave_in_peace(flow, link)
        if isinstance(error, Overloaded) and not order.resume and not self._candidates(flow):
            self._sink.refused(flow, order.attempt, error)
            return
        self._sink.lost(flow.request_id, order.attempt)

    def _longer_than(self, flow: Flow, link: PDLink) -> bool:
        """Whether another worker takes more tokens than this one, which has counted too many for itself."""
        assert flow.binding is not None
        worker = self._pool.workers.get(("pd", link.address))
        limit = worker.info.capacity.get("max_model_len", 0) if worker is not None else 0
        if limit == 0 or max(self._pool.max_model_lens(flow.binding.model_key)) <= limit:
            return False
        flow.least_tokens = max(flow.least_tokens, limit + 1)
        return True

    def _leave_in_peace(self, flow: Flow, link: PDLink) -> None:
        def forgive() -> None:
            flow.refused_by.discard(link.address)
            self.pump()

        flow.refused_by.add(link.address)
        asyncio.get_running_loop().call_later(REFUSAL_SECONDS, forgive)

    def _cancel_stale(self, flow: Flow, link: PDLink | None) -> None:
        """An attempt that was given up may still run; on the same worker the new attempt replaces it."""
        if flow.stale_link is not None and flow.stale_link is not link:
            flow.stale_link.cancel(flow.request_id)
        flow.stale_link = None

    def _message(self, flow: Flow, order: Submit) -> pd_pb2.SubmitRequest:
        assert flow.split is not None and flow.binding is not None
        plans = flow.lifecycle.plans
        remaining = flow.deadline - asyncio.get_running_loop().time()
        message = pd_pb2.SubmitRequest(
            request_id=flow.request_id,
            label=flow.call.label,
            attempt=order.attempt,
            proxy_id=self._proxy_id,
            model_key=flow.binding.model_key,
            timeout=max(remaining, 0.1),
            messages=flow.split.messages,
            sampling=sampling_to_proto(flow.call.sampling),
            salt=flow.call.salt,
            template=template_to_proto(flow.call.template),
            encoder_prompt=encoder_prompt_to_proto(flow.call.encoder) if flow.call.encoder else None,
            transcription=transcription_to_proto(flow.call.transcription),
        )
        if flow.call.prompt is not None:
            unmodified = flow.call.prompt_unmodified
            message.prompt.CopyFrom(prompt_to_proto(flow.call.prompt, unmodified=unmodified))
        for item in flow.split.items:
            state = pd_pb2.ITEM_STATE_READY if item.mm_hash in order.ready else pd_pb2.ITEM_STATE_PENDING
            message.items.append(pd_pb2.ItemSlot(plan=plan_to_proto(plans[item.mm_hash]), state=state))
        if order.resume is not None:
            message.resume.CopyFrom(resume_to_proto(order.resume))
        return message

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
