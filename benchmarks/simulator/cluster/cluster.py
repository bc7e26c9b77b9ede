"""A cluster of one shape in virtual time, wired: hosts, store, workers, proxy."""

from __future__ import annotations

from collections.abc import Callable

from triptych.simulator.cluster.clock import Clock
from triptych.simulator.cluster.cores import SharedCores
from triptych.simulator.cluster.encoder import SimulatedEncoder
from triptych.simulator.cluster.flow import Flow
from triptych.simulator.cluster.hops import Hops
from triptych.simulator.cluster.pd import SimulatedPD
from triptych.simulator.cluster.processors import Host, Turn
from triptych.simulator.cluster.proxy import SimulatedProxy
from triptych.simulator.cluster.shape import ClusterShape, Limits, WorkerPlace
from triptych.simulator.cluster.store import SimulatedStore
from triptych.simulator.costs.costs import ClientCosts, CostModel, ModelShape


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
        self.shape = shape
        self._costs = costs
        self._model = model
        self._limits = limits
        self.hosts = {name: Host(clock, cores, name) for name, cores in shape.hosts.items()}
        self.store = SimulatedStore(limits.store_memory)
        self._hops = Hops(clock, costs.rpc, costs.cores.wake, self.hosts[shape.proxy.host])
        self._cores = {name: SharedCores(host.cores) for name, host in self.hosts.items()}
        self.encoders: list[SimulatedEncoder] = []
        self.workers: list[SimulatedPD] = []
        for place in shape.workers:
            self._add(place)
        self.proxy = SimulatedProxy(
            clock,
            costs,
            limits,
            self.store,
            self.encoders,
            self.workers,
            self.hosts[shape.proxy.host],
            shape.proxy,
            ended,
            self._hops,
            self._client(shape),
        )

    def _client(self, shape: ClusterShape) -> ClientCosts:
        """What the client's work costs the proxy's host; nothing where it is elsewhere."""
        return self._costs.client if shape.client_beside_proxy else ClientCosts()

    def _add(self, place: WorkerPlace) -> None:
        """Both sides of one worker share its device's turn."""
        turn = Turn(self.clock)
        device, cpu = self.hosts[place.device.host], self.hosts[place.cpu.host]
        hops, in_memory = self._hops, self.shape.in_memory
        if place.encodes:
            encoder = SimulatedEncoder(
                self.clock,
                self._costs.encoder,
                self._limits.encoder,
                self.store,
                place,
                device,
                cpu,
                turn,
                hops=hops,
                in_memory=in_memory,
                cores=self._cores[place.device.host],
            )
            self.encoders.append(encoder)
        if place.decodes:
            worker = SimulatedPD(
                self.clock,
                self._costs.pd,
                self._limits.pd,
                self._model.kv_token_bytes,
                self.store,
                place,
                device,
                cpu,
                turn,
                hops=hops,
                in_memory=in_memory,
                jumps=self._limits.jumps,
                cores=self._cores[place.device.host],
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
