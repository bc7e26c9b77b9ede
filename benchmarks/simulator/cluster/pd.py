"""A PD worker in virtual time: its real scheduler, caches and load table, with a delay for every step.

It is `pd_worker/engine.py`'s loop. Simpler than there: requests are taken in beside each other, however many
they are, and host buffers are never short.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from triptych.config import PDConfig
from triptych.ec_connector.base import ECTransferConfig
from triptych.ec_connector.connectors.reports import Reports
from triptych.ec_connector.connectors.scheduler_role import TableScheduler
from triptych.errors import RequestError
from triptych.pd_worker.core.admission import Admission
from triptych.pd_worker.core.decode_runs import CountedOutput, DecodeRuns
from triptych.pd_worker.core.encoder_cache import EncoderCache
from triptych.pd_worker.core.items import ItemTracker
from triptych.pd_worker.core.kv_cache.kv_cache_manager import KVCacheManager
from triptych.pd_worker.core.limits import SchedulerLimits
from triptych.pd_worker.core.outputs import ModelRunnerOutput, SchedulerOutput
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.core.request_events import EngineEvent, NewTokens
from triptych.pd_worker.core.scheduler import Scheduler
from triptych.simulator.cluster.clock import Clock, Timer
from triptych.simulator.cluster.fifo_lock import FifoLock
from triptych.simulator.cluster.loads import SimulatedLoads
from triptych.simulator.cluster.requests import Request
from triptych.simulator.cluster.store import SimulatedStore
from triptych.simulator.costs.costs import PDCosts, chunk_context

#: As in the worker, where neither flag nor checkpoint says less.
_LONGEST = 32768
_ROOT = bytes(32)


class TokenSink(Protocol):
    """Who hears of a worker's steps, at the worker's own moment."""

    def events(self, events: list[EngineEvent], tokens: int) -> None: ...
    def run(self, told: list[NewTokens], ends: Sequence[float]) -> None: ...


@dataclass(slots=True)
class _StepRun:
    """Decode steps under way as one timer: step i takes `first` + i · `slope` seconds."""

    started: float
    steps: int
    first: float
    slope: float
    timer: Timer

    def end(self, steps: int) -> float:
        """When so many steps are over."""
        return self.started + steps * self.first + self.slope * steps * (steps - 1) / 2

    def steps_until(self, now: float) -> int:
        """Steps that are over by `now`."""
        low, high = 0, self.steps
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.end(middle) <= now + 1e-12 else (low, middle - 1)
        return low


@dataclass(slots=True)
class PDCounts:
    """Since the start. `seconds` in which steps ran; `jumped` of the `steps` were taken in runs."""

    steps: int = 0
    jumped: int = 0
    seconds: float = 0.0
    prefill_tokens: int = 0
    preemptions: int = 0


class SimulatedPD:
    """`submit`, `items_ready` and `cancel` are called at the moment at which the worker gets the message."""

    def __init__(
        self,
        clock: Clock,
        costs: PDCosts,
        config: PDConfig,
        kv_token_bytes: int,
        store: SimulatedStore,
        device: FifoLock,
        *,
        rpc: float,
        in_memory: bool = False,
        jumps: bool = True,
    ) -> None:
        num_blocks = max(1, config.kv_memory // (config.block_size * kv_token_bytes))
        longest = min(config.max_model_len or _LONGEST, num_blocks * config.block_size)
        self.kv = KVCacheManager(num_blocks, config.block_size, prefix_caching=config.prefix_caching)
        self.cache = EncoderCache(config.embedding_memory)
        self.admission = Admission(config.embedding_memory)
        self.connector = TableScheduler(ECTransferConfig(ec_role="consumer"))
        items = ItemTracker(self.cache, self.admission, self.connector)
        limits = SchedulerLimits(config.max_num_seqs, config.max_num_batched_tokens, longest)
        self.scheduler = Scheduler(limits, self.kv, items, count_only=jumps)
        self._runs = DecodeRuns(self.scheduler)
        self.loads = SimulatedLoads(
            clock,
            costs,
            store,
            Reports(self._wake),
            store_trip=2 * rpc,
            in_memory=in_memory,
        )
        self.counts = PDCounts()
        self.sink: TokenSink | None = None
        self._clock = clock
        self._costs = costs
        self._device = device
        self._jumps = jumps
        #: Requests on their way to the scheduler.
        self._taking: dict[str, Timer] = {}
        self._inbox: list[Callable[[], None]] = []
        self._awake = False
        self._busy = False
        self._run: _StepRun | None = None
        self._alarm: Timer | None = None

    @property
    def held(self) -> int:
        """Requests that have not ended."""
        return self.scheduler.num_waiting + self.scheduler.num_running + len(self._taking)

    def submit(
        self,
        request: Request,
        attempt: int,
        ready: frozenset[str],
        deadline: float,
        answer: Callable[[RequestError | None], None],
    ) -> None:
        """Takes a request in. `answer` gets the error of what could never run, or None.

        It gets nothing after `cancel`.
        """
        arrival = self._clock.now

        def done() -> None:
            del self._taking[request.name]
            try:
                self._take(request, attempt, ready, arrival, deadline)
            except RequestError as error:
                answer(error)
            else:
                answer(None)

        seconds = self._costs.take(len(request.prompt_token_ids))
        self._taking[request.name] = self._clock.after(seconds, done)

    def _take(
        self, request: Request, attempt: int, ready: frozenset[str], arrival: float, deadline: float
    ) -> None:
        output = CountedOutput(request.output_tokens, request.output_token)
        taken = EngineRequest(
            request_id=request.name,
            attempt=attempt,
            proxy_id="proxy",
            arrival=arrival,
            deadline=deadline,
            prompt_token_ids=request.prompt_token_ids,
            features=request.features,
            ready=ready,
            positions=cast(Any, None),  # the runner's, as is sampling: no scheduler looks at them
            position_delta=0,
            sampling=cast(Any, None),
            prefix_root=_ROOT,
            output=output,
        )
        self.scheduler.check(taken)
        self._put(lambda: self.scheduler.add(taken, self._clock.now))

    def items_ready(self, mm_hashes: Sequence[str]) -> None:
        self._put(lambda: self.scheduler.mark_ready(mm_hashes, self._clock.now))

    def cancel(self, request_id: str) -> None:
        if (timer := self._taking.pop(request_id, None)) is not None:
            timer.cancel()
            return
        self._put(lambda: self.scheduler.cancel([request_id], "proxy"))

    def _put(self, command: Callable[[], None]) -> None:
        self._inbox.append(command)
        self._wake()

    def _wake(self) -> None:
        if self._busy:
            self._cut()
        elif not self._awake:
            self._awake = True
            self._clock.at(self._clock.now, self._loop)

    def _loop(self) -> None:
        self._awake = False
        if self._busy:
            return
        while True:
            commands, self._inbox = self._inbox, []
            for command in commands:
                command()
            output = self.scheduler.schedule(self._clock.now)
            self.counts.preemptions += len(output.preempted)
            if output.chunks:
                self._busy = True
                self._device.acquire(functools.partial(self._begin, output))
                return
            self.loads.start(output.ec_connector_metadata)
            if not self._update(output, [])[0]:
                break
        self._rest()

    def _rest(self) -> None:
        """Idle until a message, a transfer or the next deadline."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        deadline = self.scheduler.next_deadline()
        if deadline is not None:
            self._alarm = self._clock.at(deadline, self._wake)

    def _begin(self, output: SchedulerOutput) -> None:
        self.loads.start(output.ec_connector_metadata)
        prefill = decodes = context = 0
        prefill_context = 0.0
        for chunk in output.chunks:
            start, count = chunk.start, chunk.count
            if start >= len(chunk.state.request.prompt_token_ids):
                decodes += count
                context += start + count
            else:
                prefill += count
                prefill_context += chunk_context(start, count)
        seconds = self._costs.step_seconds(prefill, decodes, context, prefill_context)
        self.counts.steps += 1
        self.counts.prefill_tokens += prefill
        self._clock.after(seconds, self._stepped, output, self._clock.now)

    def _stepped(self, output: SchedulerOutput, started: float) -> None:
        self.counts.seconds += self._clock.now - started
        chunks: list[Any] = output.chunks
        tokens = [chunk.state.request.output.token for chunk in chunks if chunk.samples]
        moved, events = self._update(output, tokens)
        plain = not moved and self._runs.was_plain(output, events)
        self._next(self._jumps and not self._inbox and (plain or self._runs.only_decodes))

    def _update(self, output: SchedulerOutput, sampled: list[int]) -> tuple[bool, list[EngineEvent]]:
        """Whether transfers or, in a step without tokens, anything else has moved; and the step's events."""
        transfers = self.loads.finished()
        result = ModelRunnerOutput(sampled=sampled, ec_connector_output=transfers)
        events = self.scheduler.update(output, result, self._clock.now)
        if events:
            self._sink.events(events, len(sampled))
        metadata: Any = output.ec_connector_metadata
        moved = bool(transfers.fetched or transfers.loaded or transfers.failed)
        if not sampled:
            moved = moved or bool(events)
        elif metadata is not None:
            moved = moved or bool(metadata.fetches or metadata.moves or metadata.drops)
        return moved, events

    def _next(self, quiet: bool) -> None:
        """Without anything new the decode steps run on; else the device is released."""
        if quiet and not self._device.contended and self._run_on():
            return
        self._device.release()
        self._busy = False
        self._loop()

    def _run_on(self) -> bool:
        running = self.scheduler.running
        now, count = self._clock.now, len(running)
        context = sum(state.num_tokens for state in running)
        first = self._costs.step_seconds(0, count, context, 0.0)
        steps = self._runs.steps_left(lambda step: now + step * first)
        if steps < 1:
            return False
        slope = self._costs.step_seconds(0, count, context + count, 0.0) - first
        run = _StepRun(now, steps, first, slope, Timer(self._ran_on, ()))
        run.timer = self._clock.at(run.end(steps), self._ran_on)
        self._run = run
        self._device.on_waiter(self._cut)
        return True

    def _cut(self) -> None:
        """Something has come in: the run ends with the step that is under way."""
        run = self._run
        if run is None:
            return
        steps = run.steps_until(self._clock.now) + 1
        if steps < run.steps:
            run.steps = steps
            run.timer.cancel()
            run.timer = self._clock.at(run.end(steps), self._ran_on)

    def _ran_on(self) -> None:
        run, self._run = self._run, None
        assert run is not None
        now = self._clock.now
        self.counts.steps += run.steps
        self.counts.jumped += run.steps
        self.counts.seconds += now - run.started
        ends = [run.end(step) for step in range(1, run.steps + 1)]
        self._sink.run(self._runs.advance(run.steps, now), ends)
        self._update(SchedulerOutput(0), [])
        self._next(False)

    @property
    def _sink(self) -> TokenSink:
        assert self.sink is not None
        return self.sink
