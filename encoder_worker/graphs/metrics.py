"""Metrics of a worker's encoder graphs."""

from __future__ import annotations

from triptych.base.metrics import EncoderMetrics
from triptych.encoder_worker.graphs.graph_encoder import GraphEncoder
from triptych.models.base import EncoderSide


class GraphMetrics:
    """Counts replays and eager items in the worker's metrics."""

    def __init__(self, metrics: EncoderMetrics, model_name: str) -> None:
        self._metrics = metrics
        self._model_name = model_name

    def hit(self, budget: int, items: int, rows: int) -> None:
        """One replay of this budget encoded so many items of so many rows together."""
        self._metrics.graph_hits.inc(items)
        self._metrics.graph_padding_rows.inc(budget - rows)
        self._metrics.graph_replays.labels(self._model_name, str(budget)).inc()

    def miss(self, items: int) -> None:
        """So many items were encoded eagerly."""
        self._metrics.graph_misses.inc(items)


def count_graphs(encoder: EncoderSide, metrics: EncoderMetrics, model_name: str) -> None:
    """From now on counts here what becomes of items, where the encoder side has graphs."""
    if isinstance(encoder, GraphEncoder):
        encoder.graphs.counts = GraphMetrics(metrics, model_name)
        metrics.graph_buffer_bytes.set(encoder.graphs.nbytes)
