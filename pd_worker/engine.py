"""The PD worker's engine: one thread that schedules, runs, updates and tells, again and again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from triptych.config import PDConfig
from triptych.cpu.step_pacer import StepPacer
from triptych.cpu.threads import in_short_lived_thread
from triptych.ec_connector.base import ECConnectorRole, ECTransferConfig
from triptych.ec_connector.factory import ECConnectorFactory
from triptych.engine_beat import EngineBeat
from triptych.errors import InternalError, RequestError, Unavailable
from triptych.machine.device_fault import check_device
from triptych.metrics import PDMetrics
from triptych.models.base import DecoderSide
from triptych.pd_worker.core.admission import Admission
from triptych.pd_worker.core.encoder_cache import EncoderCache
from triptych.pd_worker.core.items import ItemTracker
from triptych.pd_worker.core.kv_cache.cross_kv_manager import CrossKVManager
from triptych.pd_worker.core.kv_cache.kv_cache_manager import KVCacheManager
from triptych.pd_worker.core.kv_cache.swap import SwapManager
from triptych.pd_worker.core.limits import SchedulerLimits
from triptych.pd_worker.core.outputs import ModelRunnerOutput, SchedulerOutput
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.core.request_events import EngineEvent
from triptych.pd_worker.core.scheduler import Scheduler
from triptych.pd_worker.runner.capacity import (
    cross_limits_of,
    max_model_len,
    num_host_blocks,
    num_kv_blocks,
    view_memory,
)
from triptych.pd_worker.runner.model_runner import ModelRunner
from triptych.pd_worker.step_metrics import StepMetrics

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
                logger.exception("a failed command's requests could not be ended")


class Engine:
    """`submit`, `items_ready` and `cancel` come from any thread; `emit` is called from the engine's.

    `emit` gets all events of one step at once, in order, and must not block. `transfer` says where
    embeddings are loaded from. `pacer` is entered while the decoder computes, and waits between two steps
    by the number of requests that wait for embeddings for each one that runs.

    `beat` is to be watched: a thread that dies, of a device that is lost for example, ends nobody's request.
    """

    def __init__(
        self,
        config: PDConfig,
        decoder: DecoderSide,
        transfer: ECTransferConfig,
        emit: Callable[[list[EngineEvent]], None],
        metrics: PDMetrics,
        *,
        model_name: str = "",
        pacer: StepPacer | None = None,
    ) -> None:
        self.max_model_len = max_model_len(config, decoder.geometry, decoder.dtype)
        num_blocks = num_kv_blocks(config, decoder.geometry, decoder.dtype)
        self._connector = ECConnectorFactory.create_connector(transfer, ECConnectorRole.SCHEDULER)
        kv = KVCacheManager(num_blocks, config.block_size, prefix_caching=config.prefix_caching)
        host_blocks = num_host_blocks(config, decoder.geometry, decoder.dtype)
        swap = SwapManager(host_blocks) if host_blocks else None
        cross = decoder.cross
        items = ItemTracker(
            EncoderCache(config.embedding_memory),
            Admission(config.embedding_memory),
            self._connector,
            None if cross is None else CrossKVManager(kv.pool, config.block_size, swap),
        )
        limits = SchedulerLimits(config.max_num_seqs, config.max_num_batched_tokens, self.max_model_len)
        cross_limits = None
        if cross is not None:
            whole = decoder.modality == "audio"
            cross_limits = cross_limits_of(config, cross, num_blocks, self.max_model_len, whole=whole)
        self.scheduler = Scheduler(limits, kv, items, cross_limits, swap)
        self.runner = in_short_lived_thread(
            ModelRunner,
            decoder,
            num_blocks=num_blocks,
            block_size=config.block_size,
            backend=config.attention_backend,
            num_host_blocks=host_blocks,
            view_memory=view_memory(config, decoder.device),
        )
        self.runner.ensure_ec_transfer_initialized(transfer, ECConnectorRole.WORKER, self.wake)
        self.beat = EngineBeat("PD engine")
        self._device = decoder.device
        self._warm = False
        self._emit = emit
        self._pacer = pacer or StepPacer()
        self._metrics = StepMetrics(metrics, model_name or config.served_model_name)
        metrics.parameter_bytes.set(self.runner.parameter_bytes)
        self._condition = threading.Condition()
        self._inbox: list[Command] = []
        self._awake = False
        self._stopping = False
        self._thread = threading.Thread(target=self.beat.run, args=(self._run,), name="engine", daemon=True)

    def start(self) -> None:
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
        self.runner.shutdown_ec_transfer()
        self._connector.shutdown()

    def submit(self, request: EngineRequest) -> None:
        """Takes a request; everything else comes by `emit`. InvalidRequest for what can never run."""
        self.scheduler.check(request)
        if self._stopping:
            raise Unavailable("this worker is shutting down", retry_after=1.0)
        self._put(
            Command(
                lambda: self.scheduler.add(request, time.monotonic()), partial(self.scheduler.fail, request)
            )
        )

    def items_ready(self, mm_hashes: Iterable[str]) -> None:
        """These embeddings have landed in the store."""
        keys = list(mm_hashes)
        self._put(
            Command(
                lambda: self.scheduler.mark_ready(keys, time.monotonic()), lambda error: self._mark_each(keys)
            )
        )

    def _mark_each(self, keys: Sequence[str]) -> None:
        """Of keys that could not be marked together only those that cannot be marked alone end requests."""
        for key in keys:
            mark = partial(self.scheduler.mark_ready, [key], time.monotonic())
            Command(mark, partial(self.scheduler.fail_item, key)).carry_out()

    def cancel(self, request_ids: Iterable[str], proxy_id: str) -> None:
        """Ends requests with ABORT and frees all that they hold; unknown ones are ignored."""
        ids = list(request_ids)
        self._put(
            Command(
                lambda: self.scheduler.cancel(ids, proxy_id), lambda error: self._cancel_each(ids, proxy_id)
            )
        )

    def _cancel_each(self, request_ids: Sequence[str], proxy_id: str) -> None:
        """One that cannot be cancelled alone either runs to its end, which nobody hears."""
        for request_id in request_ids:
            Command(partial(self.scheduler.cancel, [request_id], proxy_id), lambda error: None).carry_out()

    def between_steps(self, callback: Callable[[], None]) -> None:
        """Calls back from the engine's thread, after all that was asked before, when no step is computed."""
        self._put(Command(callback, lambda error: None))

    def wake(self) -> None:
        """Something may have become possible."""
        with self._condition:
            self._awake = True
            self._condition.notify()

    def _put(self, *commands: Command) -> None:
        with self._condition:
            self._inbox.extend(commands)
            self._condition.notify()

    def _run(self) -> None:
        busy = False
        while not self._stopping:
            self.beat.tick()
            if busy:
                self._pacer.wait(self.scheduler.item_pressure)
            commands = self._take_inbox(sleep=not busy)
            try:
                busy = self._step(commands)
            except Exception as error:
                check_device(error, self._device)
                logger.exception("the engine failed; all its requests end")
                self._end_all(self.scheduler.reset(InternalError("the engine failed")))
                busy = False
        for command in self._take_inbox(sleep=False):
            command.carry_out()
        self._end_all(self.scheduler.fail_all(Unavailable("this worker is shutting down", retry_after=1.0)))

    def _step(self, commands: Sequence[Command]) -> bool:
        """One step; False when there was nothing to do."""
        for command in commands:
            command.carry_out()
        output = self.scheduler.schedule(time.monotonic())
        result = self._execute(output)
        events = self.scheduler.update(output, result, time.monotonic())
        self._metrics.record(self.scheduler.collect_stats(), output, events)
        self._tell(events)
        moved = result.ec_connector_output
        return bool(output.computes or events or moved.fetched or moved.loaded or moved.failed)

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """The step's result; DeviceLost, by the runner or here, where the device fails for good."""
        if not output.computes:
            result = self.runner.execute(output)
        elif self._warm:
            with self.beat.turn(self._pacer):
                result = self.runner.execute(output)
        else:
            with self.beat.slow(), self._pacer:
                result = self.runner.execute(output)
            self._warm = True
        if result.ec_connector_output.failed:
            # Most are misses; the connector's own copies to the device are among them too.
            check_device(None, self._device)
        return result

    def _end_all(self, events: list[EngineEvent]) -> None:
        self._metrics.record(self.scheduler.collect_stats(), None, events)
        self._tell(events)

    def _take_inbox(self, *, sleep: bool) -> list[Command]:
        with self._condition:
            if sleep:
                self._condition.wait_for(lambda: self._inbox or self._awake or self._stopping, self._pause())
            commands, self._inbox = self._inbox, []
            self._awake = False
            return commands

    def _pause(self) -> float:
        """Seconds until the next deadline."""
        deadline = self.scheduler.next_deadline()
        if deadline is None:
            return _LONGEST_SLEEP
        return min(_LONGEST_SLEEP, max(0.0, deadline - time.monotonic()))

    def _tell(self, events: list[EngineEvent]) -> None:
        if not events:
            return
        try:
            self._emit(events)
        except Exception:
            logger.exception("events of a step were not taken")
