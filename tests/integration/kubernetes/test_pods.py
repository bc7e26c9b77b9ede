"""The small Kubernetes of the tests does what Kubernetes does, with containers of a few lines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.kubernetes.cluster import MiniCluster
from support.kubernetes.pods import Pod, back_off
from support.kubernetes.small import container, service, workload
from support.waiting import until


@contextlib.asynccontextmanager
async def _cluster(folder: Path, nodes: int = 2) -> AsyncIterator[MiniCluster]:
    async with MiniCluster(folder, nodes=nodes, tempo=0.05, endpoint_delay=0.2) as cluster:
        yield cluster


def _say(pod: Pod, name: str) -> None:
    (pod.context.folder / "volumes" / "state" / name).touch()


async def _get(address: str) -> str:
    def read() -> str:
        with urllib.request.urlopen(f"http://{address}/", timeout=10) as reply:
            return str(reply.read().decode())

    return await asyncio.to_thread(read)


async def test_a_pod_gets_sigterm_after_its_hook_and_is_killed_when_the_grace_period_ends(
    tmp_path: Path,
) -> None:
    lazy = container(
        env=[{"name": "DRAIN", "value": "60"}], lifecycle={"preStop": {"exec": {"command": ["sleep", "1"]}}}
    )
    async with _cluster(tmp_path) as cluster:
        cluster.apply([workload(lazy, grace=2)])
        await cluster.wait_until_rolled_out()
        (pod,) = cluster.pods_of("web")
        cluster.scale("Deployment", "web", 0)
        await until(lambda: pod.terminating)
        assert "SIGTERM" not in pod.log()
        await until(lambda: cluster.gone)
        assert "SIGTERM" in pod.log()
        assert pod.containers[0].codes == [-9]
        assert pod.ended_in >= 2.0


async def test_a_container_that_ends_or_fails_its_liveness_probe_is_restarted(tmp_path: Path) -> None:
    alive = {"httpGet": {"path": "/health", "port": 9100}, "timeoutSeconds": 30, "failureThreshold": 2}
    startup = alive | {"failureThreshold": 1000}
    async with _cluster(tmp_path) as cluster:
        cluster.apply([workload(container(livenessProbe=alive, startupProbe=startup))])
        await cluster.wait_until_rolled_out()
        (pod,) = cluster.pods_of("web")
        state = pod.containers[0]
        assert state.process is not None
        os.kill(state.process.pid, 9)
        await until(lambda: state.restarts == ["exit code -9"] and pod.ready)
        _say(pod, "not-health")
        await until(lambda: len(state.restarts) > 1)
        assert state.restarts[1] == "liveness probe failed"
        assert state.codes == [-9, 0]


def test_restarts_back_off_as_kubernetes_does() -> None:
    assert [back_off(restarts) for restarts in (0, 1, 2, 3, 9)] == [0, 10, 20, 40, 300]


async def test_a_service_sends_to_ready_pods_and_refuses_without_any(tmp_path: Path) -> None:
    async with _cluster(tmp_path) as cluster:
        cluster.apply([service(), workload(container(env=[{"name": "REVISION", "value": "one"}]))])
        await cluster.wait_until_rolled_out()
        (pod,) = cluster.pods_of("web")
        address = cluster.address("web", 80)
        assert await _get(address) == "one"
        _say(pod, "not-ready")
        await until(lambda: not pod.ready)
        # The Service follows later, as kube-proxy does.
        assert await _get(address) == "one"

        async def refused() -> bool:
            try:
                await _get(address)
            except OSError:
                return True
            return False

        async with asyncio.timeout(30):
            while not await refused():
                await asyncio.sleep(0.05)


async def test_a_rollout_keeps_the_ready_pods_and_stops_at_one_that_never_gets_ready(tmp_path: Path) -> None:
    rules = {"strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}}
    async with _cluster(tmp_path) as cluster:
        cluster.apply([workload(container(), 2, **rules)])
        await cluster.wait_until_rolled_out()
        old = {pod.name for pod in cluster.pods_of("web")}
        sick = container(readinessProbe={"exec": {"command": ["false"]}, "periodSeconds": 1})
        cluster.apply([workload(sick, 2, **rules)])
        await until(lambda: len(cluster.pods_of("web")) == 3)
        await asyncio.sleep(1.0)
        pods = cluster.pods_of("web")
        assert {pod.name for pod in pods if pod.ready} == old
        cluster.apply([workload(container(env=[{"name": "REVISION", "value": "2"}]), 2, **rules)])
        await cluster.wait_until_rolled_out()
        assert not old & {pod.name for pod in cluster.pods_of("web")}


async def test_a_node_is_drained_no_faster_than_the_budget_allows(tmp_path: Path) -> None:
    budget = {
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "web"},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "web"}}},
    }
    async with _cluster(tmp_path) as cluster:
        cluster.apply([budget, workload(container(), 4)])
        await cluster.wait_until_rolled_out()
        least = 4
        draining = asyncio.create_task(cluster.drain("node-0"))
        while not draining.done():
            least = min(least, sum(pod.ready for pod in cluster.pods_of("web")))
            await asyncio.sleep(0.01)
        await draining
        await cluster.wait_until_rolled_out()
        assert {pod.context.node for pod in cluster.pods_of("web")} == {"node-1"}
        assert least == 3


async def test_a_statefulset_is_updated_from_its_highest_pod_and_keeps_names(tmp_path: Path) -> None:
    async with _cluster(tmp_path) as cluster:
        cluster.apply([workload(container(), 3, kind="StatefulSet")])
        await cluster.wait_until_rolled_out()
        newer = container(env=[{"name": "REVISION", "value": "2"}])
        cluster.apply([workload(newer, 3, kind="StatefulSet")])
        await cluster.wait_until_rolled_out()
        assert [pod.name for pod in cluster.gone] == ["web-2", "web-1", "web-0"]
        assert {pod.name for pod in cluster.pods_of("web")} == {"web-0", "web-1", "web-2"}


async def test_a_changed_secret_reaches_the_files_of_a_running_pod(tmp_path: Path) -> None:
    secret = {"kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"key": "old"}}
    one = workload(container(volumeMounts=[{"name": "state", "mountPath": "/state"}]))
    one["spec"]["template"]["spec"]["volumes"] = [{"name": "state", "secret": {"secretName": "keys"}}]
    async with _cluster(tmp_path) as cluster:
        cluster.apply([secret, one])
        await cluster.wait_until_rolled_out()
        (pod,) = cluster.pods_of("web")
        path = pod.context.folder / "volumes" / "state" / "key"
        assert path.read_text() == "old"
        cluster.apply([secret | {"stringData": {"key": "new"}}])
        assert path.read_text() == "new"


async def test_a_pod_without_its_secret_does_not_start_and_says_so(tmp_path: Path) -> None:
    one = workload(container())
    one["spec"]["template"]["spec"]["volumes"] = [{"name": "state", "secret": {"secretName": "keys"}}]
    async with _cluster(tmp_path) as cluster:
        cluster.apply([one])
        await until(lambda: cluster.pods_of("web") and cluster.pods_of("web")[0].errors)
        assert cluster.pods_of("web")[0].errors == ["there is no Secret keys"]
        with pytest.raises(AssertionError, match="there is no Secret keys"):
            await cluster.wait_until_rolled_out(seconds=0.5)
