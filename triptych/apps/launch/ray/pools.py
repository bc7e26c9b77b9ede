"""The pools of a cluster on Ray: their actors, command lines and placement groups, and what each reserves."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from triptych.apps.launch.plan.cluster import scaling_config
from triptych.apps.launch.ray.flags import PROXY_PORT_STEP, check_flags
from triptych.base.config import (
    ColocatedConfig,
    ServeConfig,
    WorkerConfig,
    WorkerRange,
    is_loopback,
    parse_size,
    with_tls_of,
)
from triptych.base.config.flags import Config, arguments
from triptych.base.errors import ConfigError
from triptych.base.scaling import ScalingTarget

W = TypeVar("W", bound=WorkerConfig)

#: Flags that workers have in common with the proxy.
_OF_PROXY = (
    *("internal_token_file", "store_password_file", "store_ca_file", "store_cert_file", "store_key_file"),
    *("log_level", "log_format", "otlp_endpoint", "trace_sample"),
)
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
#: Below the ports that Linux gives to outgoing connections, above those that Ray's own workers take.
PORTS = (20000, 29999)
#: Resources of Ray that have a key of their own.
_NAMED = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory", "object_store_memory": "memory"}
_KEYS = ("num_cpus", "num_gpus", "memory", "resources", "strategy", "ports")


@dataclass(frozen=True, slots=True)
class PoolResources:
    """What one worker of a pool takes of a node, and how the pool is laid out.

    `memory` 0: none is reserved. `strategy` is that of the placement group of the workers that the pool
    always has. A worker's port is in `ports`, both ends included.
    """

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    memory: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    strategy: str = "PACK"
    ports: tuple[int, int] = PORTS

    @property
    def bundle(self) -> dict[str, float]:
        """The bundle of a placement group that holds one worker."""
        named = {"CPU": self.num_cpus, "GPU": self.num_gpus, "memory": float(self.memory)}
        return {name: number for name, number in {**named, **self.resources}.items() if number}


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
    #: That of its PD workers; "": they do all.
    role: str = ""

    @property
    def target(self) -> str:
        """What their number is decided for: the pool, or a role in it."""
        return ScalingTarget("pd", role=self.role).name if self.role else self.name

    def names(self, count: int) -> list[str]:
        """The first `count` actors."""
        return [f"{self.name}-{index}" for index in range(count)]

    def command_of(self, name: str) -> list[str]:
        """The command line of one actor's service; of options that are given twice the later one counts."""
        if self.role:
            return [*self.command, "--role", self.role]
        if not self.port:
            return list(self.command)
        step = PROXY_PORT_STEP * index_of(name)
        return [*self.command, "--port", str(self.port + step), "--grpc-port", str(self.grpc_port + step)]

    def port_of(self, name: str) -> int:
        """The port of the actor's service; 0: it finds one itself."""
        return self.port + PROXY_PORT_STEP * index_of(name) if self.port else 0

    def group(self, name: str) -> str:
        """The placement group of an actor: that of the pool's least, or one of its own."""
        return self.name if index_of(name) < self.size.minimum else name

    def bundle_index(self, name: str) -> int:
        """The actor's bundle in its placement group."""
        return index_of(name) if index_of(name) < self.size.minimum else 0

    def bundles(self, group: str) -> list[dict[str, float]]:
        """The bundles of a placement group."""
        return [self.resources.bundle] * (self.size.minimum if group == self.name else 1)


def index_of(name: str) -> int:
    """3 of encoder-3."""
    return int(name.rpartition("-")[2])


def pool_of(name: str) -> str:
    """encoder of encoder-3."""
    return name.rpartition("-")[0]


def plan_actors(config: ServeConfig, *, model: str, store: str, home: str) -> dict[str, ActorPool]:
    """The pools of the cluster by name, workers first.

    `model` and `store` are as the actors' nodes know them, neither holding a secret; `home` is this node's
    IP address, on which a proxy of 127.0.0.1 stands. ConfigError for what cannot be meant on Ray.
    """
    check_flags(config)
    colocated = config.topology == "colocated"
    kinds = ("colocated",) if colocated else ("encoder", "pd")
    devices = dict.fromkeys(kinds, config.pd.device) | {"proxy": ""}
    resources = read_resources(config.ray.ray_resources, devices, config.ranks)
    sizes = {"colocated": config.pools["encoder"]} if colocated else config.pools
    pools = {}
    for kind in kinds:
        worker = _worker(config, kind, resources[kind], store)
        args = (kind, *([model] if model else []), *arguments(worker), "--store", store)
        roles = config.roles if kind == "pd" else {}
        for role, size in roles.items():
            name = f"{kind}-{role}"
            pools[name] = ActorPool(name, args, size, resources[kind], role=role)
        if not roles:
            pools[kind] = ActorPool(kind, args, _at_least_one(sizes[kind]), resources[kind])
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
    return size if size.maximum else WorkerRange.fixed(1)


def _pinned(resources: PoolResources, home: str) -> PoolResources:
    """On the node with this IP address only: every node of Ray has a resource of that name."""
    return replace(resources, resources={**resources.resources, f"node:{home}": 0.001})


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
            threads=threads or max(1, int(resources.num_cpus)),
            device_memory=worker.device_memory or measured,
            **{name: getattr(config.proxy, name) for name in _OF_PROXY},
        )

    encoder = placed(config.encoder, config.encoder_threads or config.encoder.threads)
    pd = replace(placed(config.pd, config.pd.threads), step_interval=0.0)
    if kind == "colocated":
        return ColocatedConfig(encoder, pd, connector="redis", store_memory=config.store_memory)
    return encoder if kind == "encoder" else pd


