"""The proxy in virtual time: it carries out what the requests' real state machines ask for.

It is `proxy/dispatcher.py`. Simpler than there: one proxy, one choice a request, one model, a store that is
never down, pictures inside the requests. Requests are taken in one at a time; no token waits for another
step's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from triptych.errors import InternalError, Overloaded, RequestError
from triptych.pd_worker.core import request_events as pd
from triptych.proxy.call.chat import Delta
from triptych.proxy.requests import lifecycle as do
from triptych.proxy.requests.lifecycle import RETRY_AFTER, Instruction, Lifecycle
from triptych.simulator.cluster.clock import Clock
from triptych.simulator.cluster.encoder import Ready, SimulatedEncoder
from triptych.simulator.cluster.encoder_jobs import EncoderJobs, JobSink
from triptych.simulator.cluster.fifo_lock import FifoLock
from triptych.simulator.cluster.flow import Flow
from triptych.simulator.cluster.pd import SimulatedPD
from triptych.simulator.cluster.requests import Request
from triptych.simulator.cluster.router import MAX_WAITING, Router
from triptych.simulator.cluster.shape import Limits
from triptych.simulator.cluster.store import SimulatedStore
from triptych.simulator.costs.costs import CostModel
from triptych.types import FinishReason, ItemPlan


@dataclass(slots=True)
class ProxyCounts:
    """Since the start: requests taken in and refused, tokens, and CPU seconds of all of them."""

    requests: int = 0
    refused: int = 0
    tokens: int = 0
    cpu_seconds: float = 0.0


class SimulatedProxy:
    """All requests. `ended` is called once for each, with the error that the client saw or nothing."""

    def __init__(
        self,
        clock: Clock,
        costs: CostModel,
        limits: Limits,
        store: SimulatedStore,
        encoders: Sequence[SimulatedEncoder],
        workers: Sequence[SimulatedPD],
        ended: Callable[[Flow, str], None],
    ) -> None:
        self.counts = ProxyCounts()
        self._clock = clock
        self._costs = costs
        self._limits = limits
        self._store = store
        self._ended = ended
        self._loop = FifoLock()
        self._flows: dict[str, Flow] = {}
        self.jobs = EncoderJobs(
            clock,
            encoders,
            limits.encoder,
            JobSink(self._job_planned, self._job_ready),
            share=limits.store_memory // 2,
            rpc=costs.rpc,
            flow_control=limits.proxy.flow_control,
        )
        self.router = Router(
            clock,
            workers,
            rpc=costs.rpc,
            max_num_seqs=limits.pd.max_num_seqs,
            max_requests=MAX_WAITING + limits.pd.max_num_seqs,
            accepted=lambda flow, attempt: self._carry_out(flow, flow.lifecycle.accepted(attempt)),
            refused=lambda flow, attempt, error: self._carry_out(
                flow, flow.lifecycle.refused(attempt, error)
            ),
        )
        for worker in workers:
            worker.sink = self
        self._handlers: dict[type[Any], Callable[[Flow, Any], None]] = {
            do.LookUp: self._look_up,
            do.StartJobs: self._start_jobs,
            do.Submit: self.router.submit,
            do.AdmitJobs: self._admit_jobs,
            do.NotifyItems: lambda flow, order: self.router.notify(flow, order.mm_hashes),
            do.ReturnShare: self._return_share,
            do.EndAttempt: self._end_attempt,
            do.Emit: lambda flow, order: None,
            do.Fail: lambda flow, order: self._end(flow, order.error),
            do.Leave: self._leave,
        }

    @property
    def in_flight(self) -> int:
        return len(self._flows)

    def arrive(self, request: Request, planned: float, *, warm_up: bool = False) -> None:
        """A client sends it now."""
        now, patience = self._clock.now, self._limits.client_timeout
        deadline = now + self._limits.proxy.request_timeout
        params = {feature.mm_hash: "messages" for feature in request.features}
        flow = Flow(request, planned, now, deadline, warm_up, Lifecycle(params))
        flow.timer = self._clock.at(min(deadline, now + patience), self._deadline, flow)
        self._loop.acquire(functools.partial(self._take_in, flow))

    def _take_in(self, flow: Flow) -> None:
        request = flow.request
        seconds = self._costs.proxy.take(len(request.features), request.media_bytes, request.text_tokens)
        self.counts.cpu_seconds += seconds

        def done() -> None:
            self._loop.release()
            self._admit(flow)

        self._clock.after(seconds, done)

    def _admit(self, flow: Flow) -> None:
        machine = flow.lifecycle
        if machine.ended:
            return
        self.counts.requests += 1
        machine.timings.fetch = self._clock.now - flow.sent
        if (error := self._refusal(flow.request)) is not None:
            self.counts.refused += 1
            self._carry_out(flow, machine.fail(error))
            return
        self._flows[flow.name] = flow
        self._carry_out(flow, machine.begin())

    def _refusal(self, request: Request) -> RequestError | None:
        queue = self._limits.proxy.max_queue
        if self._flows and len(self._flows) + 1 > queue:
            return Overloaded(f"{queue} requests are in flight already", retry_after=RETRY_AFTER)
        if request.items and self.jobs.backpressure.refuses_media(self._clock.now):
            return Overloaded("embeddings are lost before they are used", retry_after=RETRY_AFTER)
        return None

    def _deadline(self, flow: Flow) -> None:
        machine = flow.lifecycle
        if self._clock.now >= flow.deadline:
            self._carry_out(flow, machine.deadline())
            return
        self._carry_out(flow, machine.client_gone())
        self._end(flow, f"timeout after {self._limits.client_timeout:g} s")

    def _end(self, flow: Flow, error: RequestError | str = "") -> None:
        """The client has its answer."""
        if flow.timer is None:
            return
        flow.timer.cancel()
        flow.timer = None
        if isinstance(error, RequestError):
            error = f"HTTP {error.status}: {error.message}"
        self._flows.pop(flow.name, None)
        self._ended(flow, error)

    def _carry_out(self, flow: Flow, instructions: Iterable[Instruction]) -> None:
        for order in instructions:
            self._handlers[type(order)](flow, order)

    def _look_up(self, flow: Flow, order: do.LookUp) -> None:
        flow.looked_up = self._clock.now
        self._clock.after(2 * self._costs.rpc, self._looked_up, flow, order.mm_hashes)

    def _looked_up(self, flow: Flow, mm_hashes: tuple[str, ...]) -> None:
        plans = self._store.look_up(mm_hashes)
        flow.origins |= dict.fromkeys(plans, "store")
        self._carry_out(flow, flow.lifecycle.looked_up(plans))

    def _start_jobs(self, flow: Flow, order: do.StartJobs) -> None:
        for key in order.mm_hashes:
            item = flow.request.items[key]
            joined = self.jobs.start(item, flow.name, flow.looked_up, re_encode=order.re_encode)
            if not order.re_encode:
                flow.origins[key] = "joined" if joined else "encoded"

    def _admit_jobs(self, flow: Flow, order: do.AdmitJobs) -> None:
        self.jobs.table.admit(flow.name)
        self.jobs.pump()

    def _return_share(self, flow: Flow, order: do.ReturnShare) -> None:
        self.jobs.table.loaded(flow.name, order.mm_hash)
        self.jobs.pump()

    def _end_attempt(self, flow: Flow, order: do.EndAttempt) -> None:
        self.router.release(flow, cancel=order.cancel)
        self.jobs.table.end_attempt(flow.name)

    def _leave(self, flow: Flow, order: do.Leave) -> None:
        self.jobs.leave(flow.name)

    def events(self, events: list[pd.EngineEvent], tokens: int) -> None:
        """A worker's message about one step is sent now; the client has its tokens once all are through."""
        relay = self._costs.proxy.token * tokens
        self.counts.tokens += tokens
        self.counts.cpu_seconds += relay
        self._clock.after(self._costs.rpc, self._pd_events, events, relay)

    def run(self, told: list[pd.NewTokens], ends: Sequence[float]) -> None:
        """The same for a run of steps that ended at `ends`."""
        self.counts.tokens += len(told) * len(ends)
        self.counts.cpu_seconds += self._costs.proxy.token * len(told) * len(ends)
        later = self._costs.rpc + self._costs.proxy.token * len(told)
        moments = [end + later for end in ends]
        self._clock.after(self._costs.rpc, self._pd_run, told, moments)

    def _pd_run(self, told: list[pd.NewTokens], moments: list[float]) -> None:
        for run in told:
            flow = self._flows.get(run.request_id)
            if flow is not None:
                shown = flow.lifecycle.tokens(run.attempt, run.position, list(run.token_ids), "")
                if isinstance(shown, Delta):
                    flow.tokens += moments
                else:
                    self._carry_out(flow, shown)

    def _pd_events(self, events: list[pd.EngineEvent], later: float) -> None:
        moment = self._clock.now + later
        told: Any
        for told in events:
            flow = self._flows.get(told.request_id)
            if flow is None:
                continue
            if type(told) is not pd.NewTokens:
                self._pd_event(flow, told)
                continue
            shown: Any = flow.lifecycle.tokens(told.attempt, told.position, list(told.token_ids), "")
            if type(shown) is Delta:
                tokens = flow.tokens
                tokens.append(moment if not tokens or moment >= tokens[-1] else tokens[-1])
            else:
                self._carry_out(flow, shown)

    def _pd_event(self, flow: Flow, event: pd.EngineEvent) -> None:
        machine, attempt = flow.lifecycle, event.attempt
        if isinstance(event, pd.RequestFinished):
            self._finished(flow, event)
        elif isinstance(event, pd.RequestAdmitted):
            placements = [(place.offset, place.length) for place in event.placements]
            self._carry_out(flow, machine.admitted(attempt, event.prompt_token_ids, placements))
        elif isinstance(event, pd.ItemLoaded):
            self._carry_out(flow, machine.item_loaded(attempt, event.mm_hash))
        elif isinstance(event, pd.ItemMissing):
            self._carry_out(flow, machine.item_missing(attempt, event.mm_hash, event.damaged_digest))

    def _finished(self, flow: Flow, event: pd.RequestFinished) -> None:
        machine = flow.lifecycle
        if event.reason in (FinishReason.ERROR, FinishReason.ABORT):
            error = event.error or InternalError("the PD worker aborted the request")
            self._carry_out(flow, machine.refused(event.attempt, error))
            return
        timings, spent = machine.timings, event.timings
        timings.queue, timings.load = spent.queue, spent.load
        timings.prefill, timings.decode = spent.prefill, spent.decode
        self._carry_out(flow, machine.finished(event.attempt, event.reason, event.usage))
        self._end(flow)

    def _job_planned(self, request_id: str, mm_hash: str, plan: ItemPlan) -> None:
        if flow := self._flows.get(request_id):
            self._carry_out(flow, flow.lifecycle.planned(mm_hash, plan))

    def _job_ready(self, request_id: str, mm_hash: str, end: Ready) -> None:
        flow = self._flows.get(request_id)
        if flow is None:
            return
        if end.already_stored:
            flow.origins[mm_hash] = "store"
        timings = flow.lifecycle.timings
        timings.encode = max(timings.encode, end.encode_seconds)
        timings.save = max(timings.save, end.save_seconds)
        self._carry_out(flow, flow.lifecycle.item_ready(mm_hash, end.plan))
