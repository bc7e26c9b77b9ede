"""What the processes of both kinds of worker share: address, metrics page, stop signal."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from grpc import aio
from prometheus_client import CollectorRegistry, start_http_server

from triptych.config import WorkerConfig, check_advertise
from triptych.errors import ConfigError


def stop_signal() -> asyncio.Event:
    """Set on SIGTERM or SIGINT; belongs to the running event loop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def bind(server: aio.Server, config: WorkerConfig) -> str:
    """Binds the worker's port and returns the address that others reach it at."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    try:
        port = server.add_insecure_port(f"{host}:{config.port}")
    except RuntimeError as error:
        raise ConfigError(f"--port {config.port} on {config.host} is taken: choose another one") from error
    address = config.advertise or f"{host}:{port}"
    check_advertise(address)
    return address


@contextmanager
def metrics_server(host: str, port: int, registry: CollectorRegistry) -> Iterator[int]:
    """Serves /metrics on `port`, 0 for a free one; yields the port."""
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise ConfigError(f"--metrics-port {port} is taken: choose another one") from error
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
