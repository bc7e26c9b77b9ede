"""The chart under load: rolling updates, a drained node, scaling and a stalled engine lose no request.

The rendered manifests run as processes (`support.kubernetes`); no Kubernetes is here. The file that
TRIPTYCH_KUBERNETES_RESULT names gets the table.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import platform
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from support.chaos.faults import environment, order
from support.chaos.soak import TOKENS
from support.chaos.strict import StrictClients
from support.data.oracle import OracleResult
from support.data.traffic import Case, expected, mixed_cases
from support.kubernetes.autoscale import keda
from support.kubernetes.chart import render
from support.kubernetes.cluster import MiniCluster
from support.processes.cluster import PATIENCE
from support.waiting import until, within

RESULT = os.environ.get("TRIPTYCH_KUBERNETES_RESULT", "")
CLIENTS = 6
#: Seconds of answers before the first step and after the last.
QUIET_SECONDS = 5.0
HEAD = ("step", "seconds", "answered", "lost", "wrong", "ties", "request, median / longest s")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
_rows: list[tuple[Any, ...]] = []


def _values(**changes: Any) -> dict[str, Any]:
    """Two of each on little memory, with the checkpoint on a disk and without keys."""
    values: dict[str, Any] = {
        "model": {"source": "pvc", "pvc": {"existingClaim": "model"}, "name": "tiny"},
        "apiKeys": {"enabled": False},
        "tls": {"enabled": False},  # the store's server of the test speaks none
        "encoder": {"args": ["--threads", "1", "--prepared-memory", "64MiB"], "replicas": 2},
        "pd": {
            "args": [
                *("--threads", "1", "--kv-memory", "64MiB", "--encoder-cache-memory", "32MiB"),
                # Less than most requests take: what is not finished then goes on elsewhere.
                *("--drain-timeout", "1"),
            ],
            "replicas": 2,
        },
        "store": {"maxMemory": "128Mi"},
    }
    return values | changes


@pytest.fixture(scope="module")
def asked() -> list[Case]:
    return mixed_cases(24, seed=18)


@pytest.fixture(scope="module")
def answers(checkpoint: Path, asked: list[Case]) -> list[Any]:
    return expected(checkpoint, asked, TOKENS)


@contextlib.asynccontextmanager
async def _cluster(
    values: dict[str, Any], checkpoint: Path, folder: Path, variables: dict[str, str] | None = None
) -> AsyncIterator[MiniCluster]:
    """The chart with these values, all of it ready."""
    made = MiniCluster(folder, tempo=0.4, disks={"model": checkpoint}, environment=variables)
    async with made as cluster:
        cluster.apply(render(values))
        await cluster.wait_until_rolled_out(seconds=2 * PATIENCE)
        yield cluster


@contextlib.asynccontextmanager
async def _load(
    cluster: MiniCluster, cases: list[Case], reference: list[OracleResult]
) -> AsyncIterator[StrictClients]:
    """Clients at the proxies' Service while the block runs; nothing may be lost or wrong."""
    clients = StrictClients("http://" + cluster.address("triptych-proxy", 8000), cases, reference)
    asking = asyncio.create_task(clients.run(CLIENTS))
    try:
        await asyncio.sleep(QUIET_SECONDS)
        yield clients
        await asyncio.sleep(QUIET_SECONDS)
        clients.end()
        await within("the last answers of the clients", asking, 2 * PATIENCE)
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert not clients.tally.lost, cluster.describe()
    assert not clients.tally.wrong
    assert clients.tally.ties * 100 <= clients.tally.answered


async def _step(name: str, clients: StrictClients, work: Awaitable[Any]) -> None:
    """Carries out one step, and notes what the clients saw meanwhile."""
    began, tally = time.monotonic(), clients.tally
    before = (tally.answered, len(tally.lost), len(tally.wrong), tally.ties)
    await work
    # The last requests that met it have an answer, too.
    await asyncio.sleep(2.0)
    took = [seconds for when, seconds in clients.answers if when >= began]
    counts = (tally.answered, len(tally.lost), len(tally.wrong), tally.ties)
    seen = [after - first for first, after in zip(before, counts, strict=True)]
    times = f"{median(took):.1f} / {max(took):.1f}" if took else "no answer"
    print(f"{name}: {seen[0]} answered, {seen[1]} lost, {times}", flush=True)
    _rows.append((name, f"{time.monotonic() - began:.0f}", *seen, times))


async def _restarted(cluster: MiniCluster, kind: str, name: str) -> None:
    cluster.restart(kind, name)
    await cluster.wait_until_rolled_out(name, seconds=2 * PATIENCE)


async def test_rolling_updates_of_everything_and_a_drained_node_lose_nothing(
    checkpoint: Path, asked: list[Case], answers: list[Any], tmp_path: Path
) -> None:
    async with (
        _cluster(_values(), checkpoint, tmp_path) as cluster,
        _load(cluster, asked, answers) as clients,
    ):
        for kind, name in (
            ("Deployment", "triptych-proxy"),
            ("Deployment", "triptych-encoder-default"),
            ("Deployment", "triptych-pd-default"),
            ("StatefulSet", "triptych-store"),
        ):
            await _step(f"rolling update of {name}", clients, _restarted(cluster, kind, name))
        await _step("drain of a node", clients, cluster.drain("node-0"))
        await cluster.wait_until_rolled_out(seconds=PATIENCE)
        # All that ended did so by itself, within its grace period.
        assert {code for pod in cluster.gone for one in pod.containers for code in one.codes} == {0}


