"""The plan of a cluster on one machine: command lines, secrets, devices and cores of its processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from triptych.apps.launch.embedded_store import EmbeddedStore
from triptych.apps.launch.fork.client import ForkServer
from triptych.apps.launch.plan.cores import assign_cores, check_sharing, proxy_cores
from triptych.apps.launch.plan.devices import Share
from triptych.base.config import (
    ColocatedConfig,
    ProxyConfig,
    ScalingConfig,
    ServeConfig,
    WorkerConfig,
    WorkerRange,
    front_door_tls,
    with_tls_of,
)
from triptych.base.config.flags import Config, arguments, secrets_of
from triptych.base.machine.resources import cpu_quota, may_claim_cores, numa_nodes
from triptych.base.scaling import ScalingTarget

W = TypeVar("W", bound=WorkerConfig)


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The processes of a cluster on one machine: their command lines, their secrets, and how many there are.

    Secrets are passed apart, so that no command line and no environment of a process shows them.
    """

    #: Name and command line of each worker.
    workers: tuple[tuple[str, tuple[str, ...]], ...]
    worker_secrets: dict[str, str] = field(repr=False)
    proxy: tuple[str, ...]
    proxy_secrets: dict[str, str] = field(repr=False)
    #: Host and port of the proxy's HTTP, and whether it is HTTPS.
    proxy_address: tuple[str, int]
    proxy_tls: bool = field(default=False, kw_only=True)
    #: How many workers of each pool run at least.
    pools: dict[str, int]
    run_dir: Path
    store_url: str = field(repr=False)
    store: EmbeddedStore | None
    fork_server: tuple[str, ...] = ()
    #: How many workers there may be, where their number follows the work: by pool, or by role of PD workers.
    #: Those above the least start when there is work for them.
    scaled: Mapping[str, WorkerRange] = field(default_factory=dict)
    #: The targets of workers with a role, by the worker's name.
    targets: Mapping[str, str] = field(default_factory=dict)
    #: Address of the proxy's /metrics.
    proxy_metrics: str = ""

    def target(self, worker: str) -> str:
        """What the worker of this name counts for: its role's target, or its kind."""
        return self.targets.get(worker, worker.rpartition("-")[0])


def plan_cluster(
    config: ServeConfig, run_dir: Path, shares: Mapping[str, Share] = MappingProxyType({})
) -> ClusterPlan:
    """The processes of the cluster; `shares` are devices and memory of single workers, by name."""
    store = EmbeddedStore(run_dir, config.store_memory) if config.store == "auto" else None
    url = store.url if store is not None else config.store
    proxy = _proxy_config(config, url)
    return ClusterPlan(
        workers=tuple(
            (name, _command(config.counts.kinds[name], worker, config.model))
            for name, worker in _worker_configs(config, run_dir, shares).items()
        ),
        # Workers do not need the API keys of the proxy's clients.
        worker_secrets=secrets_of(replace(proxy, api_key="")),
        proxy=_command("proxy", proxy),
        proxy_secrets=secrets_of(proxy),
        proxy_metrics=_metrics_address(proxy),
        proxy_tls=front_door_tls(proxy) is not None,
        proxy_address=(proxy.host if proxy.host != "0.0.0.0" else "127.0.0.1", proxy.port),
        pools={pool: workers.minimum for pool, workers in config.pools.items()},
        scaled=config.scaled,
        targets={
            name: ScalingTarget("pd", role=config.role(int(name[3:]))).name
            for name, kind in config.counts.kinds.items()
            if kind == "pd" and config.roles
        },
        run_dir=run_dir,
        store_url=url,
        store=store,
        fork_server=_fork_server(config) if ForkServer.possible(config.pd.device) else (),
    )


def _metrics_address(proxy: ProxyConfig) -> str:
    host = (proxy.metrics_host if proxy.metrics_port else "") or proxy.host
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{proxy.metrics_port or proxy.port}"


