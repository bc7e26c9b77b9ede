"""`triptych bench` as people call it, against the null server and a real cluster."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from support.null_server import Behaviour, start
from triptych.apps.cli.app import app
from triptych.base.errors import ConfigError

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
    slow_runner, slow_url = await start(Behaviour(ttft=1.0, tpot=0.001))
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
