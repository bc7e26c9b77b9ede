"""The Prometheus metrics of a PD worker's steps."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Gauge

from triptych.base.delta import Delta
from triptych.base.metrics import PDMetrics
from triptych.base.types import FinishReason
from triptych.pd_worker.core.outputs import (
    ItemStats,
    Latencies,
    OverlapStats,
    ScheduledChunk,
    SchedulerOutput,
    SchedulerStats,
)
from triptych.pd_worker.core.request_events import EngineEvent
from triptych.protos.pd_pb2 import Finished


class StepMetrics:
    """The engine's Prometheus metrics, after each step; at rest all gauges but that of snapshots are 0."""

    def __init__(self, metrics: PDMetrics, model_name: str) -> None:
        self._metrics = metrics
        self._model_name = model_name
        #: The gauges as they were set last: most steps change none.
        self._shown: tuple[tuple[Gauge, float], ...] = ()

    def record(
        self, stats: SchedulerStats, output: SchedulerOutput | None, events: Iterable[EngineEvent]
    ) -> None:
        """`output` is None when the step failed before it was planned."""
        self._gauges(stats)
        self._items(stats.items)
        self._overlap(stats.overlap)
        self._latencies(stats.latencies)
        if output is not None:
            self._step(output)
        for event in events:
            if isinstance(event, Delta):
                self._metrics.generation_tokens.inc(len(event.token_ids))
            elif event.HasField("finished"):
                self._finished(event.finished)

    def replayed(self) -> None:
        """Counts a step that was a replay of a decode graph."""
        self._metrics.graph_steps.inc()

    def limited(self) -> None:
        """Counts a step on fewer threads than there are, since others had the cores."""
        self._metrics.limited_steps.inc()

    def _gauges(self, stats: SchedulerStats) -> None:
        metrics, items = self._metrics, stats.items
        gauges = (
            (metrics.requests_running, stats.num_running),
            (metrics.requests_waiting, stats.num_waiting),
            (metrics.tenants_waiting, stats.tenants_waiting),
            (metrics.kv_blocks_used, stats.kv_blocks_used),
            (metrics.kv_cache_usage, stats.kv_blocks_used / stats.kv_blocks),
            (metrics.host_blocks_used, stats.host_blocks_used),
            (metrics.state_slots_used, stats.state_slots_used),
            (metrics.state_snapshots, stats.state_snapshots),
            (metrics.cross_tables, items.cross_tables),
            (metrics.encoder_cache_bytes, items.encoder_cache_bytes),
            (metrics.encoder_cache_references, items.encoder_cache_references),
            (metrics.reserved_bytes, items.reserved_bytes),
        )
        if gauges == self._shown:
            return
        self._shown = gauges
        for gauge, value in gauges:
            gauge.set(value)

    def _items(self, counts: ItemStats) -> None:
        for result, count in (
            ("resident", counts.resident),
            ("fetched", counts.fetched),
            ("missing", counts.missing),
        ):
            if count:
                self._metrics.ec_lookups.labels(self._model_name, result).inc(count)
        if counts.put_off:
            self._metrics.room_given_up.inc(counts.put_off)
        for seconds in counts.load_seconds:
            self._metrics.ec_load_seconds.observe(seconds)
        self._metrics.ec_load_bytes.inc(counts.load_bytes)
        for path, count in counts.loads.items():
            self._metrics.ec_loads.labels(self._model_name, path).inc(count)

    def _overlap(self, counts: OverlapStats) -> None:
        if counts.tokens or counts.requests or counts.lost_tokens:
            self._metrics.overlap_requests.inc(counts.requests)
            self._metrics.overlap_tokens.inc(counts.tokens)
            self._metrics.overlap_lost_tokens.inc(counts.lost_tokens)

    def _latencies(self, latencies: Latencies) -> None:
        for histogram, values in (
            (self._metrics.time_to_first_token, latencies.first_token),
            (self._metrics.inter_token_latency, latencies.between_tokens),
            (self._metrics.e2e_latency, latencies.whole),
        ):
            for seconds in values:
                histogram.observe(seconds)

    def _step(self, output: SchedulerOutput) -> None:
        metrics = self._metrics
        for counter, count in (
            (metrics.preemptions, len(output.preempted)),
            (metrics.tenant_preemptions, output.gave_way),
            (metrics.projections, len(output.projections)),
            (metrics.swapped_blocks, len(output.swap_out)),
            (metrics.prefix_queries, output.prefix_queried),
            (metrics.prefix_hits, output.prefix_hit),
        ):
            if count:  # most steps change none
                counter.inc(count)
        if not output.chunks:
            return
        metrics.batch_requests.observe(len(output.chunks))
        metrics.iteration_tokens.observe(sum(chunk.count for chunk in output.chunks))
        metrics.chunked_prefills.inc(sum(1 for chunk in output.chunks if not chunk.samples))
        metrics.prompt_tokens.inc(sum(map(_prompt_tokens, output.chunks)))

    def _finished(self, end: Finished) -> None:
        metrics = self._metrics
        metrics.request_success.labels(self._model_name, end.reason).inc()
        if end.reason in (FinishReason.STOP, FinishReason.LENGTH):
            metrics.queue_time.observe(end.queue_seconds)
            metrics.prefill_time.observe(end.prefill_seconds)
            metrics.decode_time.observe(end.decode_seconds)


def _prompt_tokens(chunk: ScheduledChunk) -> int:
    """Tokens of the chunk that belong to the prompt."""
    prompt = len(chunk.state.request.prompt_token_ids)
    return max(0, min(chunk.start + chunk.count, prompt) - chunk.start)