def _proxy_config(config: ServeConfig, store: str) -> ProxyConfig:
    # Ranks are threads enough for several cores: none of them keeps to one.
    kept = config.cpu_sharing == "pace" and may_claim_cores() and config.ranks["pd"] == 1
    cpus = proxy_cores(os.sched_getaffinity(0), config.counts.pd_workers) if kept else ""
    return replace(
        config.proxy,
        store=store,
        store_memory=config.store_memory,
        cpus=cpus,
        scaling=scaling_config(config),
    )


def scaling_config(config: ServeConfig) -> ScalingConfig:
    """The proxy decides on the pools that are given as a range."""
    encoders, pd = config.pools["encoder"], config.pools["pd"]
    # Of roles all are targets where one is a range: the page then shows what there should be of the pool.
    roles = config.roles if pd.scaled else {}
    if roles:
        pd = WorkerRange.fixed(pd.maximum)
    return replace(
        config.proxy.scaling,
        min_encoders=encoders.minimum if encoders.scaled else 0,
        max_encoders=encoders.maximum if encoders.scaled else 0,
        min_pd_workers=pd.minimum if pd.scaled else 1,
        max_pd_workers=pd.maximum if pd.scaled else 0,
        scale=",".join(
            f"pd;role={role};min={workers.minimum};max={workers.maximum}" for role, workers in roles.items()
        ),
    )


def _worker_configs(
    config: ServeConfig, run_dir: Path, shares: Mapping[str, Share]
) -> dict[str, WorkerConfig | ColocatedConfig]:
    """The config of each worker, by name."""
    check_sharing(config)
    paced = config.cpu_sharing == "pace"
    page = str(run_dir / "cores") if paced else ""
    encoder = replace(config.encoder, threads=config.encoder_threads, core_page=page)
    pd = replace(
        config.pd, core_page=page, step_interval=config.step_interval if paced else 0.0, keep_core=paced
    )
    # A single replica keeps embeddings in its process; several, or ranks, share them through the store.
    alone = config.replicas == 1 and config.store == "auto" and config.pd.tensor_parallel == 1
    counts = config.counts
    cpus = assign_cores(
        os.sched_getaffinity(0),
        counts.workers,
        config.cpus_per_worker,
        quota=cpu_quota(),
        nodes=numa_nodes(),
    )
    workers: dict[str, WorkerConfig | ColocatedConfig] = {}
    for slot, (name, kind) in enumerate(counts.kinds.items()):
        place = _Place(config.proxy, cpus[slot], shares.get(name))
        if kind == "colocated":
            workers[name] = ColocatedConfig(
                place.of(config.encoder),
                place.of(config.pd),
                connector="memory" if alone else "redis",
                store_memory=config.store_memory,
            )
        else:
            one = replace(pd, role=config.role(int(name[3:]))) if kind == "pd" else encoder
            workers[name] = replace(place.of(one), core_slot=slot)
    return workers


@dataclass(frozen=True, slots=True)
class _Place:
    """The cores, device and memory of one worker, and what it has in common with the proxy."""

    proxy: ProxyConfig
    cpus: str
    share: Share | None

    def of(self, config: W) -> W:
        """The config of a worker in this place."""
        config = with_tls_of(config, self.proxy)
        config = replace(
            config,
            log_level=self.proxy.log_level,
            log_format=self.proxy.log_format,
            otlp_endpoint=self.proxy.otlp_endpoint,
            trace_sample=self.proxy.trace_sample,
            cpus=self.cpus,
        )
        if self.share is None:
            return config
        return replace(config, device=self.share.device, device_memory=self.share.nbytes)


def _command(service: str, config: Config, *args: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "triptych.apps.cli", service, *args, *arguments(config))


def _fork_server(config: ServeConfig) -> tuple[str, ...]:
    return (sys.executable, "-m", "triptych.apps.launch.fork.server", config.model, config.proxy.log_format)
