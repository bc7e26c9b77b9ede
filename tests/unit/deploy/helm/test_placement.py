"""Where pods stand: an encoder beside vLLM, the node's network, RDMA devices, NUMA nodes."""

from __future__ import annotations

from typing import Any

import pytest

from support.kubernetes.chart import Manifest, case, example, notes, render
from support.kubernetes.commands import CONFIGS
from support.kubernetes.manifests import called, component, containers, main_container, of_kind, peer, pod
from support.kubernetes.reach import Peer, allowed
from support.options import parse
from triptych.base.config import EncoderConfig

BESIDE = example("encoder-in-the-pod")
NODE = Peer(address="10.0.3.4")
PROMETHEUS = Peer(namespace="monitoring")


def deployment(manifests: list[Manifest], kind: str, pool: str = "default") -> Manifest:
    return called(manifests, "Deployment", f"triptych-{kind}-{pool}")


def named(manifest: Manifest, name: str) -> dict[str, Any]:
    (found,) = [one for one in containers(manifest) if one["name"] == name]
    return found


def encoder_config(container: dict[str, Any]) -> EncoderConfig:
    words = [word.replace("$(POD_IP)", "10.1.2.3") for word in container["args"]]
    config = parse(CONFIGS["encoder"], *words)
    assert isinstance(config, EncoderConfig)
    return config


def test_an_encoder_in_the_pod_starts_before_the_worker_and_has_ports_and_a_user_of_its_own() -> None:
    manifests = case("encoder-in-the-pod")
    manifest = deployment(manifests, "pd")
    container = named(manifest, "encoder")
    assert container["restartPolicy"] == "Always"
    names = [one["name"] for one in pod(manifest)["initContainers"]]
    assert names == ["encoder", "namespace", "vllm"]
    config = encoder_config(container)
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert (config.port, config.ec_transfer_port, config.metrics_port) == tuple(ports.values())
    assert config.advertise == f"10.1.2.3:{config.port}"
    assert config.dtype == BESIDE["pd"]["vllm"]["dtype"]
    assert config.store.startswith("rediss://triptych-encoder@")
    every = [port["containerPort"] for one in containers(manifest) for port in one.get("ports", [])]
    assert len(every) == len(set(every)) and 8000 not in every
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == "encoder-metrics"
    passwords = [one["name"] for one in container["volumeMounts"] if "password" in one["name"]]
    assert passwords == ["store-password-encoder"]
    assert not [one for one in of_kind(manifests, "Deployment") if component(one) == "encoder"]


def test_proxies_other_pods_and_prometheus_reach_an_encoder_in_a_pod_and_nobody_else_does() -> None:
    manifests = case("encoder-in-the-pod")
    policies = of_kind(manifests, "NetworkPolicy")
    proxy = peer(called(manifests, "Deployment", "triptych-proxy"))
    worker = peer(deployment(manifests, "pd"))
    reached = {
        (name, port)
        for name, source in (
            ("proxy", proxy),
            ("worker", worker),
            ("prometheus", PROMETHEUS),
            ("other", Peer()),
        )
        for port in (50061, 50062, 9101)
        if allowed(policies, source, worker, port)
    }
    assert reached == {("proxy", 50061), ("worker", 50062), ("prometheus", 9101)}


@pytest.mark.parametrize("block", ["serviceMonitor", "podMonitor"])
def test_metrics_of_an_encoder_in_a_pod_are_an_encoders(block: str) -> None:
    kind = block[0].upper() + block[1:]
    ends = "endpoints" if block == "serviceMonitor" else "podMetricsEndpoints"
    for values, there in ((BESIDE, True), ({}, False)):
        (monitor,) = of_kind(render(values | {block: {"enabled": True}}), kind)
        own = [one for one in monitor["spec"][ends] if one["port"] == "encoder-metrics"]
        assert bool(own) is there
        for one in own:
            relabelled = {"targetLabel": "app_kubernetes_io_component", "replacement": "encoder"}
            assert one["relabelings"] == [relabelled]


def test_an_encoder_in_the_pod_of_a_native_worker_may_have_a_gpu_of_its_own() -> None:
    own = {"resources": {"requests": {"cpu": "3"}, "limits": {"memory": "4Gi"}}, "device": "cuda"}
    own |= {"gpuResource": "nvidia.com/mig-1g.20gb", "args": ["--dtype", "float16"]}
    manifest = deployment(render({"pd": {"encoder": own}, "encoderPools": []}), "pd")
    container = named(manifest, "encoder")
    assert container["resources"]["limits"]["nvidia.com/mig-1g.20gb"] == "1"
    assert container["image"].startswith("triptych-worker-cuda:")
    assert encoder_config(container).dtype == "float16"
    assert main_container(manifest)["image"].startswith("triptych-worker-cpu:")


