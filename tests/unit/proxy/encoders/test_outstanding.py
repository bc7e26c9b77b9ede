from __future__ import annotations

import random

import pytest

from triptych.proxy.encoders.job import EncoderJob, JobState
from triptych.proxy.encoders.loads import FAST_SECONDS, SLOW_SECONDS, ArrivedItems, Items, OutstandingItems


def job(index: int, state: JobState = JobState.QUEUED) -> EncoderJob:
    return EncoderJob(f"{index:064x}", "n", index, state=state)


def test_sums_are_those_of_the_jobs_whatever_happens_to_them() -> None:
    rng = random.Random(5)
    outstanding, jobs = OutstandingItems(), {}
    for step in range(4000):
        index = rng.randrange(60)
        one = jobs.setdefault(index, (job(index), None))[0]
        if rng.random() < 0.3:
            outstanding.remove(one)
            jobs.pop(index)
            continue
        one.state = rng.choice((*JobState,))
        patches = rng.choice((None, rng.randrange(1, 9)))
        jobs[index] = (one, patches)
        outstanding.count(one, patches)
        if step % 50:
            continue
        sizes = [size for _, size in jobs.values() if size is not None]
        assert outstanding.items == Items(len(jobs) - len(sizes), len(sizes), sum(sizes))
        assert outstanding.waiting == sum(each.state is not JobState.RUNNING for each, _ in jobs.values())
        assert outstanding.largest == max(sizes, default=None)


def test_many_equal_sizes_are_kept_once() -> None:
    outstanding = OutstandingItems()
    for index in range(4096):
        outstanding.count(job(index), index % 3)
    assert len(outstanding._heap) == 3


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
