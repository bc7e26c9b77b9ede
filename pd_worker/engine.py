"""The PD worker's engine: the thread that schedules, executes, updates and emits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from triptych.base.cpu.step_pacer import StepPacer
from triptych.base.engine_beat import EngineBeat
from triptych.base.errors import InternalError, RequestError, Unavailable
from triptych.base.machine.device import Device
from triptych.base.machine.device_fault import check_device
from triptych.ec_connector.base import ECConnectorScheduler
from triptych.pd_worker.attention.early_pages import EarlyPages
from triptych.pd_worker.core.outputs import (
    ModelRunnerOutput,
    SchedulerOutput,
)
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.core.request_events import EngineEvent
from triptych.pd_worker.core.scheduler import Scheduler
from triptych.pd_worker.kv_sharing.prefix_sharing import PrefixSharing
from triptych.pd_worker.runner.model_runner import ModelRunner
from triptych.pd_worker.runner.step_metrics import StepMetrics

logger = logging.getLogger(__name__)

#: Longest sleep of an idle engine, should a wake-up ever be lost.
_LONGEST_SLEEP = 1.0


@dataclass(frozen=True, slots=True)
class Command:
    """A call for the engine's thread; `failed` gets the error where it raises, so that the others go on."""

    run: Callable[[], None]
    failed: Callable[[RequestError], None]

    def carry_out(self) -> None:
        """Never raises an Exception."""
        try:
            self.run()
        except Exception:
            logger.exception("a command failed: only its own requests end")
            try:
                self.failed(InternalError("the engine failed on a command for this request"))
            except Exception:
                logger.exception("the requests of a failed command could not be ended")


