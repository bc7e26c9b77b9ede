"""The tower's step loop, in a thread of its own: encode a batch, save its outputs."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import torch

from triptych.base.cpu.step_pacer import StepPacer
from triptych.base.cpu.threads import in_short_lived_thread
from triptych.base.engine_beat import EngineBeat
from triptych.base.errors import InternalError, InvalidRequest, Unavailable
from triptych.base.log import log_fields
from triptych.base.machine.device import Device
from triptych.base.machine.device_fault import check_device, failure_of
from triptych.base.types import ItemPlan
from triptych.ec_connector.base import ECConnectorRole, ECTransferConfig, EncoderOutput, OutputCache
from triptych.ec_connector.connectors.host_buffers import bytes_of
from triptych.ec_connector.int8_rows import as_stored, finite_scales
from triptych.ec_connector.mixin import ECConnectorModelRunnerMixin
from triptych.encoder_worker.host_copier import HostCopier
from triptych.models.base import EncoderSide, PreparedItem
from triptych.protos import job_events
from triptych.protos.convert import source_to_proto
from triptych.protos.encoder_pb2 import EncodeEvent, ItemReady

logger = logging.getLogger(__name__)

#: Maximum sleep of an idle engine in seconds; it beats after each.
_MAX_SLEEP = 1.0


@dataclass(frozen=True, slots=True)
class TowerItem:
    """One item of a batch: its prepared pixels, or its output from an earlier job.

    `needed` says, from any thread, whether a stream still waits. `damaged_digest` names the stored value
    that the save may replace.
    """

    plan: ItemPlan
    prepared: PreparedItem | None
    output: EncoderOutput | None
    damaged_digest: str
    needed: Callable[[], bool]
    #: The trace that it is recorded in, for logs; empty where it is in none.
    trace_id: str = ""
    #: The digest of the tenant that it is saved for; empty for nobody.
    tenant: str = ""

    @property
    def log_extra(self) -> dict[str, object]:
        """The fields of log records about the item."""
        return log_fields(mm_hash=self.plan.mm_hash, trace_id=self.trace_id)


@dataclass(frozen=True, slots=True)
class Encoded:
    """An item is encoded: `output`, whose save has begun if `saving`, or `error`.

    `seconds` are the batch's, and `work` the item's part of them.
    """

    seconds: float
    output: EncoderOutput | None = None
    saving: bool = False
    error: Exception | None = None
    work: float = 0.0


#: What the engine reports of an item, by its key: it is encoded; then `ready` with a source where PD workers
#: can read it from this process while its save goes on, `ready` without one where it is in the store, or
#: `failed` where a save has failed, which `EncoderEngine.save` may try again.
Emit = Callable[[str, Encoded | EncodeEvent], None]
#: Told of every batch: the items that went through the tower, its calls and its seconds.
OnBatch = Callable[[int, int, float], None]


@dataclass(frozen=True, slots=True)
class _SaveOrder:
    output: EncoderOutput
    damaged_digest: str


@dataclass(frozen=True, slots=True)
class _TrialOrder:
    extra_rows: Future[int | None]


@dataclass(frozen=True, slots=True)
class _BatchOrder:
    items: Sequence[TowerItem]
    done: Future[None]


_Order = _BatchOrder | _SaveOrder | _TrialOrder | None


class EncoderEngine(ECConnectorModelRunnerMixin):
    """The tower's model runner: encodes batches in its own thread, saves outputs through its EC connector.

    The end of a save is reported at once, by the connector's thread: the item's requests do not wait for the
    batch that is in the tower meanwhile.

    `pacer` is entered while the tower computes. `thread_per_batch`: each batch has a thread of its own, which
    ends with it; for a process in which another engine computes in parallel (see `in_short_lived_thread`).

    `beat` has to be watched: a thread that dies, for example of a lost device, reports nothing.
    """

    def __init__(
        self,
        encoder: EncoderSide,
        transfer: ECTransferConfig,
        outputs: OutputCache,
        pacer: StepPacer | None = None,
        *,
        thread_per_batch: bool = False,
        on_batch: OnBatch = lambda items, calls, seconds: None,
    ) -> None:
        self._on_batch = on_batch
        self.beat = EngineBeat("encoder engine")
        self._encoder = encoder
        self._device = Device.of(encoder.device)
        self._connector = self.ensure_ec_transfer_initialized(transfer, ECConnectorRole.WORKER, self._collect)
        self._outputs = outputs
        self._emit: Emit  # from `start` on
        self._pacer = pacer or StepPacer()
        self._thread_per_batch = thread_per_batch
        self._waited = 0.0
        self._to_host = HostCopier(encoder.device)
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._stopping = False
        self._busy_since: float | None = None
        self._trial: Future[int | None] | None = None
        #: The items whose save is under way: each is pinned once.
        self._saving: set[str] = set()
        self._calls = 0
        self._thread = threading.Thread(
            target=self.beat.run, args=(self._run,), name="encoder-engine", daemon=True
        )

    def start(self, emit: Emit) -> None:
        """Starts the thread. `emit` is called from any thread and must not block."""
        self._emit = emit
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Ends the thread after the batch in the tower, then the connector."""
        self.beat.stop()
        self._stopping = True
        self._orders.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)
        self.shutdown_ec_transfer()

    def encode(self, batch: Sequence[TowerItem]) -> Future[None]:
        """Queues a batch; one `Encoded` per item is emitted before the future is done: the tower is free."""
        order = _BatchOrder(batch, Future())
        order.done.set_running_or_notify_cancel()  # from now on it cannot be cancelled
        self._orders.put(order)
        return order.done

    def extra_video_rows(self) -> Future[int | None]:
        """As the encoder side finds it by a trial, the first time; a trial that has failed is made again."""
        if (trial := self._trial) is None:
            order = _TrialOrder(Future())
            order.extra_rows.set_running_or_notify_cancel()  # from now on it cannot be cancelled
            trial = self._trial = order.extra_rows
            self._orders.put(order)
        return trial

    def save(self, output: EncoderOutput, damaged_digest: str = "") -> None:
        """Saves an output (again); `ready` or `failed` comes back."""
        self._orders.put(_SaveOrder(output, damaged_digest))

    def last_progress(self) -> float:
        """When the tower last made progress, on the monotonic clock; now while it is idle.

        Each layer is progress: a batch may take longer than a lease.
        """
        since = self._busy_since
        return time.monotonic() if since is None else max(since, self.beat.ticked_at)

    def _run(self) -> None:
        self._device.select()
        while not self._stopping:
            self.beat.tick()
            try:
                order = self._orders.get(timeout=_MAX_SLEEP)
            except queue.Empty:
                continue
            if isinstance(order, _SaveOrder):
                self._start_save(order.output, order.damaged_digest)
            elif isinstance(order, _TrialOrder):
                order.extra_rows.set_result(self._try_segments())
            elif order is not None:
                with self.beat.busy.working(True):
                    self._run_batch(order.items)
                self._pacer.rest()
                order.done.set_result(None)

    def _try_segments(self) -> int | None:
        try:
            with self.beat.turn(self._pacer):
                return self._encoder.extra_video_rows()
        except Exception as error:
            check_device(error, self._encoder.device)
            logger.warning("a video is encoded whole: the trial of segments failed", exc_info=True)
            self._trial = None
            return None

    def _run_batch(self, batch: Sequence[TowerItem]) -> None:
        """Runs a batch; reports every item, even if the step raises."""
        try:
            in_short_lived_thread(self._step, batch) if self._thread_per_batch else self._step(batch)
        except Exception as error:
            check_device(error, self._encoder.device)
            logger.exception("a batch of %d items failed", len(batch))
            self._busy_since = None
            for item in batch:
                self._report(item.plan.mm_hash, Encoded(0.0, error=InternalError("the encoder failed")))
            self._on_batch(0, self._calls, 0.0)

    def _report(self, mm_hash: str, event: Encoded | EncodeEvent) -> None:
        try:
            self._emit(mm_hash, event)
        except Exception:
            logger.exception("an event of the engine was not handled", extra=log_fields(mm_hash=mm_hash))

    def _step(self, batch: Sequence[TowerItem]) -> None:
        start = self._busy_since = time.monotonic()
        self._calls, self._waited = 0, 0.0
        fresh = [item for item in batch if item.output is None]
        results = dict(zip((i.plan.mm_hash for i in fresh), self._encode_isolated(fresh), strict=True))
        seconds = time.monotonic() - start - self._waited
        self._busy_since = None
        patches = sum(_patches(item) for item in fresh)
        for item in batch:
            try:
                work = seconds * _patches(item) / patches if item.output is None else 0.0
                self._finish(item, results.get(item.plan.mm_hash, item.output), seconds, work)
            except Exception:
                logger.exception("the output of an item could not be reported", extra=item.log_extra)
                self._report(item.plan.mm_hash, Encoded(seconds, error=InternalError("the encoder failed")))
        self._on_batch(len(fresh), self._calls, seconds)

    def _encode_isolated(self, items: Sequence[TowerItem]) -> list[EncoderOutput | Exception]:
        """One output or error per item; a failing item does not fail the others of its batch."""
        try:
            return self._encode(items)
        except Exception as error:
            check_device(error, self._encoder.device)
            if len(items) == 1:
                logger.warning("the tower failed on an item", exc_info=True, extra=items[0].log_extra)
                return [failure_of(error, self._encoder.device, f"a whole {items[0].plan.modality}")]
            logger.warning("the tower failed on a batch of %d: encoding them one by one", len(items))
        self._device.empty_cache()
        results: list[EncoderOutput | Exception] = []
        for item in items:
            self._busy_since = time.monotonic()
            results += self._encode_isolated([item])
        return results

    def _encode(self, items: Sequence[TowerItem]) -> list[EncoderOutput | Exception]:
        if not items:
            return []
        prepared = [item.prepared for item in items if item.prepared is not None]
        self._calls += 1
        requested_at = time.monotonic()
        with self.beat.turn(self._pacer), torch.inference_mode():
            self._busy_since = time.monotonic()
            self._waited += self._busy_since - requested_at
            outputs = self._encoder.encode(prepared)
            if len(outputs) == len(items):
                outputs = [as_stored(output, item.plan) for item, output in zip(items, outputs, strict=True)]
            rows = self._to_host(outputs, checks=[partial(self._serve, item) for item in items])
        if len(rows) != len(items):
            raise InternalError(f"the tower gave {len(rows)} outputs for {len(items)} items")
        return [_checked(item, *row) for item, row in zip(items, rows, strict=True)]

    def _serve(self, item: TowerItem, data: torch.Tensor) -> bool | None:
        """Whether the output is finite, by the pass that copies it for PD workers; None without one."""
        plan = item.plan
        try:
            if item.needed() and tuple(data.shape) == (plan.rows, plan.columns):
                return self._connector.serve(EncoderOutput(plan, data))
        except Exception:
            logger.warning("an output is not served before its save", exc_info=True, extra=item.log_extra)
        return None

    def _finish(
        self, item: TowerItem, result: EncoderOutput | Exception | None, seconds: float, work: float
    ) -> None:
        key = item.plan.mm_hash
        if isinstance(result, Exception) or result is None:
            self._report(key, Encoded(seconds, error=result or InternalError("the tower gave no output")))
            return
        result = replace(result, tenant=item.tenant)
        self._outputs[key] = result
        saving = item.needed()
        self._report(key, Encoded(seconds, output=result, saving=saving, work=work))
        if saving:
            self._start_save(result, item.damaged_digest)

    def _start_save(self, output: EncoderOutput, damaged_digest: str) -> None:
        key = output.plan.mm_hash
        try:
            if key not in self._saving:
                self._outputs.pin(key)
                self._saving.add(key)  # behind the pin: another save's end may be under way
            self._outputs[key] = output
            self.maybe_save_ec_to_connector(self._outputs, key, damaged_digest)
        except Exception as error:
            logger.warning("a save could not begin", exc_info=True, extra=log_fields(mm_hash=key))
            self._unsaved(key, type(error).__name__)

    def _collect(self) -> None:
        finished = self._connector.get_finished()
        for key, source in finished.offered.items():
            self._report(key, EncodeEvent(ready=ItemReady(source=source_to_proto(source))))
        for key in finished.saved:
            self._landed(key, EncodeEvent(ready=ItemReady()))
        for key, reason in finished.unsaved.items():
            self._unsaved(key, reason)

    def _unsaved(self, key: str, reason: str) -> None:
        self._landed(key, job_events.failed(Unavailable(reason), retryable=True))

    def _landed(self, key: str, end: EncodeEvent) -> None:
        """Reports one save's end; a failure here does not keep the next from being reported."""
        try:
            if key in self._saving:
                self._saving.discard(key)
                self._outputs.unpin(key)
        except Exception:
            logger.exception("an output stays pinned")
        self._report(key, end)


def _checked(item: TowerItem, data: torch.Tensor, finite: bool) -> EncoderOutput | Exception:
    """The output; an error where it has NaN or infinity, which would spread to other requests.

    A KV block is not zeroed before its next use, and an attention weight of zero times NaN is NaN.
    """
    plan = item.plan
    if tuple(data.shape) != (plan.rows, plan.columns):
        raise InternalError(f"the tower gave {tuple(data.shape)} for {plan.rows}x{plan.width} planned")
    if not finite or (plan.scales and not finite_scales(bytes_of(data), plan)):
        logger.warning(
            "an item is refused: its embedding has NaN or infinity; if %s often overflows, change --dtype",
            plan.dtype,
            extra=item.log_extra,
        )
        return InvalidRequest(
            f"{plan.modality}: the model cannot compute with it, its values overflow; send another one",
            param=plan.modality,
        )
    return EncoderOutput(plan, data)


def _patches(item: TowerItem) -> int:
    """Size that the tower's time grows with: patches of a picture or video, rows of anything else."""
    plan = item.plan
    return max(math.prod(plan.grid_thw) if plan.grid_thw and plan.modality != "audio" else plan.rows, 1)
