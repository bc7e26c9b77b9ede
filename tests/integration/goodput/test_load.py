"""The load generator's process against the null server."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import msgspec
import pytest

from support.null_server import MODEL, Behaviour, start
from triptych.goodput.load.generator import LoadError, generate, run_window
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


async def test_replicas_take_requests_in_turn():
    runner, url = await start(Behaviour(ttft=0.001, tpot=0.001))
    try:
        job = job_for(url, count=6)
        # Nothing listens at port 1.
        job = replace(job, target=replace(job.target, replicas=("http://127.0.0.1:1",)))
        report = await generate(job, [].append)
    finally:
        await runner.cleanup()
    assert [bool(record.error) for record in report.records] == [False, True] * 3


async def test_times_of_a_record_hang_together():
    report = await window(Behaviour(ttft=0.03, tpot=0.01))
    for record in report.records:
        assert record.sent >= record.planned
        assert 0.03 <= record.ttft < record.e2e
        assert record.e2e >= 0.03 + 3 * 0.01
        assert sum(record.itls) <= record.e2e - record.ttft + 1e-6


async def test_pictures_and_stage_times_are_told_by_the_server():
    report = await window(Behaviour(ttft=0.001, tpot=0.001))
    assert {record.images for record in report.records} == {0, 1}
    assert all(len(record.caches) == record.images for record in report.records)
    assert all(record.stages == {"prefill": 0.001, "decode": 0.003} for record in report.records)


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


async def test_a_request_over_its_time_is_a_failure():
    report = await window(Behaviour(ttft=1.5), count=3, timeout=0.3)
    assert [record.error for record in report.records] == ["timeout after 0.3 s"] * 3


async def test_nobody_at_the_address_is_a_failure_of_every_request():
    runner, url = await start(Behaviour())
    await runner.cleanup()
    report = await generate(job_for(url, count=3), [].append)
    assert all("Connect" in record.error for record in report.records)
    assert all(math.isinf(record.latencies()["ttft"]) for record in report.records)


async def test_a_closed_loop_keeps_its_number_in_flight():
    report = await window(Behaviour(ttft=0.02, tpot=0.001), concurrency=3)
    spans = [(record.sent, record.sent + record.e2e) for record in report.records]
    inside = [sum(begin <= at < end for begin, end in spans) for at, _ in spans]
    assert max(inside) == 3
    assert all(record.late < 0.5 for record in report.records)


async def test_a_generator_that_cannot_work_says_what_it_wrote(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(LoadError, match="ended with 1"):
        await asyncio.to_thread(run_window, job_for("http://127.0.0.1:9"))


async def test_a_window_runs_in_a_process_of_its_own():
    seen: list[Progress] = []
    runner, url = await start(Behaviour(ttft=0.001, tpot=0.001))
    try:
        report = await asyncio.to_thread(run_window, job_for(url), seen.append)
    finally:
        await runner.cleanup()
    assert [record.error for record in report.records] == [""] * 24
    assert seen[0].total == 24


def test_a_job_survives_the_way_to_the_generator():
    job = job_for("http://x", concurrency=2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=LoadJob) == job
