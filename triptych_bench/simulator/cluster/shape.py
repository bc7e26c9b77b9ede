"""The shape of a simulated cluster, and the limits that its services are started with."""

from __future__ import annotations

from dataclasses import dataclass, field

from triptych.base.config import GIB, MIB, EncoderConfig, PDConfig, ProxyConfig
from triptych.base.errors import ConfigError
from triptych.registry.matching import BOTH, DECODE, PREFILL
from triptych_bench.simulator.costs.costs import EncoderCosts

#: KV memory of a PD worker without --kv-memory: what `auto` finds depends on the machine.
KV_MEMORY = 512 * MIB
#: Threads that decode media without --decode-threads: `auto` follows the machine's cores.
DECODE_THREADS = 2


@dataclass(frozen=True, slots=True)
class WorkerRole:
    """What one worker does: it `encodes`, `decodes`, or both in turn. Each worker has a device of its own.

    `encoder`: costs of an encoder on another device than the cost model's. `pd_role`: of a PD worker, as
    --role.
    """

    encodes: bool = False
    decodes: bool = False
    encoder: EncoderCosts | None = None
    pd_role: str = BOTH


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """The workers of a cluster. `in_memory`: embeddings stay in the one process that makes and uses them.

    `in_step`: replicas run the tower inside their engine's step, and keep what they encoded to themselves.
    """

    name: str
    workers: tuple[WorkerRole, ...]
    in_memory: bool = False
    in_step: bool = False

    def __post_init__(self) -> None:
        if not any(worker.decodes for worker in self.workers):
            raise ConfigError(f"shape {self.name} has no PD worker: add one, only PD workers answer")

    @property
    def encoders(self) -> int:
        return sum(worker.encodes for worker in self.workers)

    @property
    def pd_workers(self) -> int:
        return sum(worker.decodes for worker in self.workers)

    @property
    def prefill_workers(self) -> int:
        """Those of the PD workers that hand requests over once their prompts are computed."""
        return sum(worker.pd_role == PREFILL for worker in self.workers)


def on_devices(
    encoders: int, pd_workers: int, encoder: EncoderCosts | None = None, *, prefill: int = 0
) -> ClusterShape:
    """Encoders and PD workers, every one on a device of its own; `encoder`: costs of the encoders' kind.

    `prefill` of the PD workers are prefill workers, and all others decode workers then.
    """
    workers = (WorkerRole(encodes=True, encoder=encoder),) * encoders
    if not prefill:
        workers += (WorkerRole(decodes=True),) * pd_workers
        return ClusterShape(f"{encoders}E{pd_workers}PD", workers)
    if prefill >= pd_workers:
        raise ConfigError(f"{prefill} of {pd_workers} PD workers are for prefill: leave one to decode")
    decode = pd_workers - prefill
    workers += (WorkerRole(decodes=True, pd_role=PREFILL),) * prefill
    workers += (WorkerRole(decodes=True, pd_role=DECODE),) * decode
    return ClusterShape(f"{encoders}E{prefill}P{decode}D", workers)


def colocated(replicas: int) -> ClusterShape:
    """Replicas on a device each, used by tower and decoder in turn. A single one stores nothing."""
    workers = (WorkerRole(encodes=True, decodes=True),) * replicas
    return ClusterShape(f"{replicas} colocated", workers, in_memory=replicas == 1)


def in_step(replicas: int) -> ClusterShape:
    """Replicas as vLLM's: the step that prefills a picture encodes it first, and all sequences wait."""
    workers = (WorkerRole(encodes=True, decodes=True),) * replicas
    return ClusterShape(f"{replicas} in-step", workers, in_memory=True, in_step=True)


@dataclass(frozen=True, slots=True)
class Limits:
    """The services' flags by their own names, the store's bytes, and the client's timeout in seconds.

    `affinity`: pictures are a message of their own, so that the router keeps equal ones on one PD worker.
    `kv_bandwidth`: bytes per second at which KV goes from prefill to decode workers; 0: by the store, at the
    costs of embeddings.
    """

    proxy: ProxyConfig = field(default_factory=ProxyConfig)
    encoder: EncoderConfig = field(default_factory=lambda: EncoderConfig(device="cuda"))
    pd: PDConfig = field(default_factory=lambda: PDConfig(kv_memory=KV_MEMORY))
    store_memory: int = GIB
    client_timeout: float = 120.0
    affinity: bool = False
    kv_bandwidth: float = 0.0

    @property
    def decode_threads(self) -> int:
        """Threads of one encoder worker that decode media."""
        return self.encoder.decode_threads or DECODE_THREADS
