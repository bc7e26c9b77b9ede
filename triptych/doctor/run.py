"""All checks for the flags that are given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from triptych.config import DoctorConfig
from triptych.doctor.cluster import look_at_cluster
from triptych.doctor.finding import CheckResult, fail
from triptych.doctor.machine import MachineState, check_machine, check_ports
from triptych.doctor.model import check_devices, check_model
from triptych.doctor.secrets import check_secrets
from triptych.doctor.store import look_at_store
from triptych.doctor.versions import check_versions, installed
from triptych.errors import ConfigError
from triptych.launch.secrets.credentials import store_url

Group = tuple[str, Sequence[CheckResult]]


def examine(config: DoctorConfig) -> list[Group]:
    """The findings under their headings; a check that breaks does not keep the others from theirs."""
    proxy = config.proxy
    devices = [config.encoder.device, config.pd.device]
    state = MachineState.of_this(proxy.spool_folder)
    checks: list[tuple[str, Callable[[], list[CheckResult]]]] = [
        ("versions", lambda: check_versions(installed())),
        ("machine", lambda: check_machine(state, media_disk=proxy.media_disk)),
        (
            "devices and model",
            lambda: check_devices(devices) + check_model(config),
        ),
        ("secrets", lambda: check_secrets(proxy)),
    ]
    if not config.url:
        checks.append(("ports", lambda: check_ports(ports_of(config))))
    if config.store != "auto":
        checks.append(("store", lambda: _store(config)))
    if config.url:
        key = proxy.api_key.partition(",")[0]
        checks.append(("cluster", lambda: look_at_cluster(config.url, key)))
    return [(heading, _guarded(heading, check)) for heading, check in checks]


def ports_of(config: DoctorConfig) -> list[tuple[str, str, int]]:
    """The ports that the proxy is to listen at, with their flags and hosts."""
    proxy = config.proxy
    ports = [("--port", proxy.host, proxy.port), ("--grpc-port", proxy.host, proxy.grpc_port)]
    if proxy.metrics_port:
        ports.append(("--metrics-port", proxy.metrics_host or proxy.host, proxy.metrics_port))
    if proxy.scaling.scaler_port:
        ports.append(("--scaler-port", proxy.scaling.scaler_host, proxy.scaling.scaler_port))
    return ports


def _store(config: DoctorConfig) -> list[CheckResult]:
    return asyncio.run(look_at_store(store_url(config.store, config.proxy)))


def _guarded(heading: str, check: Callable[[], list[CheckResult]]) -> list[CheckResult]:
    try:
        return check()
    except ConfigError as error:
        found, _, remedy = str(error).partition(": ")
        return [fail(heading, found, remedy or "see the flag's --help")]
    except Exception as error:
        remedy = "the check itself is broken: report it with this line"
        return [fail(heading, f"{type(error).__name__}: {error}", remedy)]