async def test_a_pod_that_never_gets_ready_stops_the_rollout_and_harms_nobody(
    checkpoint: Path, asked: list[Case], answers: list[Any], tmp_path: Path
) -> None:
    values = _values()
    broken = values | {"pd": values["pd"] | {"args": [*values["pd"]["args"], "--max-model-len", "100000000"]}}
    async with _cluster(values, checkpoint, tmp_path) as cluster:
        good = {pod.name for pod in cluster.pods_of("triptych-pd-default")}
        async with _load(cluster, asked, answers) as clients:
            await _step("rollout of PD workers that cannot start", clients, _stuck(cluster, broken))
            assert {pod.name for pod in cluster.pods_of("triptych-pd-default") if pod.ready} == good


async def _stuck(cluster: MiniCluster, values: dict[str, Any]) -> None:
    """Applies the values and waits until the first new pod has failed several times."""
    secrets = {"Secret"}
    cluster.apply(one for one in render(values) if one["kind"] not in secrets)
    await until(
        lambda: any(
            len(one.restarts) >= 2 for pod in cluster.pods_of("triptych-pd-default") for one in pod.containers
        ),
        "the new pod to fail",
        3 * PATIENCE,
    )


async def test_the_liveness_probe_restarts_a_stalled_engine(
    checkpoint: Path, asked: list[Case], answers: list[Any], tmp_path: Path
) -> None:
    faults = environment(tmp_path / "faults")
    # Longer than the probes take: the watchdog would end the process first.
    faults["TRIPTYCH_STALL_TIMEOUT"] = "60"
    async with (
        _cluster(_values(), checkpoint, tmp_path / "pods", faults) as cluster,
        _load(cluster, asked, answers) as clients,
    ):
        pod = cluster.pods_of("triptych-pd-default")[0]
        order(tmp_path / "faults", pod.name, "pd", "hangs", after=20)
        state = pod.containers[0]
        restarted = until(lambda: state.restarts and pod.ready, "the restart", 2 * PATIENCE)
        await _step("restart of a stalled PD worker", clients, restarted)
        assert state.restarts == ["liveness probe failed"]


async def test_encoders_scaled_from_zero_to_many_and_back_lose_nothing(
    checkpoint: Path, asked: list[Case], answers: list[Any], tmp_path: Path
) -> None:
    values = _values(
        autoscaling={"engine": "keda", "encoderSlo": 0.2, "window": 5},
        encoderPools=[{"name": "default", "autoscale": {"min": 0, "max": 3}}],
    )
    name = "triptych-encoder-default"
    async with _cluster(values, checkpoint, tmp_path) as cluster, keda(cluster, name, 5.0) as operator:
        await until(lambda: not cluster.pods_of(name), "an idle pool at zero", 2 * PATIENCE)
        async with _load(cluster, asked, answers) as clients:

            def serves() -> bool:
                return any(pod.ready for pod in cluster.pods_of(name))

            await _step("0 -> N encoders by KEDA", clients, until(serves, "an encoder", 2 * PATIENCE))
        await until(lambda: not cluster.pods_of(name), "the way back to zero", 2 * PATIENCE)
        assert 1 <= max(replicas for _, _, replicas in operator.log) <= 3


def teardown_module() -> None:
    if not RESULT:
        return
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], text=True, capture_output=True, check=True
    ).stdout.strip()
    rows = [HEAD, ["---"] * len(HEAD), *_rows]
    lines = [
        "# The chart under load",
        "",
        "Command: `TRIPTYCH_KUBERNETES_RESULT=benchmarks/results/kubernetes.md "
        "python -m pytest tests/chaos/test_kubernetes.py`",
        f"Date: {datetime.date.today()}. Commit: {commit}. {os.cpu_count()} cores ({platform.machine()}). "
        f"Load at the end: {os.getloadavg()[0]:.1f}.",
        "",
        "No Kubernetes was here: the manifests that the chart renders ran as processes under the tests'",
        "small Kubernetes (`tests/support/kubernetes/cluster.py` says what it models and what not). Two",
        f"proxies, two encoders, two PD workers and a store; {CLIENTS} clients in a closed loop at the",
        f"Service of the proxies stream {TOKENS} tokens each: text, one picture, three pictures, shared",
        "pictures, half of them new. Half of the clients keep their connection. They repeat nothing:",
        "whatever is no whole answer with status 200 is lost. PD workers get one second to finish their",
        "requests, and hand over the rest. Every answer is compared with `transformers.generate`, token for",
        "token.",
        "",
        *("| " + " | ".join(map(str, row)) + " |" for row in rows),
    ]
    Path(RESULT).write_text("\n".join(lines) + "\n")
