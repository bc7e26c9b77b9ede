from __future__ import annotations

import ast
import dataclasses
import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import pytest

from triptych.base.config import EncoderConfig, PDConfig, ProxyConfig
from triptych.base.errors import ConfigError
from triptych.base.tracing.start import check_tracing, start_tracer, traces_url


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("https://otel.example/team/v1/traces", "https://otel.example/team/v1/traces"),
        ("http://[::1]:4318", "http://[::1]:4318/v1/traces"),
    ],
)
def test_an_address_without_a_path_gets_otlps(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


@pytest.mark.parametrize(
    "endpoint",
    [
        "127.0.0.1:4318",
        "grpc://x:4317",
        "http://",
        "http://x:port",
        "http://x?key=1",
        "http://x:99999",
        "file:///x",
    ],
)
def test_what_is_no_otlp_address_is_refused_by_the_flags_name(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint.*http://host:4318"):
        traces_url(endpoint)


def test_a_password_in_the_address_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        traces_url("http://me:hunter2@host:4318")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("sample", [-0.1, 1.1, math.nan, math.inf])
def test_a_part_outside_of_0_to_1_is_refused(sample: float) -> None:
    with pytest.raises(ConfigError, match="--trace-sample"):
        check_tracing(ProxyConfig(trace_sample=sample))


@pytest.mark.parametrize("config", [ProxyConfig(), EncoderConfig(), PDConfig()])
def test_there_is_no_tracer_without_an_endpoint(config: ProxyConfig | EncoderConfig | PDConfig) -> None:
    check_tracing(config)
    assert start_tracer(config, "proxy", "1") is None


def test_missing_packages_are_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name.startswith("opentelemetry") else found(name)
    )
    config = dataclasses.replace(ProxyConfig(), otlp_endpoint="http://127.0.0.1:4318")
    with pytest.raises(ConfigError, match=r"pip install 'triptych\[otel\]'"):
        check_tracing(config)


PROGRAM = """
import sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("opentelemetry"):
            frame = sys._getframe(1)
            while "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            importers.add(frame.f_globals.get("__name__", ""))
        return None

importers = set()
sys.meta_path.insert(0, Watch())
import triptych.proxy.service, triptych.encoder_worker.service, triptych.pd_worker.service
from triptych.base.config import ServiceConfig
from triptych.base.tracing.start import check_tracing, start_tracer
check_tracing(ServiceConfig())
assert start_tracer(ServiceConfig(), "proxy", "1") is None
print([name for name in importers if name.startswith("triptych")])
ours = ("triptych.base.tracing.otlp", "triptych.base.tracing.otlp")
exporters = ("opentelemetry.sdk.trace", "opentelemetry.exporter", *ours)
print([name for name in sys.modules if name.startswith(exporters)])
"""


def test_of_opentelemetry_only_the_api_is_imported_while_traces_are_off() -> None:
    """By us: redis-py imports its metrics where they happen to be installed."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=55,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    importers, exporting = (ast.literal_eval(line) for line in done.stdout.splitlines())
    assert importers and all(name.startswith("triptych.base.tracing.") for name in importers)
    assert exporting == []
