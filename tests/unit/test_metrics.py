"""The metrics of all processes: no creation times, the process itself, and a bounded number of series."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from triptych import __version__
from triptych.base.metrics import MAX_KINDS, EncoderMetrics, PDMetrics, ProxyMetrics, new_registry


def _registries() -> dict[str, CollectorRegistry]:
    return {
        "proxy": ProxyMetrics().registry,
        "encoder": EncoderMetrics("m").registry,
        "pd": PDMetrics("m").registry,
    }


def _samples(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if not line.startswith("#")]


@pytest.mark.parametrize("process", ["proxy", "encoder", "pd"])
def test_no_series_is_a_time_of_creation(process):
    assert not [line for line in _samples(_registries()[process]) if "_created" in line.partition("{")[0]]


@pytest.mark.parametrize("process", ["proxy", "encoder", "pd"])
def test_every_page_has_the_process_and_its_version(process):
    registry = _registries()[process]
    assert registry.get_sample_value("process_resident_memory_bytes")
    assert registry.get_sample_value("process_start_time_seconds")
    assert registry.get_sample_value("triptych_build_info", {"version": __version__}) == 1


def test_both_sides_of_a_replica_share_a_registry():
    registry = new_registry()
    encoder = EncoderMetrics("m", registry)
    PDMetrics("m", registry, encoder.parameter_bytes)
    assert registry.get_sample_value("process_start_time_seconds")


def test_ten_thousand_kinds_of_workers_make_a_bounded_number_of_series():
    metrics = ProxyMetrics()
    for index in range(10_000):
        metrics.encode_cost.labels(metrics.kind(f"kind {index}" + "x" * 10_000)).set(1.0)
    lines = [line for line in _samples(metrics.registry) if "encode_cost" in line]
    assert len(lines) == MAX_KINDS + 1 and max(map(len, lines)) < 200
    assert metrics.kind("kind 3" + "x" * 10_000).startswith("kind 3")
