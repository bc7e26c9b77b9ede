"""A cluster of one shape in virtual time, wired: store, workers, proxy."""

from __future__ import annotations

from collections.abc import Callable

from triptych.simulator.cluster.clock import Clock
from triptych.simulator.cluster.encoder import SimulatedEncoder
from triptych.simulator.cluster.fifo_lock import FifoLock
from triptych.simulator.cluster.flow import Flow
from triptych.simulator.cluster.pd import SimulatedPD
from triptych.simulator.cluster.proxy import SimulatedProxy
from triptych.simulator.cluster.shape import ClusterShape, Limits, WorkerRole
from triptych.simulator.cluster.store import SimulatedStore
from triptych.simulator.costs.costs import CostModel, ModelShape


class Cluster:
    """Everything of one simulation. `ended` is called once for every request, with its error or nothing."""

    def __init__(
        self,
        clock: Clock,
        shape: ClusterShape,
        costs: CostModel,
        model: ModelShape,
        limits: Limits,
        ended: Callable[[Flow, str], None],
    ) -> None:
        self.clock = clock
        self.store = SimulatedStore(limits.store_memory)
        self._shape = shape
        self._costs = costs
        self._model = model
        self._limits = limits
        self.encoders: list[SimulatedEncoder] = []
        self.workers: list[SimulatedPD] = []
        for role in shape.workers:
            self._add(role)
        self.proxy = SimulatedProxy(clock, costs, limits, self.store, self.encoders, self.workers, ended)

    def _add(self, role: WorkerRole) -> None:
        """Both sides of one worker share its device."""
        device, rpc, in_memory = FifoLock(), self._costs.rpc, self._shape.in_memory
        if role.encodes:
            encoder = SimulatedEncoder(
                self.clock,
                self._costs.encoder,
                self._limits.encoder,
                self.store,
                device,
                rpc=rpc,
                in_memory=in_memory,
            )
            self.encoders.append(encoder)
        if role.decodes:
            worker = SimulatedPD(
                self.clock,
                self._costs.pd,
                self._limits.pd,
                self._model.kv_token_bytes,
                self.store,
                device,
                rpc=rpc,
                in_memory=in_memory,
                jumps=self._limits.jumps,
            )
            self.workers.append(worker)

    def leftovers(self) -> dict[str, int]:
        """What is held though no request is left; all zero when nothing leaks."""
        return {
            "requests": self.proxy.in_flight + self.proxy.router.in_flight,
            "jobs": len(self.proxy.jobs.table) + sum(len(encoder) for encoder in self.encoders),
            "published bytes": self.proxy.jobs.table.published_bytes,
            "scheduled items": sum(len(encoder.scheduler) for encoder in self.encoders),
            "saves": sum(encoder.counts.saving_bytes for encoder in self.encoders),
            "blocks": sum(worker.kv.num_used for worker in self.workers),
            "references": sum(worker.cache.references for worker in self.workers),
            "reserved bytes": sum(worker.admission.reserved for worker in self.workers),
            "loads": sum(worker.loads.held + len(worker.connector.table) for worker in self.workers),
            "engine requests": sum(worker.held for worker in self.workers),
        }
