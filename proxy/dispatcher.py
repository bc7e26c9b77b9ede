"""Carries out what the requests' state machines ask for, and feeds them what happens."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from triptych.config import ProxyConfig
from triptych.errors import (
    DeadlineExceeded,
    InternalError,
    RequestError,
    TriptychError,
    Unavailable,
)
from triptych.metrics import ProxyMetrics
from triptych.proxy.auth.limits import CURRENT
from triptych.proxy.call.chat import ChatCall, Done, Output
from triptych.proxy.call.model_kind import name_prompt
from triptych.proxy.call.output_format import name_field
from triptych.proxy.encoders.encoder_client import JobReady
from triptych.proxy.encoders.job_runner import JobRunner, JobSink
from triptych.proxy.gate import Gate
from triptych.proxy.media.loader import MediaLoader, make_loader
from triptych.proxy.pd.events import PDNews
from triptych.proxy.pd.router import PDRouter, RouterSink
from triptych.proxy.pool import Binding, Worker, WorkerPool
from triptych.proxy.requests import lifecycle as do
from triptych.proxy.requests.choices import Choices, make_choices
from triptych.proxy.requests.encoder_shortage import EncoderShortage
from triptych.proxy.requests.flow import Flow
from triptych.proxy.requests.lifecycle import RETRY_AFTER, Instruction, Lifecycle, Phase
from triptych.proxy.splitter import split
from triptych.types import ItemPlan

logger = logging.getLogger(__name__)

STORE_RETRY_SECONDS = 0.25
BIND_POLL_SECONDS = 0.1


class StoreView(Protocol):
    """What the dispatcher asks of the embedding store."""

    async def look_up(self, keys: Sequence[tuple[str, str]]) -> list[ItemPlan | None]: ...
    async def epoch(self) -> str: ...
    @property
    def clock_jumps(self) -> int: ...


class Dispatcher:
    """All requests of one proxy."""

    def __init__(
        self,
        pool: WorkerPool,
        store: StoreView,
        metrics: ProxyMetrics,
        *,
        proxy_id: str,
        max_queue: int = 256,
        share: int = 1 << 30,
        phase_timeout: float = 60.0,
        media: MediaLoader | None = None,
        flow_control: bool = True,
        stall_timeout: float = 60.0,
    ) -> None:
        self._pool = pool
        self._store = store
        self._metrics = metrics
        self._proxy_id = proxy_id
        self._flows: dict[str, Flow] = {}
        self._counter = 0
        self.media = media or make_loader(ProxyConfig(), metrics)
        self._tasks: set[asyncio.Task[None]] = set()
        sink = JobSink(self._job_planned, self._job_ready, self._job_failed)
        self.jobs = JobRunner(
            pool,
            metrics,
            sink=sink,
            share=share,
            phase_timeout=phase_timeout,
            flow_control=flow_control,
        )
        self.gate = Gate(pool, self.jobs.backpressure, self.media.spool, max_queue)
        news = PDNews(self._flows, self._carry_out, lambda flow: self._router.leave_in_peace(flow))
        self._router = PDRouter(
            pool,
            proxy_id,
            RouterSink(news.events, news.lost, news.accepted, news.refused, news.poison),
            stall_timeout=stall_timeout,
        )
        self._shortage = EncoderShortage(pool, self._flows, self._carry_out)
        pool.on_change = self._pool_changed
        pool.on_lost = self._worker_lost
        self._router.sync()
        self._handlers: dict[type[Any], Callable[[Flow, Any], None]] = {
            do.LookUp: self._look_up,
            do.StartJobs: self._start_jobs,
            do.Submit: self._submit,
            do.AdmitJobs: self._admit_jobs,
            do.NotifyItems: self._notify_items,
            do.ReturnShare: self._return_share,
            do.EndAttempt: self._end_attempt,
            do.Emit: lambda flow, order: flow.emit(order.output),
            do.Fail: self._fail,
            do.Leave: self._leave,
        }

    @property
    def in_flight(self) -> int:
        return len(self._flows)

    @property
    def media_bytes(self) -> int:
        return self.media.spool.memory_bytes + self.media.spool.disk_bytes

    async def close(self) -> None:
        for flow in list(self._flows.values()):
            self._carry_out(flow, flow.lifecycle.fail(Unavailable("the proxy is stopping")))
        self._shortage.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.jobs.close()
        await self._router.close()
        self.media.close()

    async def chat(self, call: ChatCall) -> AsyncGenerator[list[Output], None]:
        """The request's output in batches, the last one ending with Done; RequestError when it fails.

        Closing the iterator cancels the request everywhere.
        """
        session = CURRENT.get()
        if session is not None:
            call = replace(call, tenant=session.tenant)
        choices = self._open(self.gate.admit(call, len(self._flows)))
        timer = asyncio.get_running_loop().call_at(choices.first.deadline, self._deadlines, choices)
        try:
            await self._prepare(choices)
            for flow in choices.flows:
                self._carry_out(flow, flow.lifecycle.begin())
            while True:
                outputs = await choices.outbox.take()
                last = outputs[-1]
                if isinstance(last, Done) and last.final:
                    choices.status = 200
                    yield outputs
                    return
                yield outputs
        except RequestError as error:
            choices.status = error.status
            raise
        finally:
            timer.cancel()
            for flow in choices.flows:
                self._carry_out(flow, flow.lifecycle.client_gone())
            self._close(choices)
            if session is not None:
                session.charge(choices.prompt_tokens + choices.completion_tokens)

    def resolve_model(self, name: str) -> str:
        """The served name that a request means; see `WorkerPool.resolve_model`."""
        return self._pool.resolve_model(name)

    def _open(self, call: ChatCall) -> Choices:
        self._counter += 1
        choices = make_choices(call, self._counter, asyncio.get_running_loop().time() + call.timeout)
        for flow in choices.flows:
            self._flows[flow.request_id] = flow
            call.media.join()
        self._metrics.in_flight.set(len(self._flows))
        return choices

    def _close(self, choices: Choices) -> None:
        """One log line per request; nothing of it stays."""
        for flow in choices.flows:
            del self._flows[flow.request_id]
            flow.call.media.leave()
        first = choices.first
        seconds = time.monotonic() - choices.started
        self._metrics.in_flight.set(len(self._flows))
        self._metrics.requests.labels(str(choices.status)).inc()
        self._metrics.duration.observe(seconds)
        if choices.first_token is not None:
            self._metrics.time_to_first_token.observe(choices.first_token - choices.started)
        logger.info(
            "request %s: status %d, model %s, %d prompt tokens, %d completion tokens, %d items, "
            "%d choices, %.3f s, tenant %s",
            first.name,
            choices.status,
            first.call.model or "-",
            choices.prompt_tokens,
            choices.completion_tokens,
            len(first.split.items) if first.split is not None else 0,
            len(choices.flows),
            seconds,
            first.call.tenant or "-",
        )

    async def _prepare(self, choices: Choices) -> None:
        """Binds the request, then splits and hashes it: once for all its choices."""
        flow = choices.first
        try:
            async with asyncio.timeout_at(flow.deadline):
                flow.binding = await self._bind(flow.call)
                started = time.monotonic()
                flow.split = await split(flow.call, flow.binding.namespace, self.media)
        except TimeoutError:
            if flow.binding is not None:
                raise DeadlineExceeded("the request's media did not arrive in its time") from None
            raise Unavailable("no encoder worker came up in time", retry_after=RETRY_AFTER) from None
        params: dict[str, str] = {}
        for item in flow.split.items:
            params.setdefault(item.mm_hash, item.param)
        choices.share_split()
        for flow in choices.flows:
            flow.lifecycle = Lifecycle(params)
            flow.lifecycle.timings.fetch = time.monotonic() - started

    async def _bind(self, call: ChatCall) -> Binding:
        """Text needs a model key; media wait for a namespace, which only encoders can tell."""
        model_key = self._pool.model_key(self.resolve_model(call.model))
        assert model_key is not None
        while call.has_items and self._pool.namespace(model_key) is None:
            await asyncio.sleep(BIND_POLL_SECONDS)
        return Binding(model_key, self._pool.namespace(model_key) or "")

    def _deadlines(self, choices: Choices) -> None:
        for flow in choices.flows:
            self._deadline(flow)

    def _deadline(self, flow: Flow) -> None:
        machine = flow.lifecycle
        if machine.phase is Phase.SUBMIT and self._router.waits(flow):
            machine.lacking = "PD worker"
        elif machine.phase in (Phase.PLAN, Phase.WAIT) and not self._pool.serving("encoder"):
            machine.lacking = "encoder worker"
        elif machine.phase is Phase.RUN and len(machine.ready) < len(machine.plans):
            machine.lacking = "" if self._pool.serving("encoder") else "encoder worker"
        self._carry_out(flow, machine.deadline())

    def _carry_out(self, flow: Flow, instructions: Iterable[Instruction]) -> None:
        for order in instructions:
            self._handlers[type(order)](flow, order)

    def _look_up(self, flow: Flow, order: do.LookUp) -> None:
        self._spawn(flow, self._ask_store(flow, order.mm_hashes))

    async def _ask_store(self, flow: Flow, mm_hashes: tuple[str, ...]) -> None:
        """One round trip; while the store is down the request waits within its deadline."""
        assert flow.binding is not None
        keys = [(key, flow.binding.namespace) for key in mm_hashes]
        while not flow.lifecycle.ended:
            flow.looked_up = asyncio.get_running_loop().time()
            try:
                found = await self._store.look_up(keys)
                epoch = await self._store.epoch()
                break
            except TriptychError:
                flow.lifecycle.lacking = "embedding store"
                await asyncio.sleep(STORE_RETRY_SECONDS)
        else:
            return
        flow.lifecycle.lacking = ""
        plans = {plan.mm_hash: plan for plan in found if plan is not None}
        for key in plans:
            flow.origins[key] = "store"
            flow.epochs[key] = (epoch, self._store.clock_jumps)
        self._metrics.items.labels("store").inc(len(plans))
        self._carry_out(flow, flow.lifecycle.looked_up(plans))

    def _start_jobs(self, flow: Flow, order: do.StartJobs) -> None:
        if order.re_encode:
            self._metrics.re_encodes.inc(len(order.mm_hashes))
            self._spawn(flow, self._re_encode(flow, order))
            return
        for key in order.mm_hashes:
            joined = self._start_job(flow, key)
            flow.origins[key] = "joined" if joined else "encoded"
            self._metrics.items.labels(flow.origins[key]).inc()

    def _start_job(
        self, flow: Flow, key: str, *, re_encode: bool = False, damaged_digest: str = "", counts: bool = True
    ) -> bool:
        source = flow.source(key)
        return self.jobs.start(source, re_encode=re_encode, damaged_digest=damaged_digest, counts=counts)

    async def _re_encode(self, flow: Flow, order: do.StartJobs) -> None:
        """A loss is the store's doing, not pressure, where the item was stored in another epoch of the store,
        or before a jump of its clock, by which all that is stored expires."""
        try:
            epoch = await self._store.epoch()
        except TriptychError:
            epoch = ""
        now = (epoch, self._store.clock_jumps)
        for key in order.mm_hashes:
            if not flow.lifecycle.ended:
                counts = bool(epoch) and flow.epochs.get(key, now) == now
                self._start_job(flow, key, re_encode=True, damaged_digest=order.damaged_digest, counts=counts)

    def _submit(self, flow: Flow, order: do.Submit) -> None:
        if order.attempt > 1:
            self._metrics.resumes.labels("resume" if order.resume else "resubmit").inc()
        self._router.submit(flow, order)

    def _admit_jobs(self, flow: Flow, order: do.AdmitJobs) -> None:
        self.jobs.table.admit(flow.request_id)
        self.jobs.pump()
        self._shortage.admitted(flow)

    def _notify_items(self, flow: Flow, order: do.NotifyItems) -> None:
        if flow.link is not None:
            flow.link.notify(order.mm_hashes)

    def _return_share(self, flow: Flow, order: do.ReturnShare) -> None:
        self.jobs.table.loaded(flow.request_id, order.mm_hash)
        self.jobs.pump()

    def _end_attempt(self, flow: Flow, order: do.EndAttempt) -> None:
        self._router.release(flow, cancel=order.cancel, now=order.now)
        self.jobs.table.end_attempt(flow.request_id)

    def _fail(self, flow: Flow, order: do.Fail) -> None:
        error = name_field(order.error, flow.call.sampling.output_format)
        flow.outbox.fail(name_prompt(error, flow.call.prompt_param))

    def _leave(self, flow: Flow, order: do.Leave) -> None:
        self._router.withdraw(flow)
        self.jobs.leave(flow.request_id)

    def _job_planned(self, request_id: str, mm_hash: str, plan: ItemPlan) -> None:
        if flow := self._flows.get(request_id):
            self._carry_out(flow, flow.lifecycle.planned(mm_hash, plan))

    def _job_ready(self, request_id: str, mm_hash: str, end: JobReady) -> None:
        flow = self._flows.get(request_id)
        if flow is None:
            return
        if end.already_stored:
            flow.origins[mm_hash] = "store"
        timings = flow.lifecycle.timings
        timings.encode = max(timings.encode, end.encode_seconds)
        timings.save = max(timings.save, end.save_seconds)
        flow.epochs[mm_hash] = (self._pool.epoch, self._store.clock_jumps)
        self._carry_out(flow, flow.lifecycle.item_ready(mm_hash, end.plan))

    def _job_failed(self, request_id: str, mm_hash: str, error: RequestError) -> None:
        if flow := self._flows.get(request_id):
            self._carry_out(flow, flow.lifecycle.job_failed(mm_hash, error))

    def _pool_changed(self) -> None:
        self._router.sync()
        self.jobs.pool_changed()
        self._shortage.pool_changed()
        for pool in ("encoder", "pd"):
            self._metrics.workers.labels(pool).set(len(self._pool.serving(pool)))

    def _worker_lost(self, worker: Worker) -> None:
        if worker.info.pool == "pd":
            self._router.lose(worker.info.address)
        else:
            self.jobs.lose(worker.info.address)

    def _spawn(self, flow: Flow, work: Coroutine[Any, Any, None]) -> None:
        """Runs beside the request; an unexpected error ends the request."""
        task = asyncio.create_task(self._guard(flow, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, flow: Flow, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:
            logger.exception("request %s", flow.name)
            self._carry_out(flow, flow.lifecycle.fail(InternalError("an unexpected error in the proxy")))
