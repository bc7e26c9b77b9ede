"""What all parts of one simulated cluster share."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.simulator.cluster.loop import VirtualLoop
from triptych.simulator.cluster.shape import Limits
from triptych.simulator.cluster.store import SimulatedStore
from triptych.simulator.costs.costs import CostModel, ModelShape
from triptych.simulator.result import Counters


@dataclass(frozen=True, slots=True)
class SimulationContext:
    """The loop, the store and the counters of a simulation, and what it is simulated with."""

    loop: VirtualLoop
    costs: CostModel
    model: ModelShape
    limits: Limits
    store: SimulatedStore
    counters: Counters
