"""Starts a service's tracer as its flags say."""

from __future__ import annotations

import asyncio
import importlib.util
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from triptych import __version__
from triptych.base.config import ServiceConfig
from triptych.base.errors import ConfigError
from triptych.base.tracing.tracer import Tracer

_PATH = "/v1/traces"


def start_tracer(
    config: ServiceConfig, service: str, instance: str, *, trusts_parent: bool = True
) -> Tracer | None:
    """The service's tracer; None without `--otlp-endpoint`. ConfigError for flags that cannot work.

    `service` is "proxy", "encoder", "pd" or "colocated"; `instance` is new for every process.
    """
    if not config.otlp_endpoint:
        return None
    check_tracing(config)
    from triptych.base.tracing.otlp import otlp_tracer, request_sampler

    resource = {
        "service.name": f"triptych-{service}",
        "service.namespace": "triptych",
        "service.instance.id": instance,
        "service.version": __version__,
    }
    sampler = request_sampler(config.trace_sample, trusts_parent=trusts_parent)
    return otlp_tracer(traces_url(config.otlp_endpoint), resource, __version__, sampler)


@asynccontextmanager
async def worker_tracer(config: ServiceConfig, service: str, instance: str) -> AsyncIterator[Tracer | None]:
    """The tracer of `start_tracer`, closed at the end."""
    tracer = start_tracer(config, service, instance)
    try:
        yield tracer
    finally:
        if tracer is not None:
            await asyncio.to_thread(tracer.close)


def check_tracing(config: ServiceConfig) -> None:
    """ConfigError where the flags of traces cannot work as they are, or their packages are missing."""
    if not (math.isfinite(config.trace_sample) and 0.0 <= config.trace_sample <= 1.0):
        raise ConfigError(f"--trace-sample {config.trace_sample:g}: give a part of all requests, 0 to 1")
    if not config.otlp_endpoint:
        return
    traces_url(config.otlp_endpoint)
    if importlib.util.find_spec("opentelemetry") is None or not _installed():
        raise ConfigError("--otlp-endpoint needs OpenTelemetry: pip install 'triptych[otel]'")


def _installed() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


def traces_url(endpoint: str) -> str:
    """The URL that spans are sent to: an address without a path gets OTLP's. ConfigError for another one."""
    wrong = (
        f"--otlp-endpoint {endpoint[:200]!r}: give the collector's OTLP/HTTP address, like http://host:4318"
    )
    try:
        parts = urlsplit(endpoint)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise ConfigError(wrong) from None
    if "@" in parts.netloc:
        raise ConfigError(
            "--otlp-endpoint holds a name or password, which process lists show: give headers in the "
            "variable OTEL_EXPORTER_OTLP_HEADERS"
        )
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise ConfigError(wrong)
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path or _PATH}"
