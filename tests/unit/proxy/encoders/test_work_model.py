from __future__ import annotations

import math

import pytest

from triptych.proxy.encoders.work_model import MAX_KINDS, WorkModel

SLOW, FAST = "cpu slow x2 threads", "cuda fast"


def test_work_is_learnt_as_a_line_over_the_patches() -> None:
    model = WorkModel()
    for patches in (100, 200, 400, 800):
        model.learn(patches, 0.5 + 0.01 * patches)
    assert abs(model.work(1000) - 10.5) < 0.01
    assert model.work(100) < model.work(None) < model.work(800)


def test_work_is_the_mean_while_all_items_are_alike() -> None:
    model = WorkModel()
    model.learn(100, 2.0)
    model.learn(100, 4.0)
    assert 2.9 < model.work(500) < 3.1


def test_every_item_costs_a_second_while_nothing_is_known() -> None:
    assert WorkModel().work(100, SLOW) == WorkModel().work(None) == 1.0
    assert WorkModel().total(2, 3, 500, SLOW) == 5.0


def test_kinds_are_learnt_apart() -> None:
    model = WorkModel()
    for patches in (100, 200, 400):
        model.learn(patches, 0.01 * patches, SLOW)
        model.learn(patches, 0.001 * patches, FAST)
    assert model.work(800, SLOW) == pytest.approx(8.0)
    assert model.work(800, FAST) == pytest.approx(0.8)
    assert model.speed(FAST, SLOW) == pytest.approx(10.0)
    assert model.speed(SLOW, SLOW) == 1.0


def test_a_kind_that_has_not_reported_costs_the_mean_of_the_known_ones() -> None:
    model = WorkModel()
    for patches in (100, 200, 400):
        model.learn(patches, 0.01 * patches, SLOW)
        model.learn(patches, 0.03 * patches, FAST)
    assert model.work(300, "new") == pytest.approx(6.0)
    model.learn(200, 0.5, "new")
    assert model.work(200, "new") == pytest.approx(0.5)


def test_a_kind_with_items_of_one_size_gets_the_slope_of_the_others_scaled_by_its_speed() -> None:
    model = WorkModel()
    for patches in (100, 200, 400):
        model.learn(patches, 0.01 * patches, SLOW)
    model.learn(200, 0.2, FAST)
    assert model.work(800, FAST) == pytest.approx(0.8)


def test_the_total_of_a_kind_is_the_sum_of_its_items() -> None:
    model = WorkModel()
    for patches in (100, 200, 400):
        model.learn(patches, 0.5 + 0.01 * patches, SLOW)
        model.learn(patches, 0.05 + 0.001 * patches, FAST)
    for kind in (SLOW, FAST, "new"):
        items = model.work(None, kind) + model.work(150, kind) + model.work(350, kind)
        assert model.total(1, 2, 500, kind) == pytest.approx(items)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_seconds_that_no_tower_takes_are_not_learnt(seconds: float) -> None:
    model = WorkModel()
    model.learn(100, 2.0, SLOW)
    model.learn(100, seconds, SLOW)
    assert model.work(100, SLOW) == 2.0


def test_more_kinds_than_are_kept_cost_the_average() -> None:
    model = WorkModel()
    for index in range(3 * MAX_KINDS):
        model.learn(100, 2.0, f"kind {index}")
    assert len(model.kinds) == MAX_KINDS
    assert model.work(100, "kind 0") == pytest.approx(2.0)
