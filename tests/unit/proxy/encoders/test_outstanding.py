"""What is outstanding at the encoders, and what an item costs them."""

from __future__ import annotations

import math

import pytest

from triptych.proxy.encoders.arrivals import FAST_SECONDS, SLOW_SECONDS, ArrivedItems, Items, Outstanding
from triptych.proxy.encoders.job import EncoderJob, JobState
from triptych.proxy.encoders.work_model import MAX_KINDS, WorkModel


def job(index: int, state: JobState = JobState.QUEUED) -> EncoderJob:
    return EncoderJob(f"{index:064x}", "n", index, state=state)


def test_what_is_outstanding_is_summed_by_what_is_known_of_its_size() -> None:
    found = Outstanding.of([(None, True), (3, False), (7, True), (7, False)])
    assert found == Outstanding(Items(1.0, 3.0, 17.0), 2, 7)
    assert Outstanding.of([(None, False)]).largest is None


def test_a_constant_stream_is_its_rate_by_both_averages() -> None:
    arrived = ArrivedItems()
    for step in range(6000):
        now = 1000.0 + step / 10
        one = job(step)
        arrived.add(one, now)
        arrived.resize(one, 200, now + 0.05)
    for rate in arrived.rates(now):
        assert rate.known == pytest.approx(10.0, rel=0.05)
        assert rate.patches == pytest.approx(2000.0, rel=0.05)
        assert rate.unknown == pytest.approx(0.0, abs=1e-6)


def test_a_plan_that_comes_late_counts_at_the_time_of_the_arrival() -> None:
    late, prompt = ArrivedItems(), ArrivedItems()
    one, other = job(1), job(2)
    late.add(one, 10.0)
    prompt.add(other, 10.0)
    prompt.resize(other, 50, 10.0)
    late.resize(one, 50, 15.0)
    late.resize(one, 50, 16.0)
    for ours, theirs in zip(late.rates(17.0), prompt.rates(17.0), strict=True):
        assert ours.known == pytest.approx(theirs.known)
        assert ours.patches == pytest.approx(theirs.patches)
        assert ours.unknown == pytest.approx(0.0, abs=1e-12)


def test_after_some_seconds_without_an_item_the_fast_average_is_none() -> None:
    arrived = ArrivedItems()
    arrived.add(job(1), 10.0)
    fast, slow = arrived.rates(10.0 + 2 * FAST_SECONDS)
    assert fast.unknown > 0.0 and slow.unknown > 0.0
    fast, slow = arrived.rates(10.0 + 4 * FAST_SECONDS)
    assert fast == Items() and slow.unknown > 0.0
    assert arrived.rates(10.0 + 4 * SLOW_SECONDS)[1] == Items()


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


def learnt(begin: float = 0.0, **slopes: float) -> WorkModel:
    """A model to which kinds have reported items of three sizes: `begin` seconds and a slope a patch."""
    model = WorkModel()
    for patches in (100, 200, 400):
        for kind, slope in slopes.items():
            model.learn(patches, begin + slope * patches, {"slow": SLOW, "fast": FAST}[kind])
    return model


def test_kinds_are_learnt_apart() -> None:
    model = learnt(slow=0.01, fast=0.001)
    assert model.work(800, SLOW) == pytest.approx(8.0)
    assert model.work(800, FAST) == pytest.approx(0.8)
    assert model.speed(FAST, SLOW) == pytest.approx(10.0)
    assert model.speed(SLOW, SLOW) == 1.0


def test_a_kind_that_has_not_reported_costs_the_mean_of_the_known_ones() -> None:
    model = learnt(slow=0.01, fast=0.03)
    assert model.work(300, "new") == pytest.approx(6.0)
    model.learn(200, 0.5, "new")
    assert model.work(200, "new") == pytest.approx(0.5)


def test_a_kind_with_items_of_one_size_gets_the_slope_of_the_others_scaled_by_its_speed() -> None:
    model = learnt(slow=0.01)
    model.learn(200, 0.2, FAST)
    assert model.work(800, FAST) == pytest.approx(0.8)


def test_the_total_of_a_kind_is_the_sum_of_its_items() -> None:
    model = learnt(0.5, slow=0.01, fast=0.001)
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
