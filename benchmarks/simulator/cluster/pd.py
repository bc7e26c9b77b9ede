"""A PD worker in virtual time: its real scheduler, caches and load table, with a delay for every step.

It is `pd_worker/engine.py`'s loop. Simpler than there: requests are taken in beside each other, however many
they are, and host buffers are never short.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from triptych.ec_connector.base import ECConnectorOutput, ECTransferConfig
from triptych.ec_connector.connectors.reports import Reports
from triptych.ec_connector.connectors.scheduler_role import TableScheduler
from triptych.errors import RequestError
from triptych.pd_worker.core.admission import Admission
from triptych.pd_worker.core.encoder_cache import EncoderCache
from triptych.pd_worker.core.items import ItemTracker
from triptych.pd_worker.core.kv_cache.kv_cache_manager import KVCacheManager
from triptych.pd_worker.core.limits import SchedulerLimits
from triptych.pd_worker.core.outputs import ModelRunnerOutput, SchedulerOutput
from triptych.pd_worker.core.request import EngineRequest, RequestState
from triptych.pd_worker.core.request_events import EngineEvent
from triptych.pd_worker.core.scheduler import Scheduler
from triptych.pd_worker.frontend.wire import in_state
from triptych.protos import pd_pb2
from triptych.simulator.cluster.context import SimulationContext
from triptych.simulator.cluster.decode_runs import CountedOutput, DecodeRuns
from triptych.simulator.cluster.fifo_lock import FifoLock
from triptych.simulator.cluster.loads import SimulatedLoads
from triptych.simulator.cluster.loop import VirtualTimer
from triptych.simulator.cluster.requests import SimulatedRequest
from triptych.simulator.cluster.step_tower import StepTower
from triptych.simulator.costs.costs import step_work

#: As in the worker, where neither flag nor checkpoint says less.
_LONGEST = 32768
#: As in the worker: requests that it holds beside those that run.
_MAX_WAITING = 1024
_ROOT = bytes(32)
_NO_TRANSFERS = ECConnectorOutput()
#: For updates without a step.
_NO_STEP, _NO_RESULT = SchedulerOutput(0), ModelRunnerOutput(ec_connector_output=_NO_TRANSFERS)


class TokenStream(Protocol):
    """The stream of a worker's steps to the proxy, written to at the worker's own moment."""

    def step(self, events: list[EngineEvent], tokens: int) -> None: ...
    def run(self, request_ids: Sequence[str], ends: Sequence[float]) -> None: ...


@dataclass(slots=True)
class _StepRun:
    """Decode steps under way as one: step i takes `first` + i · `slope` seconds."""

    started: float
    steps: int
    first: float
    slope: float

    def end(self, steps: int) -> float:
        """When so many steps are over."""
        return self.started + steps * self.first + self.slope * steps * (steps - 1) / 2

    @property
    def ends(self) -> list[float]:
        """Of all its steps."""
        started, first, slope = self.started, self.first, self.slope
        return [started + n * first + slope * n * (n - 1) / 2 for n in range(1, self.steps + 1)]

    def steps_until(self, now: float) -> int:
        """Steps that are over by `now`."""
        low, high = 0, self.steps
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.end(middle) <= now + 1e-12 else (low, middle - 1)
        return low


class SimulatedPD:
    """`submit`, `items_ready` and `cancel` are called at the moment at which the worker gets the message."""

    def __init__(self, context: SimulationContext, device: FifoLock, tower: StepTower | None) -> None:
        config, jumps = context.limits.pd, context.limits.jumps
        num_blocks = max(1, config.kv_memory // (config.block_size * context.model.kv_token_bytes))
        longest = min(config.max_model_len or _LONGEST, num_blocks * config.block_size)
        self.kv = KVCacheManager(num_blocks, config.block_size, prefix_caching=config.prefix_caching)
        self.cache = EncoderCache(config.embedding_memory)
        self.admission = Admission(config.embedding_memory)
        self.connector = TableScheduler(ECTransferConfig(ec_role="consumer"))
        items = ItemTracker(self.cache, self.admission, self.connector)
        limits = SchedulerLimits(config.max_num_seqs, config.max_num_batched_tokens, longest)
        # vLLM's replicas, which have their tower in the step, prefill a request whose items they have.
        overlap = config.overlap_prefill and tower is None
        self.scheduler = Scheduler(limits, self.kv, items, overlap_prefill=overlap)
        self._runs = DecodeRuns(self.scheduler)
        self._reports = Reports(self._transferred)
        #: Whether `_reports` has anything.
        self._moved = False
        self.loads = SimulatedLoads(context, self._reports)
        #: In which steps ran, since the start.
        self.step_seconds = 0.0
        self._counters = context.counters
        self._stream: TokenStream  # from `attach` on
        self._loop = context.loop
        self._costs = context.costs.pd
        self._device = device
        self._jumps = jumps
        self._tower = tower
        #: Requests on their way to the scheduler: when they will be there, and Submit's reply.
        self._parsing: dict[str, tuple[VirtualTimer, asyncio.Future[RequestError | None]]] = {}
        self._inbox: list[Callable[[], None]] = []
        self._awake = False
        self._busy = False
        #: Whether something has come in since the last step was scheduled.
        self._changed = False
        self._run: _StepRun | None = None
        self._alarm: VirtualTimer | None = None

    @property
    def max_model_len(self) -> int:
        return self.scheduler.limits.max_model_len

    @property
    def full(self) -> bool:
        """Whether it refuses requests."""
        return self.held >= _MAX_WAITING + self.scheduler.limits.max_num_seqs

    @property
    def held(self) -> int:
        """Requests that have not ended."""
        return self.scheduler.num_waiting + self.scheduler.num_running + len(self._parsing)

    def attach(self, stream: TokenStream) -> None:
        """The stream that steps are reported on, from now on."""
        self._stream = stream

    def submit(
        self, request: SimulatedRequest, message: pd_pb2.SubmitRequest, deadline: float
    ) -> asyncio.Future[RequestError | None]:
        """Takes a request in: the future gets the error of one that could never run, or None."""
        request_id = message.request_id
        admitted: asyncio.Future[RequestError | None] = self._loop.create_future()
        output = CountedOutput(request.output_tokens, request.output_token)
        parsed = EngineRequest(
            request_id=request_id,
            attempt=message.attempt,
            proxy_id="proxy",
            arrival=self._loop.now,
            deadline=deadline,
            prompt_token_ids=request.prompt_token_ids,
            features=request.features,
            ready=in_state(message, pd_pb2.ITEM_STATE_READY),
            unencoded=in_state(message, pd_pb2.ITEM_STATE_UNENCODED),
            positions=cast(Any, None),  # the runner's, as is sampling: no scheduler looks at them
            position_delta=0,
            sampling=cast(Any, None),
            prefix_root=_ROOT,
            output=output,
        )
        seconds = self._costs.take(len(request.prompt_token_ids))
        timer = self._loop.call_later(seconds, self._admit, parsed, admitted)
        self._parsing[request_id] = timer, admitted
        return admitted

    def _admit(self, request: EngineRequest, admitted: asyncio.Future[RequestError | None]) -> None:
        del self._parsing[request.request_id]
        error = None
        try:
            self.scheduler.check(request)
        except RequestError as refusal:
            error = refusal
        else:
            self._put(lambda: self.scheduler.add(request, self._loop.now))
        admitted.set_result(error)

    def items_ready(self, mm_hashes: Sequence[str]) -> None:
        self._put(lambda: self.scheduler.mark_ready(mm_hashes, self._loop.now))

    def cancel(self, request_id: str) -> None:
        if request_id in self._parsing:
            timer, admitted = self._parsing.pop(request_id)
            timer.cancel()
            admitted.set_result(None)
            return
        self._put(lambda: self.scheduler.cancel([request_id], "proxy"))

    def _put(self, command: Callable[[], None]) -> None:
        self._inbox.append(command)
        self._wake()

    def _transferred(self) -> None:
        self._moved = True
        self._wake()

    def _wake(self) -> None:
        self._changed = True
        if self._busy:
            self._cut()
        elif not self._awake:
            self._awake = True
            self._loop.call_at(self._loop.now, self._step)

    def _step(self) -> None:
        self._awake = self._changed = False
        if self._busy:
            return
        while True:
            commands, self._inbox = self._inbox, []
            for command in commands:
                command()
            output = self.scheduler.schedule(self._loop.now)
            self._counters.preemptions += len(output.preempted)
            if output.chunks:
                self._busy = True
                self._device.acquire(functools.partial(self._begin, output))
                return
            self.loads.start(output.ec_connector_metadata)
            if not self._update(output, []):
                break
        self._rest()

    def _rest(self) -> None:
        """Idle until a message, a transfer or the next deadline."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        deadline = self.scheduler.next_deadline()
        if deadline is not None:
            self._alarm = self._loop.call_at(deadline, self._wake)

    def _begin(self, output: SchedulerOutput) -> None:
        self.loads.start(output.ec_connector_metadata)
        work = step_work(output.chunks)
        seconds, prefill = self._costs.step_seconds(*work), work[0]
        if self._tower is not None and prefill:
            seconds += self._tower.seconds(output.chunks)
        if self._jumps and not prefill and self._begin_run(output, seconds):
            return
        self._counters.steps += 1
        self._counters.prefill_tokens += prefill
        self._loop.call_later(seconds, self._stepped, output, self._loop.now)

    def _stepped(self, output: SchedulerOutput, started: float) -> None:
        self.step_seconds += self._loop.now - started
        tokens = [_token(chunk.state) for chunk in output.chunks if chunk.samples]
        self._update(output, tokens)
        self._end()

    def _end(self) -> None:
        self._device.release()
        self._busy = False
        self._step()

    def _begin_run(self, output: SchedulerOutput, first: float) -> bool:
        """Whether the step is the first of several that are alike, which are under way now."""
        if self._changed or self._device.contended or not self._runs.is_plain(output):
            return False
        now, slope = self._loop.now, self._costs.context_token * len(output.chunks)
        steps = self._runs.steps_left(lambda step: now + step * first)
        if steps < 1:
            return False
        self._run = run = _StepRun(now, steps, first, slope)
        self._run_timer = self._loop.call_at(run.end(steps), self._run_ended)
        self._device.on_waiter(self._cut)
        if events := self.scheduler.update(_NO_STEP, _NO_RESULT, now):
            # What scheduling the first step has brought is reported at its end.
            self._loop.call_at(run.end(1), self._stream.step, events, 0)
        return True

    def _cut(self) -> None:
        """Something has come in: the run ends with the step that is under way."""
        run = self._run
        if run is None:
            return
        steps = run.steps_until(self._loop.now) + 1
        if steps < run.steps:
            run.steps = steps
            self._run_timer.cancel()
            self._run_timer = self._loop.call_at(run.end(steps), self._run_ended)

    def _run_ended(self) -> None:
        run, self._run = self._run, None
        assert run is not None
        now = self._loop.now
        self._counters.steps += run.steps
        self._counters.jumped_steps += run.steps
        self.step_seconds += now - run.started
        self._stream.run(self._runs.advance(run.steps, now), run.ends)
        self._update(_NO_STEP, [])
        self._end()

    def _update(self, output: SchedulerOutput, sampled: list[int]) -> bool:
        """Whether anything has moved."""
        transfers = self._reports.drain() if self._moved else _NO_TRANSFERS
        self._moved = False
        result = ModelRunnerOutput(sampled=sampled, ec_connector_output=transfers)
        events = self.scheduler.update(output, result, self._loop.now)
        if events:
            self._stream.step(events, len(sampled))
        return bool(events) or result.moved_items


def _token(state: RequestState) -> int:
    return cast(CountedOutput, state.request.output).token
