"""`--share-prefixes auto`: loads where moving a token takes less than computing it."""

from __future__ import annotations

import logging

import pytest

from triptych.pd_worker.kv_sharing import cost_rule
from triptych.pd_worker.kv_sharing.cost_rule import CostRule


def rule(*, compute: float, move: float, asked: bool = True) -> CostRule:
    made = CostRule(4096, asked=asked)
    made.computed(1000, 1000 * compute)
    made.moved(1000, 1000 * move)
    return made


def test_what_is_not_measured_yet_is_tried() -> None:
    made = CostRule(4096, asked=True)
    assert made.pays and made.tries()
    made.computed(1000, 0.1)
    assert made.pays, "nothing has been moved yet"


@pytest.mark.parametrize(("compute", "move", "pays"), [(100e-6, 60e-6, True), (40e-6, 60e-6, False)])
def test_the_cheaper_way_is_taken_and_the_numbers_are_logged(compute, move, pays, caplog) -> None:
    with caplog.at_level(logging.INFO):
        assert rule(compute=compute, move=move).pays is pays
    (line,) = (record.getMessage() for record in caplog.records)
    assert "4096 bytes a token move in 60 us" in line and f"computed in {compute * 1e6:.0f} us" in line


def test_where_it_does_not_pay_one_request_of_64_finds_out_whether_it_does_now() -> None:
    made = rule(compute=40e-6, move=60e-6)
    assert sum(made.tries() for _ in range(640)) == 10
    for _ in range(30):
        made.moved(1000, 1000 * 10e-6)
    assert made.pays


def test_on_asks_nobody() -> None:
    assert rule(compute=40e-6, move=60e-6, asked=False).tries()


def test_a_few_tokens_say_nothing_of_speed() -> None:
    made = rule(compute=100e-6, move=60e-6)
    made.moved(1, 10.0)
    assert made.pays


def test_a_request_waits_as_long_as_computing_would_take_and_a_half_within_bounds() -> None:
    made = rule(compute=1e-3, move=60e-6)
    assert made.patience(1000) == pytest.approx(1.5)
    assert made.patience(10) == cost_rule._SHORTEST
    assert made.patience(10**6) == cost_rule._LONGEST
    assert CostRule(4096, asked=True).patience(1000) == cost_rule._LONGEST
