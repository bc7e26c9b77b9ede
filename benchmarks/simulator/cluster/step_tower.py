"""The tower of a replica that encodes inside its engine's step, as vLLM does; it keeps what it encoded.

The step that reaches a picture's placeholder encodes it first: the sequences that decode wait for it. The
proxy's jobs and the encoder's messages are still there, and cost nothing but their latency.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from triptych.pd_worker.core.outputs import ScheduledChunk
from triptych.simulator.cluster.store import ByteLru
from triptych.simulator.costs.costs import EncoderCosts


class StepTower:
    """What a step's pictures cost. Embeddings are kept up to `capacity` bytes."""

    def __init__(self, costs: EncoderCosts, capacity: int) -> None:
        self._costs = costs
        self._cache = ByteLru(capacity)

    def seconds(self, chunks: Iterable[ScheduledChunk]) -> float:
        """Of the pictures that these chunks are the first to reach, in one batch."""
        fresh = [
            math.prod(feature.plan.grid_thw)
            for chunk in chunks
            for feature in chunk.state.request.features
            if feature.placement.offset < chunk.start + chunk.count
            and feature.placement.offset + feature.placement.length > chunk.start
            and self._cache.put(feature.plan)
        ]
        return self._costs.tower(len(fresh), sum(fresh))


def without_tower(costs: EncoderCosts) -> EncoderCosts:
    """For the encoder beside such an engine: it prepares pictures, and the step does the rest."""
    return replace(costs, tower_batch=0.0, tower_item=0.0, tower_patch=0.0, tower_pair=0.0)
