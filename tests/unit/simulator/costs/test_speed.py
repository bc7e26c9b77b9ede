"""What a slower hour of the machine does to costs, and how it is told. Plain values."""

from __future__ import annotations

from triptych.simulator.costs.costs import (
    ClientCosts,
    CoreCosts,
    CostModel,
    EncoderCosts,
    PDCosts,
    ProxyCosts,
)
from triptych.simulator.costs.speed import Speed, at_speed, mean_speed
from triptych.simulator.validation import speed_line

COSTS = CostModel(
    "toy",
    "made up",
    EncoderCosts(1.0, 0.5, 10.0, 2.0, 0.25, 3.0, 0.125, 0.0625),
    PDCosts(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, message=3.0),
    ProxyCosts(1.0, 2.0, 4.0, 8.0, 16.0),
    0.5,
    ClientCosts(1.0, 2.0, 3.0),
    CoreCosts(wake=0.25, nice_weight=0.5),
)


def test_the_speed_of_the_profile_changes_nothing() -> None:
    assert at_speed(COSTS, Speed()) == COSTS


def test_encoder_stages_follow_towers_and_all_else_follows_steps() -> None:
    found = at_speed(COSTS, Speed(steps=2.0, towers=3.0))
    assert found.encoder.tower(1, 4) == 3 * COSTS.encoder.tower(1, 4)
    assert found.encoder.prepare(8) == 3 * COSTS.encoder.prepare(8)
    assert found.pd.step_seconds(1, 1, 1, 1.0) == 2 * COSTS.pd.step_seconds(1, 1, 1, 1.0)
    assert found.pd.tell(1) == 2 * COSTS.pd.tell(1)
    assert found.proxy.take(1, 1, 1) == 2 * COSTS.proxy.take(1, 1, 1)
    assert found.client.read(2) == 2 * COSTS.client.read(2)
    assert (found.rpc, found.cores.wake) == (1.0, 0.5)


def test_what_niceness_weighs_is_no_time() -> None:
    assert at_speed(COSTS, Speed(steps=2.0)).cores.nice_weight == 0.5


def test_the_speed_of_a_window_is_that_of_before_and_after() -> None:
    assert mean_speed([Speed(1.0, 0.75), Speed(1.5, 1.25)]) == Speed(1.25, 1.0)


def test_a_report_says_how_far_the_machine_was_from_its_profile() -> None:
    said = speed_line([Speed(1.5, 0.75), Speed(1.0, 1.0), Speed(1.25, 1.5)])
    assert "1.25 of the profile's time (1.00 to 1.50), towers 1.00 (0.75 to 1.50)" in said


def test_no_cost_is_forgotten() -> None:
    found = at_speed(COSTS, Speed(steps=2.0, towers=2.0))
    assert found.pd == PDCosts(2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, message=6.0)
