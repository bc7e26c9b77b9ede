"""What a cluster consists of: hosts, and workers that stand on them. A place for every arrangement."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from triptych.config import GIB, MIB, EncoderConfig, PDConfig, ProxyConfig
from triptych.errors import ConfigError

#: A machine that is never short of cores: CPU work beside accelerators.
AMPLE = "ample"
#: KV memory of a PD worker where nobody says: what `auto` finds is a matter of the machine.
KV_MEMORY = 512 * MIB


@dataclass(frozen=True, slots=True)
class Place:
    """Work of one kind on one host: how many threads it has, and its weight against others' there."""

    host: str
    threads: float = 1.0
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """A worker: `encodes`, `decodes`, or both in turn on `device`; other work of its is on `cpu`.

    `step_interval` above 0: a decoder begins its steps so many seconds apart while towers lack cores.
    `own_core`: what its steps take of their costs while it has a core for itself, which with a
    `step_interval` is while no other worker computes.
    """

    device: Place
    cpu: Place
    encodes: bool = False
    decodes: bool = False
    step_interval: float = 0.0
    own_core: float = 1.0


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """`hosts` are cores by name. `in_memory`: embeddings stay in the one process that makes and uses them.
    `client_beside_proxy`: whoever asks computes on the proxy's host too, as a load generator does.
    """

    name: str
    hosts: dict[str, float]
    workers: tuple[WorkerPlace, ...]
    proxy: Place
    in_memory: bool = False
    client_beside_proxy: bool = False

    def __post_init__(self) -> None:
        places = [self.proxy, *(place for w in self.workers for place in (w.device, w.cpu))]
        unknown = {place.host for place in places} - set(self.hosts)
        if unknown:
            raise ConfigError(f"shape {self.name}: there is no host {', '.join(sorted(unknown))}")
        if not any(worker.decodes for worker in self.workers):
            raise ConfigError(f"shape {self.name} has no PD worker: nobody could answer")

    @property
    def encoders(self) -> int:
        return sum(worker.encodes for worker in self.workers)

    @property
    def pd_workers(self) -> int:
        return sum(worker.decodes for worker in self.workers)


def on_devices(encoders: int, pd_workers: int) -> ClusterShape:
    """Every worker has an accelerator of its own; nothing else is short."""
    hosts, workers = {AMPLE: math.inf}, []
    for name, count, encodes in (("encoder", encoders, True), ("pd", pd_workers, False)):
        for index in range(count):
            hosts[f"{name}-{index}"] = 1.0
            place = WorkerPlace(Place(f"{name}-{index}"), Place(AMPLE), encodes, not encodes)
            workers.append(place)
    return ClusterShape(f"{encoders}E{pd_workers}PD", hosts, tuple(workers), Place(AMPLE))


def colocated(replicas: int) -> ClusterShape:
    """Replicas on an accelerator each, used by tower and decoder in turn. One alone saves nothing."""
    hosts = {AMPLE: math.inf} | {f"replica-{index}": 1.0 for index in range(replicas)}
    workers = tuple(
        WorkerPlace(Place(f"replica-{index}"), Place(AMPLE), True, True) for index in range(replicas)
    )
    return ClusterShape(f"{replicas} colocated", hosts, workers, Place(AMPLE), in_memory=replicas == 1)


def pinned(
    encoders: int, pd_workers: int, *, cores: float = 1.0, proxy: str = "encoder-0", own_core: float = 1.0
) -> ClusterShape:
    """One machine: every worker has `cores` of its own for all its work; proxy and client on `proxy`'s."""
    hosts, workers = {}, []
    for name, count, encodes in (("encoder", encoders, True), ("pd", pd_workers, False)):
        for index in range(count):
            host = f"{name}-{index}"
            hosts[host] = cores
            place = Place(host, cores), Place(host)
            workers.append(WorkerPlace(*place, encodes, not encodes, own_core=own_core))
    name = f"{encoders}E{pd_workers}PD pinned"
    return ClusterShape(name, hosts, tuple(workers), Place(proxy), client_beside_proxy=True)


def shared(
    encoders: int,
    pd_workers: int,
    *,
    cores: float,
    encoder_threads: float = 1.0,
    pd_threads: float = 1.0,
    pd_weight: float = 1.0,
    encoder_weight: float = 1.0,
    step_interval: float = 0.0,
    own_core: float = 1.0,
) -> ClusterShape:
    """One machine: all share all cores; decoders with `pd_weight` times the weight of all others.

    Towers and preprocessing have `encoder_weight`; steps are `step_interval` seconds apart while towers lack
    cores.
    """
    tower = Place("machine", encoder_threads, encoder_weight)
    encoder = WorkerPlace(tower, Place("machine", 1.0, encoder_weight), encodes=True)
    step, cpu = Place("machine", pd_threads, pd_weight), Place("machine", 1.0, pd_weight)
    pd = WorkerPlace(step, cpu, decodes=True, step_interval=step_interval, own_core=own_core)
    workers = (encoder,) * encoders + (pd,) * pd_workers
    name = f"{encoders}E{pd_workers}PD shared"
    return ClusterShape(name, {"machine": cores}, workers, Place("machine"), client_beside_proxy=True)


def paced(
    encoders: int,
    pd_workers: int,
    *,
    cores: float,
    pd_threads: float = 1.0,
    nice_weight: float = 1.0,
    own_core: float = 1.0,
) -> ClusterShape:
    """What `triptych serve` does on a CPU: towers of one thread, at a niceness that weighs `nice_weight`, and
    steps that keep their interval while towers lack cores, and have a core to themselves while none computes.
    """
    return shared(
        encoders,
        pd_workers,
        cores=cores,
        pd_threads=pd_threads,
        encoder_weight=nice_weight,
        step_interval=PDConfig().step_interval,
        own_core=own_core,
    )


def colocated_on_cores(
    replicas: int, *, cores: float, threads: float = 1.0, in_memory: bool | None = None
) -> ClusterShape:
    """One machine: replicas of `threads` threads share all cores; in each, tower and decoder take turns."""
    worker = WorkerPlace(Place("machine", threads), Place("machine"), True, True)
    name = f"{replicas} colocated on {cores:g} cores"
    alone = replicas == 1 if in_memory is None else in_memory
    workers = (worker,) * replicas
    machine = {"machine": cores}
    return ClusterShape(name, machine, workers, Place("machine"), alone, client_beside_proxy=True)


@dataclass(frozen=True, slots=True)
class Limits:
    """The flags of the services, by their own names, the store's bytes, and the client's patience in seconds.

    `jumps`: runs of decode steps in which nothing can change are taken at once; the records are the same.
    """

    proxy: ProxyConfig = field(default_factory=ProxyConfig)
    encoder: EncoderConfig = field(default_factory=lambda: EncoderConfig(device="cuda"))
    pd: PDConfig = field(default_factory=lambda: PDConfig(kv_memory=KV_MEMORY))
    store_memory: int = GIB
    client_timeout: float = 120.0
    jumps: bool = True
