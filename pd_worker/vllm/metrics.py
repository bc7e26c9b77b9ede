"""Prometheus metrics of a vLLM engine, under the names of the native one."""

from __future__ import annotations

from collections.abc import Iterable

from triptych.base.metrics import PDMetrics
from triptych.base.types import FinishReason
from triptych.pd_worker.core.request_events import EngineEvent, ItemLoaded, NewTokens, RequestFinished
from triptych.pd_worker.core.stats import Latencies


class EngineMetrics:
    """What this worker sees of its requests; a server's own metrics are at the server."""

    def __init__(self, metrics: PDMetrics, model_name: str) -> None:
        self._metrics = metrics
        self._model_name = model_name

    def count(self, events: Iterable[EngineEvent]) -> None:
        metrics = self._metrics
        for event in events:
            match event:
                case NewTokens():
                    metrics.generation_tokens.inc(len(event.token_ids))
                case ItemLoaded():
                    metrics.ec_load_seconds.observe(event.seconds)
                case RequestFinished():
                    self._finished(event)

    def looked_up(self, items: int, missing: int) -> None:
        """So many items of a request were looked for in the store."""
        for result, count in (("fetched", items - missing), ("missing", missing)):
            if count:
                self._metrics.ec_lookups.labels(self._model_name, result).inc(count)

    def lost(self) -> None:
        self._metrics.engine_losses.inc()

    def show(self, *, running: int, waiting: int, reserved: int, up: bool, latencies: Latencies) -> None:
        """The gauges now, and latencies since the last call."""
        metrics = self._metrics
        metrics.requests_running.set(running)
        metrics.requests_waiting.set(waiting)
        metrics.reserved_bytes.set(reserved)
        metrics.engine_up.set(up)
        for histogram, values in (
            (metrics.time_to_first_token, latencies.first_token),
            (metrics.inter_token_latency, latencies.between_tokens),
            (metrics.e2e_latency, latencies.whole),
        ):
            for seconds in values:
                histogram.observe(seconds)

    def _finished(self, event: RequestFinished) -> None:
        metrics, timings = self._metrics, event.timings
        metrics.request_success.labels(self._model_name, str(event.reason)).inc()
        if event.reason in (FinishReason.STOP, FinishReason.LENGTH):
            metrics.prompt_tokens.inc(event.usage.prompt_tokens)
            metrics.prefix_queries.inc(event.usage.prompt_tokens)
            metrics.prefix_hits.inc(event.usage.cached_tokens)
            metrics.queue_time.observe(timings.queue)
            metrics.prefill_time.observe(timings.prefill)
            metrics.decode_time.observe(timings.decode)
