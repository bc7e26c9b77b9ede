from __future__ import annotations

from triptych.proxy.scaling.policy import Observation, ScalingRules, ScalingState, decide
from triptych.scaling import PoolDemand


def test_the_first_item_takes_a_pool_from_zero_to_one_whatever_it_costs() -> None:
    _, decision = decide(
        Observation(0.0, PoolDemand(waiting=1)), ScalingState.holding(0), ScalingRules(0, 4, 5.0)
    )
    assert (decision.workers, decision.active) == (1, True)
