"""`triptych bench`: its load generator, and the cluster that it starts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from support.data.checkpoints import build_checkpoint
from support.null_server import MODEL, Behaviour, start
from support.processes.processes import lives, survivors
from triptych.apps.cli.app import app
from triptych.base.errors import ConfigError
from triptych_bench.goodput.load.generator import generate
from triptych_bench.goodput.load.job import LoadJob, Progress, Target
from triptych_bench.goodput.load.workload import Arrivals, Workload, arrival_times, plan_requests

SMALL = (
    *("--workload", "image", "--image-size", "32x32", "--text-tokens", "4", "--output-tokens", "4"),
    *("--requests", "10", "--warm-up", "0.1"),
)


async def bench(*words: str) -> Result:
    result = await asyncio.to_thread(CliRunner().invoke, app, ["bench", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def windows_of(path: Path) -> list[dict]:
    return json.loads(path.read_text())["windows"]


async def test_a_sweep_a_comparison_and_two_targets_in_turns(tmp_path):
    runner, url = await start(Behaviour(ttft=0.005, tpot=0.001))
    slow_runner, slow_url = await start(Behaviour(ttft=0.2, tpot=0.001))
    try:
        one, two = tmp_path / "one", tmp_path / "two"
        await bench(
            *("goodput", "--url", url, "--rate", "20", "--plots", "none", "--output", str(one), *SMALL)
        )
        result = await bench(
            *("ab", "--a", url, "--b", f"{slow_url}/v1", "--rate", "20", "--repeats", "1"),
            *("--output", str(two), *SMALL),
        )
    finally:
        await runner.cleanup()
        await slow_runner.cleanup()
    (window,) = windows_of(one.with_suffix(".json"))
    assert (window["completed"], window["failed"], window["model_id"]) == (10, 0, "null")
    assert set(window["output_lens"]) == {4}
    assert "median_ttft_ms" in result.output
    assert "may keep a core to itself" in " ".join(result.output.split())
    pair = [windows_of(tmp_path / f"two-{side}.json")[0] for side in ("a", "b")]
    assert pair[0]["seed"] == pair[1]["seed"]
    assert pair[0]["input_lens"] == pair[1]["input_lens"]
    compared = await bench("compare", str(tmp_path / "two-a.json"), str(tmp_path / "two-b.json"))
    assert "20/s" in compared.output and "p99_ttft_ms" in compared.output


async def test_a_search_tells_the_rate_and_its_evidence(tmp_path):
    runner, url = await start(Behaviour(ttft=0.001, tpot=0.001))
    try:
        result = await bench(
            *("goodput", "--url", url, "--search", "--search-windows", "1", "--rate", "20"),
            *("--highest", "20", "--plots", "none", "--slo", "ttft:30000", "--output", str(tmp_path / "s")),
            *SMALL,
        )
    finally:
        await runner.cleanup()
    found = json.loads((tmp_path / "s.json").read_text())["search"]
    assert (found["max_request_goodput"], found["lowest_failing_rate"]) == (20.0, None)
    assert "at least 20 requests/s" in result.output


async def test_a_server_that_refuses_what_is_measured_is_told(tmp_path):
    runner, url = await start(Behaviour(fail_every=1))
    try:
        with pytest.raises(ConfigError, match="HTTP 503"):
            await bench("goodput", "--url", url, *SMALL)
    finally:
        await runner.cleanup()


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_launched_cluster_is_timed_measured_and_ended(tmp_path):
    result = await bench(
        *("goodput", "--launch", "1E1PD", "--rate", "2", "--output", str(tmp_path / "l"), *SMALL),
        *("--launch-flags", "--kv-memory 64MiB --store-memory 128MiB --encoder-cache-memory 32MiB"),
    )
    found = json.loads((tmp_path / "l.json").read_text())
    assert found["startup"]["seconds_to_ready"] > 0
    assert found["startup"]["resident_mb"] > 100
    (window,) = found["windows"]
    assert window["errors"] == [""] * 10
    assert all(stages["prefill"] > 0 and stages["encode"] > 0 for stages in window["stages"])
    assert all(caches == ["encoded"] for caches in window["caches"])
    assert any("waiting" in sample for sample in window["queue_depths"])
    assert "seconds to ready" in result.output


async def test_a_cluster_that_cannot_start_says_why():
    with pytest.raises(ConfigError, match="--launch: the cluster ended with 2"):
        await bench("goodput", "--launch", "1E1PD", "--launch-model", "/nowhere", *SMALL)


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


_RUN = """
import json, sys, time
from triptych_bench.goodput.launch import launched, parse_shape

with launched(parse_shape("1E1PD"), sys.argv[1], [], 60.0) as cluster:
    print(json.dumps({"serve": cluster.pid, **cluster.processes}), flush=True)
    time.sleep(600)
"""


@pytest.fixture
def short_folder() -> Iterator[str]:
    """A socket's path has room for 100 characters."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def test_a_run_that_is_killed_leaves_no_cluster_behind(short_folder: str) -> None:
    command = [sys.executable, "-c", _RUN, str(build_checkpoint("qwen3_vl"))]
    own = os.environ | {"TMPDIR": short_folder}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own) as run:
        assert run.stdout is not None
        pids = json.loads(run.stdout.readline())
        assert {"serve", "proxy", "encoder-0", "pd-0"} <= pids.keys()
        assert all(map(lives, pids.values()))
        run.kill()
    left = survivors(pids.values())
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
