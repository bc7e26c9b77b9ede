"""Pods meet the restricted Pod Security Standard, and are replaced and moved without a gap."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from support.kubernetes.chart import CASES, Manifest, case, render, render_version
from support.kubernetes.manifests import (
    amount,
    called,
    component,
    containers,
    main_container,
    of_kind,
    pod,
    workloads,
)
from support.kubernetes.reach import selects


@pytest.mark.parametrize("name", CASES)
def test_every_pod_is_restricted(name: str) -> None:
    for manifest in workloads(case(name)):
        spec = pod(manifest)
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostPID", "hostIPC"} & set(spec)
        # Opted in, with a warning: Pod Security "privileged" alone allows them.
        assert name == "host-network" or "hostNetwork" not in spec
        assert not [one for one in spec["volumes"] if "hostPath" in one]
        for container in containers(manifest):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["privileged"] is False
            added = security["capabilities"].get("add", [])
            assert added == [] or (name, container["name"], added) == ("rdma-numa", "vllm", ["IPC_LOCK"])
            assert security["capabilities"]["drop"] == ["ALL"]
            assert not [port for port in container.get("ports", []) if "hostPort" in port]


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_has_a_volume_of_bounded_size(name: str) -> None:
    for manifest in workloads(case(name)):
        for volume in pod(manifest)["volumes"]:
            assert "emptyDir" not in volume or amount(volume["emptyDir"]["sizeLimit"]) > 0


@pytest.mark.parametrize("name", CASES)
def test_secrets_can_be_read_by_the_pods_group_alone(name: str) -> None:
    for manifest in workloads(case(name)):
        for volume in pod(manifest)["volumes"]:
            assert "secret" not in volume or volume["secret"]["defaultMode"] == 0o440
    # A mount of a single file would never see a rotated Secret.
    assert not [
        mount
        for manifest in workloads(case(name))
        for container in containers(manifest)
        for mount in container.get("volumeMounts", [])
        if "subPath" in mount
    ]


@pytest.mark.parametrize("name", CASES)
def test_no_password_stands_in_a_command_or_variable(name: str) -> None:
    manifests = case(name)
    secrets = [
        value
        for secret in of_kind(manifests, "Secret")
        for key, value in secret["stringData"].items()
        if key not in ("users.acl", "keys")
    ]
    for manifest in manifests:
        if manifest["kind"] != "Secret":
            assert not [one for one in secrets if one in repr(manifest)]


def test_the_users_of_the_store_have_hashes_alone() -> None:
    data = called(render(), "Secret", "triptych-store")["stringData"]
    assert "HASH" not in data["users.acl"]
    assert len(re.findall(r"#[0-9a-f]{64} ", data["users.acl"])) == 3
    assert not [role for role in ("proxy", "encoder", "pd") if data[role] in data["users.acl"]]


@pytest.mark.parametrize("name", CASES)
def test_a_pool_that_is_scaled_has_no_replicas_of_its_own(name: str) -> None:
    manifests = case(name)
    scaled = {
        one["spec"]["scaleTargetRef"]["name"]
        for one in of_kind(manifests, "ScaledObject", "HorizontalPodAutoscaler")
    }
    for manifest in of_kind(manifests, "Deployment", "StatefulSet"):
        assert ("replicas" in manifest["spec"]) is (manifest["metadata"]["name"] not in scaled)


@pytest.mark.parametrize("name", CASES)
def test_a_budget_always_lets_a_node_be_drained(name: str) -> None:
    manifests = case(name)
    budgets = of_kind(manifests, "PodDisruptionBudget")
    for manifest in [*of_kind(manifests, "Deployment"), *of_kind(manifests, "StatefulSet")]:
        labels = manifest["spec"]["template"]["metadata"]["labels"]
        (budget,) = [one for one in budgets if selects(one["spec"]["selector"], labels)]
        assert allowed_disruptions(budget, manifest["spec"].get("replicas", 1)) >= 1
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def allowed_disruptions(budget: Manifest, replicas: int) -> int:
    """Pods that may be away at once, rounded as Kubernetes does: up."""

    def pods(value: str | int) -> int:
        return value if isinstance(value, int) else math.ceil(int(value.removesuffix("%")) * replicas / 100)

    spec = budget["spec"]
    return pods(spec["maxUnavailable"]) if "maxUnavailable" in spec else replicas - pods(spec["minAvailable"])


@pytest.mark.parametrize("name", CASES)
def test_where_gpus_are_taken_a_pod_goes_before_the_next_one_comes(name: str) -> None:
    for manifest in of_kind(case(name), "Deployment"):
        update = manifest["spec"]["strategy"]["rollingUpdate"]
        limits = [one["resources"].get("limits", {}) for one in containers(manifest)]
        gpus = any(name.startswith("nvidia.com/") for one in limits for name in one)
        words = main_container(manifest)["args"]
        # The device of a worker in front of vLLM is the server's.
        assert "--engine" in words or gpus is any(word.startswith("cuda") for word in words)
        assert update == (
            {"maxSurge": 0, "maxUnavailable": 1} if gpus else {"maxSurge": 1, "maxUnavailable": 0}
        )


@pytest.mark.parametrize("name", CASES)
def test_a_proxy_leaves_its_service_before_it_drains_and_gives_requests_their_time(name: str) -> None:
    (proxy,) = [one for one in of_kind(case(name), "Deployment") if component(one) == "proxy"]
    container = main_container(proxy)
    assert container["lifecycle"]["preStop"]["sleep"]["seconds"] >= 5
    arguments = container["args"]
    timeout = float(arguments[arguments.index("--request-timeout") + 1])
    assert float(arguments[arguments.index("--drain-timeout") + 1]) >= timeout


@pytest.mark.parametrize("name", CASES)
def test_the_store_has_more_memory_than_its_values(name: str) -> None:
    for manifest in of_kind(case(name), "StatefulSet"):
        container = main_container(manifest)
        arguments = container["args"]
        values = int(arguments[arguments.index("--maxmemory") + 1])
        assert amount(container["resources"]["limits"]["memory"]) >= 1.25 * values + 2**28
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
        assert arguments[arguments.index("--maxmemory-policy") + 1] == "volatile-lru"
        assert arguments[arguments.index("--save") + 1] == ""


def test_an_image_takes_the_registry_that_stands_in_for_its_own() -> None:
    images = {"registry": "mirror.example:5000/x/", "tag": "7", "store": "docker.io/valkey/valkey:9.1"}
    manifests = render(
        {"image": images, "encoderPools": [{"name": "a", "image": "other/worker@sha256:" + "0" * 64}]}
    )
    found = {component(one): main_container(one)["image"] for one in workloads(manifests)}
    assert found == {
        "proxy": "mirror.example:5000/x/triptych-proxy:7",
        "encoder": "mirror.example:5000/x/other/worker@sha256:" + "0" * 64,
        "pd": "mirror.example:5000/x/triptych-worker-cpu:7",
        "store": "mirror.example:5000/x/valkey/valkey:9.1",
    }


def test_pods_of_an_ipv6_cluster_listen_and_advertise_so() -> None:
    for manifest in of_kind(render({"ipFamily": "ipv6"}), "Deployment"):
        arguments = main_container(manifest)["args"]
        assert arguments[arguments.index("--host") + 1] == "::"
        if component(manifest) != "proxy":
            assert arguments[arguments.index("--advertise") + 1] == "[$(POD_IP)]:50051"


def test_a_pool_takes_what_it_names_in_place_of_the_default() -> None:
    manifests = render(
        {
            "encoder": {"replicas": 3, "nodeSelector": {"a": "b"}, "args": ["--plan-credit", "4"]},
            "encoderPools": [{"name": "x"}, {"name": "y", "replicas": 0, "nodeSelector": {}, "args": []}],
        }
    )
    x = called(manifests, "Deployment", "triptych-encoder-x")
    y = called(manifests, "Deployment", "triptych-encoder-y")
    assert (x["spec"]["replicas"], y["spec"]["replicas"]) == (3, 0)
    assert pod(x)["nodeSelector"] == {"a": "b"}
    assert "nodeSelector" not in pod(y)
    assert main_container(x)["args"][-2:] == ["--plan-credit", "4"]
    assert "--plan-credit" not in main_container(y)["args"]


RANKS = {
    "encoder": {"device": "cuda", "dataParallel": 2},
    "pd": {"device": "cuda", "tensorParallel": 4},
    "colocatedPools": [{"name": "both"}],
}


def worker_of(values: dict[str, object], kind: str) -> Manifest:
    (found,) = [one for one in of_kind(render(values), "Deployment") if component(one) == kind]
    return found


@pytest.mark.parametrize(
    ("kind", "flags", "ranks"),
    [
        ("encoder", ["--encoder-data-parallel"], 2),
        ("pd", ["--tensor-parallel"], 4),
        ("colocated", ["--encoder-data-parallel", "--tensor-parallel"], 4),
    ],
)
def test_a_worker_of_several_ranks_has_a_gpu_for_each_and_room_for_nccl(kind, flags, ranks):
    container = main_container(worker_of(RANKS, kind))
    given = [word for word in container["args"] if word in ("--encoder-data-parallel", "--tensor-parallel")]
    assert given == flags
    assert all(container["args"][container["args"].index(flag) + 1] == str(ranks) for flag in flags)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == str(ranks)
    assert shared_memory(worker_of(RANKS, kind)) == "1Gi"
    side = "encoder" if kind == "encoder" else "pd"
    larger = {**RANKS, side: {**RANKS[side], "shmSize": "3Gi"}}
    assert shared_memory(worker_of(larger, kind)) == "3Gi"
    on_cpu = {**RANKS, side: {**RANKS[side], "device": "cpu"}}
    assert shared_memory(worker_of(on_cpu, kind)) == "64Mi"


def shared_memory(manifest: Manifest) -> str:
    (volume,) = [one for one in pod(manifest)["volumes"] if one["name"] == "shm"]
    assert volume["emptyDir"]["medium"] == "Memory"
    return str(volume["emptyDir"]["sizeLimit"])


def test_a_release_of_the_chart_restarts_no_pod_that_it_does_not_change(tmp_path: Path) -> None:
    """The store's least of all: what it holds is lost with its process."""
    values = {"image": {"tag": "7"}, "colocatedPools": [{"name": "both"}]}
    old = workloads(render_version(tmp_path / "old", "1.0.0", values))
    new = workloads(render_version(tmp_path / "new", "1.1.0", values))
    assert {component(one) for one in old} == {"proxy", "encoder", "pd", "colocated", "store"}
    assert [one["metadata"]["labels"] for one in old] != [one["metadata"]["labels"] for one in new]
    assert [one["spec"] for one in old] == [one["spec"] for one in new]


@pytest.mark.parametrize("name", CASES)
def test_the_store_is_asked_and_not_only_connected_to(name: str) -> None:
    """The kernel accepts connections for a server that hangs."""
    for manifest in of_kind(case(name), "StatefulSet"):
        container = main_container(manifest)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            command = container[probe]["exec"]["command"]
            assert (command[0], command[-1]) == ("valkey-cli", "ping")
            assert ("--tls" in command) is ("--tls-port" in container["args"])
