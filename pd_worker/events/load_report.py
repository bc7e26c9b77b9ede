"""The load that a PD worker reports to its proxies with every beat, read from its metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from triptych.base.metrics import PDMetrics
from triptych.protos import pd_pb2


def load_report(metrics: PDMetrics, encoder_cache_bytes: int) -> pd_pb2.PDLoad:
    """The load now; `encoder_cache_bytes` is the encoder cache's size."""
    return pd_pb2.PDLoad(
        running=int(_value(metrics.requests_running)),
        waiting=int(_value(metrics.requests_waiting)),
        kv_usage=_value(metrics.kv_cache_usage),
        cache_usage=_value(metrics.encoder_cache_bytes) / max(encoder_cache_bytes, 1),
        generated_tokens=int(_value(metrics.generation_tokens)),
    )


def _value(metric: Counter | Gauge) -> float:
    """The value of a metric without labels of its own. Once a second: nothing is added to a step."""
    return next(sample.value for family in metric.collect() for sample in family.samples)