def test_pods_on_the_nodes_network_have_ports_of_their_own_and_reach_the_store_and_each_other() -> None:
    manifests = case("host-network")
    policies = of_kind(manifests, "NetworkPolicy")
    taken: list[int] = []
    for kind, pool in (("encoder", "default"), ("pd", "first"), ("pd", "second")):
        manifest = deployment(manifests, kind, pool)
        spec = pod(manifest)
        assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
        # A new pod would wait for the ports of the old one.
        assert manifest["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
        taken += [port["containerPort"] for port in main_container(manifest)["ports"]]
        words = main_container(manifest)["args"]
        if kind == "pd":
            engine = named(manifest, "vllm")
            port = engine["args"][engine["args"].index("--port") + 1]
            assert words[words.index("--engine-url") + 1] == f"http://127.0.0.1:{port}"
            assert f"127.0.0.1:{port}/health" in str(engine["startupProbe"])
            taken.append(int(port))
    assert len(taken) == len(set(taken)) == 9
    store = peer(of_kind(manifests, "StatefulSet")[0])
    front = peer(called(manifests, "Deployment", "triptych-proxy"))
    assert allowed(policies, NODE, store, 6379)
    assert not allowed(policies, Peer(address="192.0.2.1"), store, 6379)
    assert [port for port in taken if allowed(policies, front, NODE, port)] == [50051, 50053, 50054]


def test_what_is_on_the_nodes_network_is_said_and_nothing_is_by_default() -> None:
    told = notes(example("host-network"))
    assert "encoderPools.default, pdPools.first, pdPools.second are on their nodes' network" in told
    assert "hostNetwork" not in notes() and "hostNetwork" not in str(render())


def test_encoders_near_pd_workers_stand_on_their_nodes() -> None:
    for near, rule in (("required", "required"), ("preferred", "preferred")):
        manifest = deployment(render({"encoder": {"nearPd": near}}), "encoder")
        ((name, (term,)),) = pod(manifest)["affinity"]["podAffinity"].items()
        assert name == f"{rule}DuringSchedulingIgnoredDuringExecution"
        wanted = term.get("podAffinityTerm", term)
        assert wanted["topologyKey"] == "kubernetes.io/hostname"
        assert wanted["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "pd"
    assert "affinity" not in pod(deployment(render(), "encoder"))


@pytest.mark.parametrize("source", ["pvc", "download", "container"])
def test_every_container_of_a_pod_that_stays_in_a_numa_node_has_its_requests_as_limits(source: str) -> None:
    model = {"source": source, "container": {"image": "r.example/aws:2"}, "download": {"id": "a/b"}}
    for modes in (["ReadWriteOnce"], ["ReadWriteMany"]):
        pvc = {"accessModes": modes, "storageClass": "nfs", "existingClaim": "c" if source == "pvc" else ""}
        values = example("rdma-numa")
        values["model"] = values["model"] | model | {"pvc": pvc}
        values["pd"]["encoder"] = {"resources": {"requests": {"cpu": "4", "memory": "4Gi"}}}
        manifests = render(values)
        for manifest in (deployment(manifests, "pd"), deployment(manifests, "encoder")):
            for container in containers(manifest):
                limits, requests = (container["resources"][name] for name in ("limits", "requests"))
                for name in ("cpu", "memory"):
                    assert requests[name] == limits[name], container["name"]


def test_an_rdma_device_is_the_computing_containers_and_memory_is_locked_where_asked() -> None:
    rdma = {"resource": "rdma/hca", "count": 2}
    before = deployment(case("rdma-numa"), "pd")
    for container in containers(before):
        computes = container["name"] == "vllm"
        limits = container["resources"]["limits"]
        assert limits.get("rdma/hca_shared_devices_a") == ("1" if computes else None)
        added = container["securityContext"]["capabilities"].get("add")
        assert added == (["IPC_LOCK"] if computes else None)
    native = main_container(deployment(render({"pd": {"rdma": rdma}}), "pd"))
    assert native["resources"]["limits"]["rdma/hca"] == "2"
    assert "add" not in native["securityContext"]["capabilities"]
