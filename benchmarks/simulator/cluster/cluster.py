"""A cluster of one shape in virtual time, wired: store, workers, proxy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from triptych.goodput.load.record import RequestRecord
from triptych.proxy.pd.router import KEEPS_ITEMS
from triptych.proxy.workers import KnownWorkers, Worker
from triptych.simulator.cluster.encoder import SimulatedEncoder
from triptych.simulator.cluster.fifo_lock import FifoLock
from triptych.simulator.cluster.loop import VirtualLoop
from triptych.simulator.cluster.pd import SimulatedPD
from triptych.simulator.cluster.proxy import MODEL, SimulatedProxy
from triptych.simulator.cluster.requests import NAMESPACE, SimulatedItem
from triptych.simulator.cluster.shape import ClusterShape, Limits
from triptych.simulator.cluster.step_tower import StepTower, without_tower
from triptych.simulator.cluster.store import SimulatedStore
from triptych.simulator.cluster.transport import SimulatedTransport
from triptych.simulator.costs.costs import CostModel, EncoderCosts, ModelShape
from triptych.types import WorkerInfo

MODEL_KEY = "1" * 64


class SimulatedCluster:
    """Everything of one simulation, made on its running loop. `ended` gets the record of every request.

    `items` by mm_hash: all that the requests bring.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        shape: ClusterShape,
        costs: CostModel,
        model: ModelShape,
        limits: Limits,
        items: Mapping[str, SimulatedItem],
        ended: Callable[[RequestRecord], None],
    ) -> None:
        self._loop, self._costs, self._limits = loop, costs, limits
        self.store = SimulatedStore(limits.store_memory, 2 * costs.rpc, in_memory=shape.in_memory)
        #: All that there have been: those of an elastic pool stay here when they have left.
        self.encoders: dict[str, SimulatedEncoder] = {}
        #: Of their devices: encoders with equal costs are of one kind.
        self._kinds: dict[str, str] = {}
        self.workers: dict[str, SimulatedPD] = {}
        for index, role in enumerate(shape.workers):
            # Both sides of one worker share its device.
            address, device = f"worker-{index}", FifoLock()
            encoder, tower = role.encoder or costs.encoder, None
            if shape.in_step:
                encoder, tower = without_tower(encoder), StepTower(encoder, limits.pd.embedding_memory)
            if role.encodes:
                # A tower inside the step has no turn of its own on the device.
                self.start_encoder(address, None if shape.in_step else device, encoder)
            if role.decodes:
                kv_bytes, jumps = model.kv_token_bytes, limits.jumps
                self.workers[address] = SimulatedPD(
                    loop, costs.pd, limits.pd, kv_bytes, self.store, device, tower, jumps=jumps
                )
        self.known = KnownWorkers()
        self._register_all()
        self.transport = SimulatedTransport(
            loop, costs.rpc, costs.proxy.token, self.encoders, self.workers, items
        )
        self.proxy = SimulatedProxy(loop, costs.proxy, limits, self.known, self.store, self.transport, ended)
        self.known.report_change()

    def start_encoder(
        self, address: str, device: FifoLock | None = None, costs: EncoderCosts | None = None
    ) -> SimulatedEncoder:
        """A new encoder, on a device of its own unless one is given. The proxy does not know it yet.

        `costs`: its own, where they are not the cost model's.
        """
        costs = costs or self._costs.encoder
        self._kinds[address] = str(costs)
        encoder = self.encoders[address] = SimulatedEncoder(
            self._loop, costs, self._limits.encoder, self.store, device or FifoLock(), self._costs.rpc
        )
        return encoder

    def register_encoder(self, address: str) -> None:
        """The proxy's next look at the registry shows a new encoder; `known.report_change` ends the look."""
        config = self._limits.encoder
        credit = {"plan_credit": config.plan_credit, "tower_credit": config.tower_credit}
        namespaces, kind = (NAMESPACE,), self._kinds[address]
        self._register(WorkerInfo(address, "encoder", "0", MODEL_KEY, MODEL, namespaces, credit, kind=kind))

    def encoder_drains(self, address: str) -> None:
        """It shows that the encoder takes no new jobs."""
        self.known.workers["encoder", address].serving = False

    def encoder_gone(self, address: str) -> None:
        """It shows that the encoder's process has ended."""
        self.known.report_loss(self.known.workers.pop(("encoder", address)))

    def _register(self, info: WorkerInfo) -> None:
        self.known.workers[info.pool, info.address] = Worker(info)
        self.known.declare(info)

    def _register_all(self) -> None:
        """The workers of the cluster's shape."""
        for name, pd in self.workers.items():
            capacity = {
                "max_num_seqs": self._limits.pd.max_num_seqs,
                "max_model_len": pd.max_model_len,
                KEEPS_ITEMS: int(self._limits.pd.prefix_caching),
            }
            self._register(WorkerInfo(name, "pd", "0", MODEL_KEY, MODEL, (), capacity))
        for address in self.encoders:
            self.register_encoder(address)

    def leftovers(self) -> dict[str, int]:
        """What is held though no request is left; all zero when nothing leaks."""
        workers, encoders = self.workers.values(), self.encoders.values()
        return {
            "requests": self.proxy.dispatcher.in_flight
            + sum(link.in_flight for link in self.transport.links),
            "jobs": sum(len(encoder) for encoder in encoders),
            "scheduled items": sum(len(encoder.scheduler) for encoder in encoders),
            "saves": sum(encoder.counts.saving_bytes for encoder in encoders),
            "blocks": sum(worker.kv.num_used for worker in workers),
            "references": sum(worker.cache.references for worker in workers),
            "reserved bytes": sum(worker.admission.reserved for worker in workers),
            "loads": sum(worker.loads.held + len(worker.connector.table) for worker in workers),
            "engine requests": sum(worker.held for worker in workers),
        }
