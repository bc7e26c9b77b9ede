"""The actors of a cluster on Ray: their names, command lines, resources and placement groups."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TypeVar

from triptych.config import ColocatedConfig, ServeConfig, WorkerConfig, WorkerRange, is_loopback, with_tls_of
from triptych.config.flags import Config, arguments
from triptych.errors import ConfigError
from triptych.launch.plan.cluster import scaling_config
from triptych.launch.ray.resources import PoolResources, read_resources

W = TypeVar("W", bound=WorkerConfig)

#: Between the ports of proxy-0 and proxy-1.
PROXY_PORT_STEP = 10
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class ActorPool:
    """The actors of one kind: `name`-0, `name`-1 and so on. `command` starts the service of each of them.

    `port` is that of the first one; 0: each finds a free one among those of its resources.
    """

    name: str
    command: tuple[str, ...]
    size: WorkerRange
    resources: PoolResources
    port: int = 0
    grpc_port: int = 0

    def names(self, count: int) -> list[str]:
        """The first `count` actors."""
        return [f"{self.name}-{index}" for index in range(count)]

    def words(self, name: str) -> list[str]:
        """The command line of one actor's service; of options that are given twice the later one counts."""
        if not self.port:
            return list(self.command)
        step = PROXY_PORT_STEP * index_of(name)
        return [*self.command, "--port", str(self.port + step), "--grpc-port", str(self.grpc_port + step)]

    def port_of(self, name: str) -> int:
        """The port of the actor's service; 0: it finds one itself."""
        return self.port + PROXY_PORT_STEP * index_of(name) if self.port else 0

    def group(self, name: str) -> str:
        """The placement group of an actor: that of the pool's least, or one of its own."""
        return self.name if index_of(name) < self.size.least else name

    def bundle_index(self, name: str) -> int:
        """The actor's bundle in its placement group."""
        return index_of(name) if index_of(name) < self.size.least else 0

    def bundles(self, group: str) -> list[dict[str, float]]:
        """The bundles of a placement group."""
        return [self.resources.bundle] * (self.size.least if group == self.name else 1)


def index_of(name: str) -> int:
    """3 of encoder-3."""
    return int(name.rpartition("-")[2])


def pool_of(name: str) -> str:
    """encoder of encoder-3."""
    return name.rpartition("-")[0]


def check_cluster_name(name: str) -> None:
    """ConfigError for a name that Ray's namespaces and people could mistake."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--cluster-name {name[:60]!r}: write 1 to 40 of a-z, 0-9 and -, not beginning or ending with -"
        )


def plan_actors(config: ServeConfig, *, model: str, store: str, home: str) -> dict[str, ActorPool]:
    """The pools of the cluster by name, workers first.

    `model` and `store` are as the actors' nodes know them, neither holding a secret; `home` is this node's
    IP address, on which a proxy of 127.0.0.1 stands. ConfigError for what cannot be meant on Ray.
    """
    _check_flags(config)
    colocated = config.topology == "colocated"
    kinds = ("colocated",) if colocated else ("encoder", "pd")
    devices = dict.fromkeys(kinds, config.pd.device) | {"proxy": ""}
    resources = read_resources(config.ray.ray_resources, devices, config.ranks)
    sizes = {"colocated": config.pools["encoder"]} if colocated else config.pools
    pools = {}
    for kind in kinds:
        worker = _worker(config, kind, resources[kind], store)
        words = (kind, *([model] if model else []), *arguments(worker), "--store", store)
        pools[kind] = ActorPool(kind, words, _at_least_one(sizes[kind]), resources[kind])
    own_store = config.store_memory if config.store == "auto" else 0
    proxy = replace(config.proxy, store_memory=own_store, scaling=scaling_config(config))
    pools["proxy"] = ActorPool(
        "proxy",
        ("proxy", *arguments(proxy), "--store", store),
        WorkerRange.fixed(config.ray.proxies),
        _pinned(resources["proxy"], home) if is_loopback(config.proxy.host) else resources["proxy"],
        port=config.proxy.port,
        grpc_port=config.proxy.grpc_port,
    )
    return pools


def _at_least_one(size: WorkerRange) -> WorkerRange:
    """The size, where the flag leaves it open one worker."""
    return size if size.most else WorkerRange.fixed(1)


def _pinned(resources: PoolResources, home: str) -> PoolResources:
    """On the node with this IP address only: every node of Ray has a resource of that name."""
    return replace(resources, resources={**resources.resources, f"node:{home}": 0.001})


def _check_flags(config: ServeConfig) -> None:
    check_cluster_name(config.ray.cluster_name)
    device = config.pd.device
    if device.startswith("cuda:"):
        raise ConfigError(f"--device {device}: Ray gives each worker its GPU; say --device cuda")
    if config.cpu_sharing == "pace" or config.cpus_per_worker:
        flag = "--cpus-per-worker" if config.cpus_per_worker else "--cpu-sharing pace"
        raise ConfigError(f"{flag} is for --launcher local; on Ray num_cpus in --ray-resources counts")
    if not config.proxy.port or not config.proxy.grpc_port:
        raise ConfigError(
            "--port 0 and --grpc-port 0 are for --launcher local: on Ray name the proxies' ports"
        )
    gap = abs(config.proxy.port - config.proxy.grpc_port)
    if config.ray.proxies > 1 and gap % PROXY_PORT_STEP == 0 and gap // PROXY_PORT_STEP < config.ray.proxies:
        raise ConfigError(
            f"--proxies {config.ray.proxies}: --port and --grpc-port are {gap} apart, so two proxies would "
            f"meet on one port; choose them so that {PROXY_PORT_STEP} does not divide their distance"
        )


def _worker(config: ServeConfig, kind: str, resources: PoolResources, store: str) -> Config:
    """The config of a pool's workers, but for what the actor itself finds: host, port, advertised address."""
    if 0 < resources.num_gpus < 1 and not config.pd.device_memory:
        raise ConfigError(
            f"[{kind}] num_gpus = {resources.num_gpus:g}: give --device-memory, or each of the workers on a "
            "GPU would take most of it"
        )

    def placed(worker: W, threads: int) -> W:
        measured = resources.memory if worker.device == "cpu" else 0
        return replace(
            with_tls_of(worker, config.proxy),
            # A Ray of our own is one machine, though its workers listen at the machine's address.
            insecure=config.proxy.insecure or not config.ray.address,
            threads=threads or max(1, int(resources.num_cpus)),
            device_memory=worker.device_memory or measured,
            internal_token_file=config.proxy.internal_token_file,
            store_password_file=config.proxy.store_password_file,
            store_ca_file=config.proxy.store_ca_file,
            store_cert_file=config.proxy.store_cert_file,
            store_key_file=config.proxy.store_key_file,
            log_level=config.proxy.log_level,
            log_format=config.proxy.log_format,
            otlp_endpoint=config.proxy.otlp_endpoint,
            trace_sample=config.proxy.trace_sample,
        )

    encoder = placed(config.encoder, config.encoder_threads or config.encoder.threads)
    pd = replace(placed(config.pd, config.pd.threads), step_interval=0.0)
    if kind == "colocated":
        return ColocatedConfig(encoder, pd, connector="redis", store_memory=config.store_memory)
    return encoder if kind == "encoder" else pd
