"""All checks for the flags that are given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from triptych.apps.doctor.cluster import look_at_cluster
from triptych.apps.doctor.finding import CheckResult, Group, fail, fail_of, note
from triptych.apps.doctor.kernels import check_kernels
from triptych.apps.doctor.machine import (
    MachineState,
    check_machine,
    check_ports,
    check_secrets,
    check_versions,
    needed,
)
from triptych.apps.doctor.model import check_devices, check_model
from triptych.apps.doctor.release import look_at_release
from triptych.apps.doctor.store import check_store
from triptych.apps.launch.model_path import is_hub_id, resolve_demo
from triptych.apps.launch.secrets import store_url
from triptych.base.config import DoctorConfig, WorkerRange
from triptych.base.errors import ConfigError


def examine(config: DoctorConfig) -> Iterator[Group]:
    """The results under their headings; a check that breaks does not keep the others from theirs."""
    if config.cluster:
        yield "Kubernetes", _guarded("release", lambda: look_at_release(config.cluster))
        return
    proxy = config.proxy
    devices = [config.encoder.device, config.pd.device]
    state = MachineState.of_this(proxy.spool_folder)
    yield "versions", _guarded("versions", lambda: check_versions(needed()))
    yield "machine", _guarded("machine", lambda: check_machine(state, media_disk=proxy.media_disk))
    yield (
        "devices and model",
        _guarded("device", lambda: check_devices(devices))
        + _guarded("kernels", lambda: check_kernels(config.pd))
        + _guarded("model", lambda: _model(config)),
    )
    yield "secrets", _guarded("secrets", lambda: check_secrets(proxy))
    if not config.url:
        yield "ports", _guarded("ports", lambda: check_ports(ports_of(config)))
    if config.store != "auto":
        yield from _store(config)
    if config.url:
        key = proxy.api_key.partition(",")[0]
        yield "cluster", _guarded("cluster", lambda: look_at_cluster(config.url, key))


def ports_of(config: DoctorConfig) -> list[tuple[str, str, int]]:
    """The ports that the proxy is to listen at, with their flags and hosts."""
    proxy = config.proxy
    ports = [("--port", proxy.host, proxy.port), ("--grpc-port", proxy.host, proxy.grpc_port)]
    if proxy.metrics_port:
        ports.append(("--metrics-port", proxy.metrics_host or proxy.host, proxy.metrics_port))
    if proxy.scaling.scaler_port:
        ports.append(("--scaler-port", proxy.scaling.scaler_host, proxy.scaling.scaler_port))
    return ports


def _model(config: DoctorConfig) -> Iterable[CheckResult]:
    given = resolve_demo(config.demo, config.model)
    if is_hub_id(given):
        return [note("model", f"{given} is a hub id: not fetched", "name a folder, or `triptych check` it")]
    # `serve` picks the number itself where none is given, and takes one where more do not fit.
    chosen = config if config.encoders.maximum else replace(config, encoders=WorkerRange.fixed(1))
    return check_model(chosen, given)


def _store(config: DoctorConfig) -> list[Group]:
    try:
        return asyncio.run(check_store(store_url(config.store, config.proxy)))
    except ConfigError as error:
        return [("store", [fail_of("store", error)])]


def _guarded(check: str, run: Callable[[], Iterable[CheckResult]]) -> list[CheckResult]:
    """The results up to an error, and a result of the error."""
    results = []
    try:
        for result in run():
            results.append(result)
    except ConfigError as error:
        results.append(fail_of(check, error))
    except ModuleNotFoundError as error:
        remedy = "pip install 'triptych[worker]', where workers are to run"
        results.append(note(check, f"{error.name} is not installed: no more is known here", remedy))
    except Exception as error:
        remedy = "the check itself is broken: report it with this line"
        results.append(fail(check, f"{type(error).__name__}: {error}", remedy))
    return results
