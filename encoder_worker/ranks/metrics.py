"""Metrics of an encoder worker's ranks."""

from __future__ import annotations

from triptych.base.metrics import EncoderMetrics


class RankMetrics:
    """Counters of what each rank was given, and of the shares that it failed on."""

    def __init__(self, metrics: EncoderMetrics, model_name: str, ranks: int) -> None:
        self._metrics = metrics
        self._model_name = model_name
        metrics.ranks.set(ranks)

    def share(self, rank: int, items: int, patches: int) -> None:
        """Counts one rank's share of a batch."""
        self._metrics.rank_items.labels(self._model_name, rank).inc(items)
        self._metrics.rank_patches.labels(self._model_name, rank).inc(patches)

    def failed(self, rank: int) -> None:
        """Counts a share that raised an exception; its items are encoded again, one by one, by rank 0."""
        self._metrics.rank_failures.labels(self._model_name, rank).inc()
