"""Command lines of rendered containers, as the code's own options read them."""

from __future__ import annotations

from typing import Any

from support.kubernetes.chart import Manifest
from support.kubernetes.manifests import component, main_container, pod, workloads
from support.options import parse
from triptych.base.config import (
    ColocatedConfig,
    EncoderConfig,
    PDConfig,
    ProxyConfig,
    check_advertise,
    check_drain_timeout,
    check_front_door,
    check_scaling,
)
from triptych.base.config.flags import Config
from triptych.base.config.tls import check_front_encryption, check_worker_encryption
from triptych.store.topology.location import has_password, parse_store

CONFIGS: dict[str, type[Config]] = {
    "proxy": ProxyConfig,
    "encoder": EncoderConfig,
    "pd": PDConfig,
    "colocated": ColocatedConfig,
}
SERVICES = tuple(CONFIGS)


def services(manifests: list[Manifest]) -> list[Manifest]:
    """The workloads that run a command of ours."""
    return [one for one in workloads(manifests) if component(one) in SERVICES]


def words(manifest: Manifest) -> list[str]:
    """The words after `triptych`, with the pod's address in them."""
    given: list[str] = main_container(manifest)["args"]
    return [word.replace("[$(POD_IP)]", "[fd00::3]").replace("$(POD_IP)", "10.1.2.3") for word in given]


def config_of(manifest: Manifest) -> Any:
    """The config that the container's command line gives; click.UsageError for one that the code refuses."""
    command, *rest = words(manifest)
    return parse(CONFIGS[command], command, *rest)


def check_command(manifest: Manifest) -> None:
    """The code takes the command line, and what it means is what the pod offers."""
    container = main_container(manifest)
    assert container["command"] == ["triptych"]
    assert words(manifest)[0] == component(manifest)
    config = config_of(manifest)
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    if component(manifest) == "proxy":
        check_proxy(config, ports)
        check_secrets(config, manifest)
    else:
        worker = config.pd if component(manifest) == "colocated" else config
        address = {"0.0.0.0": "10.1.2.3", "::": "[fd00::3]"}[worker.host]
        assert worker.port == ports.pop("grpc")
        assert worker.advertise == f"{address}:{worker.port}"
        check_advertise(worker.advertise)
        check_worker_encryption(worker.host, worker)
        assert worker.metrics_port == ports.pop("metrics")
        check_secrets(worker, manifest)
        if component(manifest) != "pd":
            serving = config.encoder if component(manifest) == "colocated" else config
            assert serving.ec_transfer_port == ports.pop("embeddings")
        assert ports == {}


def check_proxy(config: ProxyConfig, ports: dict[str, int]) -> None:
    check_front_door(config.host, api_key=config.api_key, api_key_file=config.api_key_file, auth=config.auth)
    check_front_encryption(config)
    check_scaling(config.scaling)
    assert config.port == ports.pop("http")
    assert config.grpc_port == ports.pop("grpc")
    assert config.metrics_port == ports.pop("metrics")
    assert config.scaling.scaler_port == ports.pop("scaler", 0)
    assert ports == {}


def check_secrets(config: Any, manifest: Manifest) -> None:
    """Secrets come from files that are mounted, and the drain ends before the kubelet kills."""
    assert not config.internal_token
    assert config.internal_token_file
    if config.store:
        assert parse_store(config.store)
        assert not has_password(config.store)
    check_drain_timeout(config.drain_timeout)
    pause = int(
        main_container(manifest).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    )
    assert pause + config.drain_timeout + 15 <= pod(manifest)["terminationGracePeriodSeconds"]
