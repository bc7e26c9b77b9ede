"""Metrics of an encoder worker's jobs."""

from __future__ import annotations

from triptych.base.errors import RequestError
from triptych.base.metrics import EncoderMetrics
from triptych.encoder_worker.engine import BatchDone
from triptych.encoder_worker.scheduler import SchedulerCounts


class JobMetrics:
    """Gauges of jobs and pixels held; counters of batches, saves and failures."""

    def __init__(self, metrics: EncoderMetrics, model_name: str) -> None:
        self._metrics = metrics
        self._model_name = model_name

    def gauges(self, counts: SchedulerCounts) -> None:
        """Sets the gauges; all are zero when the worker is idle."""
        self._metrics.jobs.set(counts.items)
        self._metrics.planned_items.set(counts.planned)
        self._metrics.queue_items.set(counts.queued)
        self._metrics.inflight.set(counts.encoding)
        self._metrics.prepared_bytes.set(counts.prepared_bytes)

    def batch(self, done: BatchDone) -> None:
        """Counts a finished batch, unless all its outputs were kept from earlier jobs."""
        self._metrics.tower_calls.inc(done.calls)
        self._metrics.tower_items.inc(done.items)
        if done.items:
            self._metrics.batch_items.observe(done.items)
            self._metrics.encode_seconds.observe(done.seconds)

    def saved(self, nbytes: int, seconds: float) -> None:
        """Counts a save that has completed."""
        self._metrics.save_bytes.inc(nbytes)
        self._metrics.save_seconds.observe(seconds)

    def found(self) -> None:
        """Counts a job whose embedding was in the store already."""
        self._metrics.already_stored.inc()

    def failed(self, error: RequestError) -> None:
        """Counts a failed job or stream."""
        self._metrics.failures.labels(self._model_name, error.code).inc()
