"""The load generator's process against the null server."""

from __future__ import annotations

import pytest

from support.null_server import MODEL, Behaviour, start
from triptych.goodput.load.generator import generate
from triptych.goodput.load.job import LoadJob, Progress, Target
from triptych.goodput.load.workload import Arrivals, Workload, arrival_times, plan_requests

LOAD = Workload(text_tokens=8, output_tokens=4, images=((0, 1.0), (1, 1.0)), sizes=((32, 32, 1.0),))


def job_for(url: str, count: int = 24, rate: float = 40.0, **more) -> LoadJob:
    times = arrival_times(Arrivals(rate=rate), count, 1)
    schedule = tuple(zip(times, plan_requests(LOAD, count, 1), strict=True))
    return LoadJob(Target(url, MODEL), schedule, **more)


async def window(behaviour: Behaviour, seen: list[Progress] | None = None, **more):
    runner, url = await start(behaviour)
    try:
        return await generate(job_for(url, **more), [].append if seen is None else seen.append)
    finally:
        await runner.cleanup()


async def test_every_request_is_sent_once_in_order_and_counted_by_usage():
    seen: list[Progress] = []
    report = await window(Behaviour(ttft=0.01, tpot=0.002), seen, warm_up=4)
    assert [record.index for record in report.records] == list(range(24))
    assert [record.error for record in report.records] == [""] * 24
    assert all(record.output_tokens == record.asked_tokens == 4 for record in report.records)
    assert all(record.prompt_tokens >= 8 and record.counted_by == "usage" for record in report.records)
    assert [record.warm_up for record in report.records] == [True] * 4 + [False] * 20
    assert report.cpu_share > 0
    assert seen[0].total == 24


async def test_load_is_offered_whether_or_not_the_server_keeps_up():
    report = await window(Behaviour(ttft=0.05, capacity=1), rate=200.0)
    assert max(record.planned for record in report.records) == pytest.approx(0.12)
    waits = [record.ttft for record in report.records]
    assert waits[-1] > 10 * 0.05


async def test_refusals_and_short_replies_are_records_with_their_reason():
    refused = await window(Behaviour(ttft=0.001, tpot=0.001, fail_every=3))
    assert sum("HTTP 503" in record.error for record in refused.records) == 8
    short = await window(Behaviour(ttft=0.001, tpot=0.001, early_end=2))
    assert all("2 tokens of 4" in record.error for record in short.records)


async def test_a_closed_loop_keeps_its_number_in_flight():
    report = await window(Behaviour(ttft=0.02, tpot=0.001), concurrency=3)
    spans = [(record.sent, record.sent + record.e2e) for record in report.records]
    inside = [sum(begin <= at < end for begin, end in spans) for at, _ in spans]
    assert max(inside) == 3
    assert all(record.late < 0.5 for record in report.records)