def read_resources(
    path: str, pools: Mapping[str, str], ranks: Mapping[str, int] = MappingProxyType({})
) -> dict[str, PoolResources]:
    """The resources of each pool, by name; `pools` are their devices, "" where there is none.

    `ranks` are the processes of one worker, 1 where it says nothing: all of them in one bundle, and so on one
    node, with a GPU each, or a core each where the file names no other number. A pool that the file leaves
    out has the defaults. ConfigError for what cannot be read or cannot be meant.
    """
    tables = _tables(path) if path else {}
    for name in tables:
        if name not in pools:
            raise ConfigError(f"--ray-resources {path}: [{name}] is no pool of this cluster: {_list(pools)}")
    return {
        name: _pool(path, name, tables.get(name, {}), device, ranks.get(name, 1))
        for name, device in pools.items()
    }


def _tables(path: str) -> dict[str, dict[str, object]]:
    try:
        read = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--ray-resources {path} cannot be read ({type(error).__name__})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--ray-resources {path} is not valid TOML: {error}") from None
    for name, table in read.items():
        if not isinstance(table, dict):
            raise ConfigError(f"--ray-resources {path}: {name} stands in no table: write [encoder] above it")
    return read


def _pool(path: str, name: str, table: Mapping[str, object], device: str, ranks: int) -> PoolResources:
    where = f"--ray-resources {path}: [{name}]"
    for key in table:
        if key not in _KEYS:
            raise ConfigError(f"{where} has {key}, which is none of {_list(_KEYS)}")
    cuda = device.startswith("cuda")
    # A proxy or a worker that shares cores may reserve none; a bundle must hold something.
    read = PoolResources(
        num_cpus=_number(where, "num_cpus", table.get("num_cpus", ranks)),
        num_gpus=_number(where, "num_gpus", table.get("num_gpus", ranks if cuda else 0)),
        memory=_memory(where, table.get("memory", 0)),
        resources=_custom(where, table.get("resources", {})),
        strategy=_strategy(where, table.get("strategy", "PACK")),
        ports=_ports(where, table.get("ports", "{}-{}".format(*PORTS))),
    )
    _check_gpus(where, read.num_gpus, device, ranks)
    if not read.bundle:
        raise ConfigError(f"{where} reserves nothing: a worker takes some of num_cpus at least, like 0.1")
    return read


def _check_gpus(where: str, gpus: float, device: str, ranks: int) -> None:
    if device.startswith("cuda") and not gpus:
        raise ConfigError(f"{where} num_gpus = 0 and --device {device}: reserve one, or say --device cpu")
    if gpus and not device.startswith("cuda"):
        raise ConfigError(
            f"{where} num_gpus = {gpus:g} is used by nothing: say --device cuda, or leave it out"
        )
    if device.startswith("cuda") and ranks > 1 and gpus != ranks:
        raise ConfigError(
            f"{where} num_gpus = {gpus:g}: each of a worker's {ranks} ranks uses a GPU of its own; reserve "
            f"{ranks}, or leave it out"
        )
    if gpus > 1 and ranks == 1:
        raise ConfigError(f"{where} num_gpus = {gpus:g}: a worker uses one GPU; reserve 1 or a part of one")


def _number(where: str, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1 << 20:
        raise ConfigError(f"{where} {key} = {value!r}: write a number, like {key} = 1")
    if value > 1 and value != int(value):
        raise ConfigError(f"{where} {key} = {value:g}: above 1, Ray reserves whole numbers")
    # Ray counts in ten-thousandths.
    if 0 < value < 0.0001:
        raise ConfigError(f"{where} {key} = {value:g}: Ray reserves 0.0001 at least")
    return float(value)


def _memory(where: str, value: object) -> int:
    if isinstance(value, str):
        try:
            return parse_size(value)
        except ConfigError as error:
            raise ConfigError(f"{where} memory: {error}") from None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f'{where} memory = {value!r}: write a size, like memory = "16GiB"')
    return value


def _custom(where: str, value: object) -> dict[str, float]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} resources: write a table, like resources = {{ l4 = 1 }}")
    for name in value:
        if name in _NAMED:
            raise ConfigError(f"{where} resources: {name} is written {_NAMED[name]}, outside of resources")
    return {name: _number(where, f"resources.{name}", number) for name, number in value.items()}


def _strategy(where: str, value: object) -> str:
    if value not in STRATEGIES:
        raise ConfigError(f"{where} strategy = {value!r}: it is one of {_list(STRATEGIES)}")
    return str(value)


def _ports(where: str, value: object) -> tuple[int, int]:
    first, _, last = str(value).partition("-")
    if not (first.isdecimal() and last.isdecimal() and 1024 <= int(first) <= int(last) <= 65535):
        raise ConfigError(f'{where} ports = {value!r}: write a range from 1024 to 65535, like "20000-20999"')
    return int(first), int(last)


def _list(names: Mapping[str, object] | tuple[str, ...]) -> str:
    return ", ".join(names)
