"""A cluster of one shape in virtual time, wired: store, workers, proxy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace

from triptych.base.types import WorkerInfo
from triptych.proxy.pd.router import KEEPS_ITEMS
from triptych.proxy.workers import KnownWorkers, Worker
from triptych.registry.matching import PREFILL, ROLE, ROLES
from triptych_bench.goodput.load.job import RequestRecord
from triptych_bench.simulator.cluster.context import Counters, SimulationContext
from triptych_bench.simulator.cluster.encoder import SimulatedEncoder
from triptych_bench.simulator.cluster.loop import FifoLock
from triptych_bench.simulator.cluster.pd import SimulatedPD, StepTower
from triptych_bench.simulator.cluster.proxy import MODEL, SimulatedProxy
from triptych_bench.simulator.cluster.requests import NAMESPACE, SimulatedItem
from triptych_bench.simulator.cluster.shape import ClusterShape
from triptych_bench.simulator.cluster.transport import SimulatedTransport
from triptych_bench.simulator.costs.costs import EncoderCosts

MODEL_KEY = "1" * 64


class SimulatedCluster:
    """Everything of one simulation, made on its running loop. `ended` gets the record of every request.

    `items` by mm_hash: all that the requests bring.
    """

    def __init__(
        self,
        context: SimulationContext,
        shape: ClusterShape,
        items: Mapping[str, SimulatedItem],
        ended: Callable[[RequestRecord], None],
    ) -> None:
        self.context, self._limits = context, context.limits
        #: All that there have been: those of an elastic pool stay here when they have left.
        self.encoders: dict[str, SimulatedEncoder] = {}
        self.workers: dict[str, SimulatedPD] = {}
        for index, role in enumerate(shape.workers):
            # Both sides of one worker share its device.
            address, device = f"worker-{index}", FifoLock()
            encoder, tower = role.encoder or context.costs.encoder, None
            if shape.in_step:
                tower = StepTower(encoder, self._limits.pd.embedding_memory)
                # The encoder beside such an engine prepares pictures, and the step does the rest.
                encoder = replace(encoder, tower_batch=0.0, tower_item=0.0, tower_patch=0.0, tower_pair=0.0)
            if role.encodes:
                # A tower inside the step has no turn of its own on the device.
                self.start_encoder(address, None if shape.in_step else device, encoder)
            if role.decodes:
                self.workers[address] = SimulatedPD(context, device, tower, role.pd_role)
        self.known = KnownWorkers()
        for address in self.workers:
            self.register_pd(address)
        for address in self.encoders:
            self.register_encoder(address)
        self.transport = SimulatedTransport(context, self.encoders, self.workers, items)
        self.proxy = SimulatedProxy(context, self.known, self.transport, ended)
        self.known.report_change()

    def start_encoder(
        self, address: str, device: FifoLock | None = None, costs: EncoderCosts | None = None
    ) -> SimulatedEncoder:
        """A new encoder, on a device of its own unless one is given. The proxy does not know it yet.

        `costs`: its own, where they are not the cost model's.
        """
        costs = costs or self.context.costs.encoder
        encoder = self.encoders[address] = SimulatedEncoder(self.context, costs, device or FifoLock())
        return encoder

    def register_encoder(self, address: str) -> None:
        """The proxy's next look at the registry shows a new encoder; `known.report_change` ends the look."""
        config = self._limits.encoder
        credit = {"plan_credit": config.plan_credit, "tower_credit": config.tower_credit}
        # Encoders with equal costs are of one kind.
        namespaces, kind = (NAMESPACE,), str(self.encoders[address].costs)
        self._register(WorkerInfo(address, "encoder", "0", MODEL_KEY, MODEL, namespaces, credit, kind=kind))

    def start_pd(self, address: str) -> None:
        """A new PD worker, on a device of its own. The proxy does not know it yet."""
        self.workers[address] = SimulatedPD(self.context, FifoLock(), None)

    def drains(self, pool: str, address: str) -> None:
        self.known.workers[pool, address].serving = False

    def gone(self, pool: str, address: str) -> None:
        self.known.report_loss(self.known.workers.pop((pool, address)))

    def _register(self, info: WorkerInfo) -> None:
        self.known.workers[info.pool, info.address] = Worker(info)
        self.known.declare(info)

    def register_pd(self, address: str) -> None:
        capacity = {
            "max_num_seqs": self._limits.pd.max_num_seqs,
            "max_model_len": self.workers[address].scheduler.limits.max_model_len,
            KEEPS_ITEMS: int(self._limits.pd.prefix_caching),
            ROLE: ROLES.index(self.workers[address].role),
        }
        self._register(WorkerInfo(address, "pd", "0", MODEL_KEY, MODEL, (), capacity))

    def finish(self, seconds: float) -> Counters:
        """The counters of the whole simulation, which took `seconds`."""
        counters, encoders = self.context.counters, self.encoders.values()
        counters.seconds, counters.re_encodes = seconds, self.proxy.re_encodes
        busy = {
            "pd": statistics.fmean(worker.step_seconds for worker in self.workers.values()),
            "proxy": self.proxy.intake_seconds + counters.tokens * self.context.costs.proxy.token,
        }
        if encoders:
            busy["encoder"] = statistics.fmean(encoder.tower_seconds for encoder in encoders)
        if prefill := [each.step_seconds for each in self.workers.values() if each.role == PREFILL]:
            busy["prefill"] = statistics.fmean(prefill)
        counters.utilisation = {name: spent / seconds for name, spent in busy.items()}
        return counters

    def leftovers(self) -> dict[str, int]:
        """What is held though no request is left; all zero when nothing leaks."""
        workers, encoders = self.workers.values(), self.encoders.values()
        return {
            "requests": self.proxy.dispatcher.in_flight + sum(one.in_flight for one in self.transport.links),
            "jobs": sum(len(encoder) for encoder in encoders),
            "scheduled items": sum(len(encoder.scheduler) for encoder in encoders),
            "saves": sum(encoder.saving_bytes for encoder in encoders),
            "blocks": sum(worker.kv.num_used for worker in workers),
            "references": sum(worker.cache.references for worker in workers),
            "reserved bytes": sum(worker.admission.reserved for worker in workers),
            "loads": sum(worker.loads.held + worker.connector.num_held for worker in workers),
            "engine requests": sum(worker.held for worker in workers),
        }
