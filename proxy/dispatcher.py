"""Dispatcher of requests: feeds events to their state machines, and carries out their instructions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial

from triptych.base.config import ProxyConfig
from triptych.base.delta import Delta
from triptych.base.errors import InternalError, RequestError, Unavailable
from triptych.base.least_service import RecentHolders
from triptych.base.metrics import ProxyMetrics
from triptych.base.scaling import ScalingRules, ScalingTarget
from triptych.base.types import PositionLogprobs, Task
from triptych.protos.encoder_pb2 import JobWaits
from triptych.proxy.admission import Backpressure, RequestAdmission, make_choices
from triptych.proxy.call.chat import ChatCall, Done, Output
from triptych.proxy.call.validation import ModelKind
from triptych.proxy.encoders.job_runner import JobRunner
from triptych.proxy.events import (
    ClientLeft,
    DeadlinePassed,
    FirstToken,
    JobEvent,
    RequestEvent,
    RequestFailed,
    SuccessorBegun,
    WorkerEvent,
)
from triptych.proxy.media.loader import make_loader
from triptych.proxy.media.source import MediaSource
from triptych.proxy.parsing.parsers import Parsers
from triptych.proxy.pd.router import PDRouter
from triptych.proxy.pd.work import PDWork, PromptWork, work_of
from triptych.proxy.ports import Link, Transport
from triptych.proxy.quotas.call_context import CallContext
from triptych.proxy.quotas.quota import Hold
from triptych.proxy.quotas.table import QuotaTable, quota_specs
from triptych.proxy.requests import instructions as do
from triptych.proxy.requests.item_supply import EncoderShortage, ItemSupply, StoreView, StoreWait
from triptych.proxy.requests.output_queue import ReplyMemory
from triptych.proxy.requests.recorder import Recorder
from triptych.proxy.requests.request import Choices, InFlightRequest, draw_request_id
from triptych.proxy.splitter import VideoSegments
from triptych.proxy.turns.loop_turns import LoopTurns
from triptych.proxy.workers import KnownWorkers, Worker
from triptych.registry.matching import MISMATCHES

logger = logging.getLogger(__name__)


class Dispatcher:
    """All requests of one proxy: their `RequestEvents`, and a `WorkersListener`. `clock` is in seconds.

    `quotas` None: those of a proxy with this `max_queue`.
    """

    def __init__(
        self,
        pool: KnownWorkers,
        store: StoreView,
        metrics: ProxyMetrics,
        transport: Transport,
        *,
        proxy_id: str,
        max_queue: int = 256,
        share: int = 1 << 30,
        media: MediaSource | None = None,
        flow_control: bool = True,
        skip_held_items: bool = True,
        store_wait: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        draw_id: Callable[[], str] = draw_request_id,
        quotas: QuotaTable | None = None,
        videos: VideoSegments | None = None,
        prefill_threshold: int = 0,
    ) -> None:
        self.quotas = quotas or QuotaTable(quota_specs(ProxyConfig(max_queue=max_queue)))
        #: What makes requests of clients' bytes, for both doors.
        self.parsers = Parsers(self.quotas["parser"], self.quotas["parser-processes"])
        self._pool = pool
        self.metrics = metrics
        self._clock = clock
        self._draw_id = draw_id
        self._requests: dict[str, InFlightRequest] = {}
        self.recorder = Recorder(metrics, clock, pool.model_called)
        self.with_logprobs: set[str] = set()
        #: What a crowd of one tenant has to put out goes in turns with others'; of one alone at once.
        self._tenants, self._turns = RecentHolders(), LoopTurns(burst=0)
        self._counter = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._media: MediaSource = media or make_loader(ProxyConfig(), metrics, self.quotas)
        self.jobs = JobRunner(
            pool,
            metrics,
            transport,
            self,
            clock,
            share=share,
            flow_control=flow_control,
            epoch=lambda: (pool.epoch, store.clock_jumps),
            on_ready=self.recorder.encoded,
            pd_idle=lambda: self._router.idle,
            shared=self.quotas.shared,
        )
        self.prompts = PromptWork()
        self.backpressure = Backpressure(flow_control=flow_control)
        self._items = ItemSupply(store, self.jobs, self.backpressure, metrics, clock, skip_held_items, pool)
        self.admission = RequestAdmission(pool, self.backpressure, self._media, self.quotas, clock, videos)
        self._router = PDRouter(
            pool,
            proxy_id,
            transport,
            self,
            clock,
            on_poison=metrics.poison.labels("request").inc,
            prefill_threshold=prefill_threshold,
        )
        self._shortage = EncoderShortage(pool, self._requests, self, clock)
        self._store_wait = StoreWait(pool, self._requests, self, store_wait)
        metrics.in_flight_limit.set(self.quotas["requests"].spec.capacity)
        pool.subscribe(self)
        self._router.sync()

    @property
    def in_flight(self) -> int:
        """Requests that have not ended, or whose clients have not taken their replies."""
        return max(len(self._requests), self.quotas["requests"].used)

    def pd_work(self, target: ScalingTarget, rules: ScalingRules) -> PDWork:
        """What its requests ask now of the PD workers that the target counts."""
        requests, now = self._requests.values(), self._clock()
        return work_of(target, rules, requests, self._router.waits, self.pd_links, self._pool, now)

    @property
    def at_pd_workers(self) -> int:
        """Requests that PD workers have."""
        in_flight, waiting = self._router.load
        return in_flight - waiting

    @property
    def pd_links(self) -> Mapping[str, Link]:
        """The links to all known PD workers, by address."""
        return self._router.links

    @property
    def media_bytes(self) -> int:
        return self._media.held_bytes

    @property
    def draining(self) -> bool:
        return self.admission.draining

    def drain(self) -> None:
        """Admits no call any more; those in flight go on."""
        self.admission.draining = True

    def set_share(self, nbytes: int) -> None:
        """Bytes that this proxy may have in the store before PD workers have loaded them."""
        self.jobs.set_share(nbytes)

    def resolve_model(self, name: str) -> str:
        """The served name that a request means; see `KnownWorkers`."""
        return self.admission.resolve_model(name)

    def task(self, model: str) -> Task:
        """What the model that a request means is for."""
        return self.kind(model).task

    def kind(self, model: str) -> ModelKind:
        """What the model that a request means takes."""
        return self._pool.kind(self.resolve_model(model))

    async def close(self) -> None:
        self.admission.stop()
        for request in list(self._requests.values()):
            self.deliver(request.request_id, RequestFailed(Unavailable("the proxy is stopping")))
        self._shortage.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.jobs.close()
        await self._router.close()
        self._media.close()
        await self.parsers.close()

    async def chat(self, call: ChatCall, context: CallContext) -> AsyncGenerator[list[Output], None]:
        """The request's output in batches, the last one ending with Done; RequestError when it fails.

        Closing the iterator cancels the request everywhere.
        """
        session = context.session
        if session is not None:
            call = replace(call, tenant=session.tenant)
            await session.begin(call.n)
        call, places, memory = self._admit(call, context)
        choices = self._open(call, memory, context)
        if (arrival := context.arrival) is not None:
            choices.route = arrival.route
            arrival.counted = arrival.counted or not call.internal
        timer = asyncio.get_running_loop().call_later(call.timeout, self._expire, choices)
        failure: RequestError | None = None
        try:
            fetched = await self.admission.prepare(choices)
            for request in choices.requests:
                self.deliver(request.request_id, fetched)
            while True:
                outputs = await choices.output.drain()
                self._tenants.note(call.tenant)
                if self._tenants.several:
                    await self._turns.turn(call.tenant)
                last = outputs[-1]
                if isinstance(last, Done) and last.final:
                    choices.status = 200
                    yield outputs
                    return
                yield outputs
        except RequestError as error:
            choices.status, failure = error.status, error
            raise
        finally:
            timer.cancel()
            for request in choices.requests:
                self.deliver(request.request_id, ClientLeft())
            self._close(choices, failure)
            memory.forget()
            until = context.delivery
            # A part of a reply holds no place beside the reply's own.
            if until is None or call.continues or call.is_part:
                places.close()
                memory.hold.close()
            else:
                until.at_end(places.close)
                until.keep(memory.hold)
            del failure  # its traceback holds this frame
            if session is not None:
                session.end(call.n)
                session.charge(choices.prompt_tokens + choices.completion_tokens + choices.encoded_rows)

    def _admit(self, call: ChatCall, context: CallContext) -> tuple[ChatCall, Hold, ReplyMemory]:
        """The call, its places and its memory; RequestError where it cannot be served, or not now."""
        places = None
        try:
            call, places = self.admission.admit(call, context.models)
            sampling, quota = call.sampling, self.quotas["replies"]
            memory = ReplyMemory(
                quota,
                call.tenant,
                whole=call.whole,
                logprobs=sampling.logprobs,
                delivery=context.delivery,
            )
        except RequestError:
            if places is not None:
                places.close()
            if context.session is not None:
                context.session.end(call.n)
            raise
        return call, places, memory

    def _open(self, call: ChatCall, memory: ReplyMemory, context: CallContext) -> Choices:
        self._counter += 1
        choices = make_choices(call, self._counter, self._clock(), self._draw_id, memory)
        memory.pause, memory.end = partial(self._pause, choices), partial(self._end, choices)
        for request in choices.requests:
            self._requests[request.request_id] = request
            if call.sampling.logprobs is not None:
                self.with_logprobs.add(request.request_id)
            call.media.join()
        self.metrics.in_flight.set(len(self._requests))
        self.recorder.open(choices, context.span)
        return choices

    def _pause(self, choices: Choices, paused: bool) -> None:
        for request in choices.requests:
            self._router.pause(request, paused)

    def _end(self, choices: Choices, error: RequestError) -> None:
        for request in choices.requests:
            self.deliver(request.request_id, RequestFailed(error))

    def _close(self, choices: Choices, failure: RequestError | None) -> None:
        for request in choices.requests:
            del self._requests[request.request_id]
            self.with_logprobs.discard(request.request_id)
            request.call.media.leave()
        self.metrics.in_flight.set(len(self._requests))
        self.recorder.close(choices, failure)

    def _expire(self, choices: Choices) -> None:
        encoders = bool(self._pool.serving("encoder"))
        for request in choices.requests:
            self.deliver(request.request_id, DeadlinePassed(self._router.waits(request), encoders))

    # RequestEvents

    def deliver(self, request_id: str, event: RequestEvent) -> None:
        """One event of a request, unless it has ended: its state machine decides what follows."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if isinstance(event, WorkerEvent):
            worker = self._pool.workers.get(("pd", request.pd_address))
            kind = worker.info.cost_kind if worker is not None else ""
            self.prompts.observe(request.lifecycle, event, kind, self._clock(), request.call.model)
        orders = request.lifecycle.deliver(event)
        self.recorder.record(request, event, orders)
        for order in orders:
            match order:
                case do.Submit():
                    self._router.submit(request, order)
                case do.HandOver():
                    self._router.hand_over(request, order)
                case do.TakeOver():
                    self._router.take_over(request, order)
                case do.KeepAttempt():
                    self._router.keep(request)
                case do.NotifyItems():
                    self._router.notify(request, order.mm_hashes)
                case do.EndAttempt():
                    self._router.release(request, order)
                    self.jobs.end_attempt(request.request_id)
                case do.Emit():
                    request.emit(order.output)
                case do.Fail():
                    request.fail(order.error)
                case do.Leave():
                    self._router.withdraw(request)
                    self.jobs.leave(request.request_id)
                case _:
                    self._order_jobs(request, order)

    def _order_jobs(self, request: InFlightRequest, order: do.JobInstruction) -> None:
        match order:
            case do.LookUpItems():
                self._spawn(request, self._look_up(request, order.mm_hashes))
            case do.StartJobs(re_encode=True):
                again = self._items.re_encode(request, order.mm_hashes, order.damaged_digest, order.pause)
                self._spawn(request, again)
                self._shortage.lacking(request)
            case do.StartJobs():
                origins = self._items.encode(request, order.mm_hashes, expected=order.expected)
                for key, origin in origins.items():
                    self.deliver(request.request_id, JobEvent(mm_hash=key, waits=JobWaits(origin=origin)))
                self._shortage.lacking(request)
            case do.TellJobs():
                self._tell_jobs(request, order)

    def _tell_jobs(self, request: InFlightRequest, order: do.TellJobs) -> None:
        if order.event.HasField("admitted"):
            self.jobs.admit(request.request_id)
            self._shortage.lacking(request)
        elif order.held:
            self._items.skip(request, order.mm_hash)
        else:
            self.jobs.loaded(request.request_id, order.mm_hash)

    async def _look_up(self, request: InFlightRequest, mm_hashes: Sequence[str]) -> None:
        answer = await self._items.look_up(request, mm_hashes, self._router.known_prefixes)
        self._store_wait.watch(request)
        self.deliver(request.request_id, answer)

    def _spawn(self, request: InFlightRequest, work: Coroutine[object, object, None]) -> None:
        """Runs beside the request; an unexpected error ends the request."""
        task = asyncio.create_task(self._guard(request, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, request: InFlightRequest, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception:
            logger.exception("request %s", request.name, extra=request.log_extra)
            self.deliver(request.request_id, RequestFailed(InternalError("an unexpected error in the proxy")))

    def tokens(
        self,
        request_id: str,
        attempt: int,
        position: int,
        token_ids: list[int],
        text: str,
        logprobs: Sequence[PositionLogprobs] = (),
    ) -> None:
        """Called for every token of every request: straight to the client's queue."""
        request = self._requests.get(request_id)
        if request is None:
            return
        delta = request.lifecycle.tokens(attempt, position, token_ids, text)
        if isinstance(delta, SuccessorBegun):
            self.deliver(request_id, delta)
            if request.lifecycle.attempt != attempt:
                return
            delta = request.lifecycle.tokens(attempt, position, token_ids, text)
        if not isinstance(delta, Delta):
            if delta is not None:
                self.deliver(request_id, delta)
            return
        if logprobs:
            new = logprobs[len(logprobs) - len(delta.token_ids) :]
            delta = Delta(delta.text, delta.token_ids, new)
        if request.first_token is None and token_ids:
            request.first_token = self._clock()
            self.deliver(request.request_id, FirstToken())
        request.output.put(delta)

    # WorkersListener

    def workers_changed(self) -> None:
        self._router.sync()
        self.jobs.pool_changed()
        self._shortage.pool_changed()
        self._store_wait.pool_changed()
        for pool in ("encoder", "pd"):
            self.metrics.workers.labels(pool).set(len(self._pool.serving(pool)))
        mismatches = self._pool.mismatches()
        for reason in MISMATCHES:
            self.metrics.mismatched_encoders.labels(reason).set(mismatches[reason])

    def worker_lost(self, worker: Worker) -> None:
        if worker.info.pool == "pd":
            self._router.lose(worker.info.address)
        else:
            self.jobs.lose(worker.info.address)
