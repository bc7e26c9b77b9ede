"""A cluster of one shape in virtual time, wired: store, workers, proxy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from triptych.goodput.load.record import RequestRecord
from triptych.proxy.workers import KnownWorkers, Worker
from triptych.simulator.cluster.encoder import SimulatedEncoder
from triptych.simulator.cluster.fifo_lock import FifoLock
from triptych.simulator.cluster.loop import VirtualLoop
from triptych.simulator.cluster.pd import SimulatedPD
from triptych.simulator.cluster.proxy import MODEL, SimulatedProxy
from triptych.simulator.cluster.requests import NAMESPACE, SimulatedItem
from triptych.simulator.cluster.shape import ClusterShape, Limits
from triptych.simulator.cluster.store import SimulatedStore
from triptych.simulator.cluster.transport import SimulatedTransport
from triptych.simulator.costs.costs import CostModel, ModelShape
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
        self.store = SimulatedStore(limits.store_memory)
        self.encoders: dict[str, SimulatedEncoder] = {}
        self.workers: dict[str, SimulatedPD] = {}
        for index, role in enumerate(shape.workers):
            # Both sides of one worker share its device.
            address, device, memory = f"worker-{index}", FifoLock(), shape.in_memory
            if role.encodes:
                self.encoders[address] = SimulatedEncoder(
                    loop, costs.encoder, limits.encoder, self.store, device, rpc=costs.rpc, in_memory=memory
                )
            if role.decodes:
                self.workers[address] = SimulatedPD(
                    loop,
                    costs.pd,
                    limits.pd,
                    model.kv_token_bytes,
                    self.store,
                    device,
                    rpc=costs.rpc,
                    in_memory=memory,
                    jumps=limits.jumps,
                )
        known = self._known_workers(limits)
        self.transport = SimulatedTransport(
            loop, costs.rpc, costs.proxy.token, self.encoders, self.workers, items
        )
        self.proxy = SimulatedProxy(loop, costs.proxy, limits, known, self.store, self.transport, ended)
        known.report_change()

    def _known_workers(self, limits: Limits) -> KnownWorkers:
        """All workers as they register; they neither come nor go."""
        known = KnownWorkers()
        credit = {"plan_credit": limits.encoder.plan_credit, "tower_credit": limits.encoder.tower_credit}
        sequences = {"max_num_seqs": limits.pd.max_num_seqs}
        infos = [
            WorkerInfo(name, "pd", "0", MODEL_KEY, MODEL, (), sequences | {"max_model_len": pd.max_model_len})
            for name, pd in self.workers.items()
        ]
        infos += [
            WorkerInfo(name, "encoder", "0", MODEL_KEY, MODEL, (NAMESPACE,), credit) for name in self.encoders
        ]
        for info in infos:
            known.workers[info.pool, info.address] = Worker(info)
            known.declare(info)
        return known

    def leftovers(self) -> dict[str, int]:
        """What is held though no request is left; all zero when nothing leaks."""
        workers, encoders = self.workers.values(), self.encoders.values()
        return {
            "requests": self.proxy.in_flight + sum(link.in_flight for link in self.transport.links),
            "jobs": sum(len(encoder) for encoder in encoders),
            "scheduled items": sum(len(encoder.scheduler) for encoder in encoders),
            "saves": sum(encoder.counts.saving_bytes for encoder in encoders),
            "blocks": sum(worker.kv.num_used for worker in workers),
            "references": sum(worker.cache.references for worker in workers),
            "reserved bytes": sum(worker.admission.reserved for worker in workers),
            "loads": sum(worker.loads.held + len(worker.connector.table) for worker in workers),
            "engine requests": sum(worker.held for worker in workers),
        }