class Engine:
    """`submit`, `items_ready`, `cancel` and `pause` are called from any thread, `emit` from the engine's.

    `emit` gets all events of one step at once, in order, and must not block. `pacer` is entered while the
    decoder computes, and waits between two steps by the number of requests that wait for embeddings, per
    running request. `connector` is the scheduler's, if it has one.

    `beat` has to be watched: a thread that dies, for example of a lost device, ends no request.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        connector: ECConnectorScheduler | None,
        emit: Callable[[list[EngineEvent]], None],
        metrics: StepMetrics,
        device: torch.device,
        *,
        pacer: StepPacer | None = None,
        pages: EarlyPages | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.beat = EngineBeat("PD engine")
        self._connector = connector
        self._emit = emit
        self._metrics = metrics
        self._device = device
        self._pacer = pacer or StepPacer()
        self.pages = pages
        #: KV blocks that other workers have computed, and find of this one. Set before `start`.
        self.sharing: PrefixSharing | None = None
        self._warm = False
        self._item_pressure = 0.0
        self._condition = threading.Condition()
        self._inbox: list[Command] = []
        self._awake = False
        self._stopping = False
        self._thread = threading.Thread(target=self.beat.run, args=(self._run,), name="engine", daemon=True)

    @property
    def max_model_len(self) -> int:
        return self.scheduler.limits.max_model_len

    def start(self) -> None:
        if self.pages is not None:
            self.pages.start()
        self._thread.start()

    def stop(self, timeout: float = 30.0) -> None:
        """Ends the thread after its step, and the connector; requests that are left end with Unavailable.

        Idempotent.
        """
        self.beat.stop()
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        if self.pages is not None:
            self.pages.close()
        if self.sharing is not None:
            self.sharing.close()
        self.runner.shutdown_ec_transfer()
        if self._connector is not None:
            self._connector.shutdown()

    def submit(self, request: EngineRequest) -> None:
        """Queues a request; its results come by `emit`. Raises InvalidRequest for one that can never run."""
        self.scheduler.check(request)
        if self._stopping:
            raise Unavailable("this worker is shutting down", retry_after=1.0)
        failed = partial(self.scheduler.fail, request)
        if self.sharing is not None:
            arrived = partial(self._put, partial(self._add_arrived, request), failed)
            if self.sharing.look(request, self.between_steps, arrived):
                return
        self._put(lambda: self.scheduler.add(request, time.monotonic()), failed)

    def _add_arrived(self, request: EngineRequest) -> None:
        """Adds a request that has waited for KV blocks, unless it was cancelled meanwhile."""
        if self.sharing is not None and self.sharing.arrived(request):
            self.scheduler.add(request, time.monotonic())

    def _add_waiting(self, request_ids: Iterable[str] | None, proxy_id: str = "") -> None:
        """Adds those of the requests that wait for KV blocks, None: all, so that they can be ended."""
        for request in () if self.sharing is None else self.sharing.drop(request_ids, proxy_id):
            self.scheduler.add(request, time.monotonic())

    def items_ready(self, mm_hashes: Iterable[str]) -> None:
        """These embeddings are in the store."""
        keys = list(mm_hashes)
        self._put(
            lambda: self.scheduler.mark_ready(keys, time.monotonic()), lambda error: self._mark_each(keys)
        )

    def _mark_each(self, keys: Sequence[str]) -> None:
        """Keys that could not be marked together, one by one: only those that fail alone end requests."""
        for key in keys:
            mark = partial(self.scheduler.mark_ready, [key], time.monotonic())
            Command(mark, partial(self.scheduler.fail_item, key)).carry_out()

    def cancel(self, request_ids: Iterable[str], proxy_id: str) -> None:
        """Ends requests with ABORT and frees all that they hold; unknown ones are ignored."""
        ids = list(request_ids)
        self._put(partial(self._cancel, ids, proxy_id), lambda error: self._cancel_each(ids, proxy_id))

    def _cancel(self, request_ids: Sequence[str], proxy_id: str) -> None:
        self._add_waiting(request_ids, proxy_id)
        self.scheduler.cancel(request_ids, proxy_id)

    def _cancel_each(self, request_ids: Sequence[str], proxy_id: str) -> None:
        """One that cannot be cancelled alone either runs to its end; its events are dropped."""
        for request_id in request_ids:
            Command(partial(self._cancel, [request_id], proxy_id), lambda error: None).carry_out()

    def fail_unloaded(self) -> None:
        """Ends requests that wait for embeddings: this worker does not reach the store."""
        self._put(self.scheduler.fail_unloaded, lambda error: None)

    def pause(self, paused: Iterable[str], resumed: Iterable[str], proxy_id: str) -> None:
        """Computes requests no longer, or again; unknown ones are ignored."""
        ids = list(paused), list(resumed)
        self._put(partial(self._pause, *ids, proxy_id), lambda error: None)

    def _pause(self, paused: Sequence[str], resumed: Sequence[str], proxy_id: str) -> None:
        self._add_waiting(paused, proxy_id)
        self.scheduler.pause(paused, resumed, proxy_id)

    def between_steps(self, callback: Callable[[], None]) -> None:
        """Calls back from the engine's thread, after all earlier commands, while no step is computed."""
        self._put(callback, lambda error: None)

    def wake(self) -> None:
        """Ends the sleep of an idle engine: a transfer may have made progress possible."""
        with self._condition:
            self._awake = True
            self._condition.notify()

    def _put(self, run: Callable[[], None], failed: Callable[[RequestError], None]) -> None:
        with self._condition:
            self._inbox.append(Command(run, failed))
            self._condition.notify()

    def _run(self) -> None:
        busy = False
        Device.of(self._device).select()
        while not self._stopping:
            self.beat.tick()
            if busy:
                self._pacer.wait(self._item_pressure)
            else:
                self._pacer.rest()
            commands = self._drain_inbox(sleep=not busy)
            try:
                with self.beat.busy.working(True):
                    busy = self._step(commands)
            except Exception as error:
                check_device(error, self._device)
                logger.exception("the engine failed; all its requests end")
                self._report(None, self.scheduler.reset(InternalError("the engine failed")))
                busy = False
        for command in self._drain_inbox(sleep=False):
            command.carry_out()
        self._add_waiting(None)
        shutdown = Unavailable("this worker is shutting down", retry_after=1.0)
        self._report(None, self.scheduler.fail_all(shutdown))

    def _step(self, commands: Sequence[Command]) -> bool:
        """One step; False when there was nothing to do."""
        for command in commands:
            command.carry_out()
        output = self.scheduler.schedule(time.monotonic())
        if self.pages is not None:
            self.pages.reach(self.scheduler.kv.pool.most_used)
        result = self._execute(output)
        events = self.scheduler.update(output, result, time.monotonic())
        self._report(output, events)
        if self.sharing is not None:
            # Behind the events: a request may be offered to another worker once its first token is out.
            self.sharing.computed(output)
        return output.computes or result.moved_items or bool(events)

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """The step's result; raises DeviceLost where the device fails for good."""
        if output.computes:
            self._pacer.plan(output.rows)
            if self._pacer.limited:
                self._metrics.limited()
        if not output.computes:
            result = self.runner.execute(output)
        elif self._warm:
            with self.beat.turn(self._pacer):
                result = self.runner.execute(output)
        else:
            with self.beat.slow(), self._pacer:
                result = self.runner.execute(output)
            self._warm = True
        if result.graphed:
            self._metrics.replayed()
        if result.ec_connector_output.failed:
            # Most are misses; the connector's own copies to the device are among them too.
            check_device(None, self._device)
        return result

    def _report(self, output: SchedulerOutput | None, events: list[EngineEvent]) -> None:
        """Emits the events of a step, with its metrics; `output` is None for a step that failed."""
        stats = self.scheduler.collect_stats()
        self._item_pressure = stats.item_pressure
        self._metrics.record(stats, output, events)
        if not events:
            return
        try:
            self._emit(events)
        except Exception:
            logger.exception("the events of a step could not be emitted")

    def _drain_inbox(self, *, sleep: bool) -> list[Command]:
        with self._condition:
            if sleep:
                self._condition.wait_for(
                    lambda: self._inbox or self._awake or self._stopping, self._seconds_to_deadline()
                )
            commands, self._inbox = self._inbox, []
            self._awake = False
            return commands

    def _seconds_to_deadline(self) -> float:
        """Seconds until the next deadline."""
        deadline = self.scheduler.next_deadline()
        if deadline is None:
            return _LONGEST_SLEEP
        return min(_LONGEST_SLEEP, max(0.0, deadline - time.monotonic()))
