"""The load that a PD worker reports is that of its metrics."""

from __future__ import annotations

from triptych.base.metrics import PDMetrics
from triptych.pd_worker.worker import load_report


def test_the_report_has_the_values_of_the_metrics() -> None:
    metrics = PDMetrics("model")
    metrics.requests_running.set(3)
    metrics.requests_waiting.set(2)
    metrics.kv_cache_usage.set(0.5)
    metrics.encoder_cache_bytes.set(1 << 20)
    metrics.generation_tokens.inc(77)
    report = load_report(metrics, 4 << 20)
    assert (report.running, report.waiting, report.generated_tokens) == (3, 2, 77)
    assert (report.kv_usage, report.cache_usage) == (0.5, 0.25)


def test_a_worker_without_an_encoder_cache_uses_none_of_it() -> None:
    assert load_report(PDMetrics("model"), 0).cache_usage == 0.0
