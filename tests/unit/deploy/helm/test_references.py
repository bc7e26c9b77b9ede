"""What one object says of another is so: selectors, ports, Secrets, claims, routes."""

from __future__ import annotations

import re
from hashlib import sha256

import pytest

from support.kubernetes.chart import CASES, ROOT, Manifest, case, example, render
from support.kubernetes.manifests import (
    called,
    component,
    containers,
    main_container,
    of_kind,
    peer,
    pod,
    workloads,
)
from support.kubernetes.reach import selects
from triptych.proxy.auth.keys import KeyLimits, parse_key_lines


def selected(manifests: list[Manifest], service: Manifest) -> list[Manifest]:
    """The workloads whose pods a Service selects."""
    selector = dict(service["spec"]["selector"])
    # Set by the StatefulSet's controller on each of its pods.
    selector.pop("statefulset.kubernetes.io/pod-name", None)
    return [one for one in workloads(manifests) if selects({"matchLabels": selector}, peer(one).labels)]


@pytest.mark.parametrize("name", CASES)
def test_a_workload_selects_its_own_pods_and_no_others(name: str) -> None:
    found = [one for one in workloads(case(name)) if one["kind"] != "Job"]
    for manifest in found:
        chosen = [one for one in found if selects(manifest["spec"]["selector"], peer(one).labels)]
        assert chosen == [manifest]


@pytest.mark.parametrize("name", CASES)
def test_every_port_of_a_pod_is_in_a_service(name: str) -> None:
    manifests = case(name)
    for manifest in of_kind(manifests, "Deployment", "StatefulSet"):
        ports = {
            port["targetPort"]
            for service in of_kind(manifests, "Service")
            if manifest in selected(manifests, service)
            for port in service["spec"]["ports"]
        }
        offered = peer(manifest).ports
        # Those of sidecars stand as numbers.
        assert {offered.get(str(one), one) for one in ports} == set(offered.values())


@pytest.mark.parametrize("name", CASES)
def test_clients_see_neither_metrics_nor_the_scaler(name: str) -> None:
    service = called(case(name), "Service", "triptych-proxy")
    assert [port["name"] for port in service["spec"]["ports"]] == ["http", "grpc"]


@pytest.mark.parametrize("name", CASES)
def test_every_service_account_and_claim_is_made_or_named(name: str) -> None:
    manifests = case(name)
    claims = {one["metadata"]["name"] for one in of_kind(manifests, "PersistentVolumeClaim")}
    given = {} if name == "defaults" else example(name)
    claims.add(given.get("model", {}).get("pvc", {}).get("existingClaim", ""))
    for manifest in workloads(manifests):
        assert called(manifests, "ServiceAccount", pod(manifest)["serviceAccountName"])
        for volume in pod(manifest)["volumes"]:
            assert volume.get("persistentVolumeClaim", {}).get("claimName", "") in claims | {""}


def test_the_store_has_an_address_that_outlives_its_pod() -> None:
    manifests = render()
    proxy = called(manifests, "Deployment", "triptych-proxy")
    arguments = main_container(proxy)["args"]
    url = arguments[arguments.index("--store") + 1]
    assert url.partition("@")[2] == "triptych-store-0.default.svc:6379/0"
    service = called(manifests, "Service", "triptych-store-0")
    assert "clusterIP" not in service["spec"]
    assert service["spec"]["selector"]["statefulset.kubernetes.io/pod-name"] == "triptych-store-0"


def test_the_key_that_the_chart_makes_opens_the_door() -> None:
    data = called(render(), "Secret", "triptych-api-keys")["stringData"]
    (entry,) = parse_key_lines(data["keys"], KeyLimits())
    assert entry.digest == sha256(data["key"].encode()).digest()
    assert entry.principal.id == "default"


def test_monitors_select_pods_with_a_metrics_port() -> None:
    for kind, block, ends in (
        ("ServiceMonitor", "serviceMonitor", "endpoints"),
        ("PodMonitor", "podMonitor", "podMetricsEndpoints"),
    ):
        manifests = render({block: {"enabled": True}})
        (monitor,) = of_kind(manifests, kind)
        (end,) = monitor["spec"][ends]
        objects = of_kind(manifests, "Service") if kind == "ServiceMonitor" else workloads(manifests)
        scraped = []
        for one in objects:
            labels = one["metadata"]["labels"] if kind == "ServiceMonitor" else peer(one).labels
            ports = (
                [port["name"] for port in one["spec"]["ports"]]
                if kind == "ServiceMonitor"
                else list(peer(one).ports)
            )
            if selects(monitor["spec"]["selector"], labels) and end["port"] in ports:
                scraped.append(component(one))
        assert sorted(scraped) == ["encoder", "pd", "proxy"]


def test_a_route_has_every_path_that_clients_use() -> None:
    (route,) = of_kind(case("mixed-cpu-gpu"), "HTTPRoute")
    matches = [one["path"] for one in route["spec"]["rules"][0]["matches"]]
    paths = set(re.findall(r'"(/\w[^"]*)"', (ROOT / "proxy/openai/app.py").read_text()))
    assert "/v1/chat/completions" in paths

    def routed(path: str) -> bool:
        return any(
            path == one["value"] if one["type"] == "Exact" else path.startswith(one["value"] + "/")
            for one in matches
        )

    # For probes and Prometheus, not for clients.
    assert {path for path in paths if not routed(path)} == {"/health", "/ready", "/metrics"}


def test_an_ingress_has_the_routes_paths_for_each_host_or_for_all() -> None:
    (route,) = of_kind(case("mixed-cpu-gpu"), "HTTPRoute")
    paths = [one["path"]["value"] for one in route["spec"]["rules"][0]["matches"]]
    for hosts in ([], ["a.example", "b.example"]):
        (ingress,) = of_kind(render({"ingress": {"enabled": True, "hosts": hosts}}), "Ingress")
        assert [rule.get("host") for rule in ingress["spec"]["rules"]] == (hosts or [None])
        for rule in ingress["spec"]["rules"]:
            assert [one["path"] for one in rule["http"]["paths"]] == paths


def test_an_inference_pool_selects_the_proxies_alone() -> None:
    manifests = render({"inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}}})
    (pool,) = of_kind(manifests, "InferencePool")
    chosen = [one for one in workloads(manifests) if selects(pool["spec"]["selector"], peer(one).labels)]
    assert [component(one) for one in chosen] == ["proxy"]
    assert {"number": peer(chosen[0]).ports["http"]} in pool["spec"]["targetPorts"]


def test_workers_wait_for_the_model_that_the_job_downloads() -> None:
    manifests = case("cpu-cluster")
    (job,) = of_kind(manifests, "Job")
    folder = next(one["value"] for one in main_container(job)["env"] if one["name"] == "FOLDER")
    for role in ("encoder", "pd"):
        deployment = called(manifests, "Deployment", f"triptych-{role}-default")
        assert main_container(deployment)["args"][1] == folder
        (wait,) = pod(deployment)["initContainers"]
        assert wait["env"][0] == {"name": "COMPLETE", "value": f"{folder}/.complete"}
        arguments = main_container(deployment)["args"]
        assert arguments[arguments.index("--model-revision") + 1] in folder


def test_without_a_shared_file_system_each_worker_fills_a_disk_of_its_own() -> None:
    download = {"id": "a/b", "revision": "v1", "tokenSecret": {"name": "hub"}}
    model = {"source": "download", "name": "m", "download": download, "pvc": {"storageClass": "gp3"}}
    manifests = render({"model": model})
    assert of_kind(manifests, "Job", "PersistentVolumeClaim") == []
    for role in ("encoder", "pd"):
        spec = pod(called(manifests, "Deployment", f"triptych-{role}-default"))
        (volume,) = [one for one in spec["volumes"] if one["name"] == "model"]
        claim = volume["ephemeral"]["volumeClaimTemplate"]["spec"]
        assert claim["accessModes"] == ["ReadWriteOnce"]
        assert claim["storageClassName"] == "gp3"
        (filled,) = spec["initContainers"]
        variables = {one["name"]: one.get("value") for one in filled["env"]}
        assert spec["containers"][0]["args"][1] == variables["FOLDER"]
        assert "HF_TOKEN" in variables
        assert {"name": "model", "mountPath": "/model"} in filled["volumeMounts"]


def test_a_pool_of_a_new_version_stands_beside_that_of_the_old_one() -> None:
    new = {"name": "new", "model": {"path": "v2", "revision": "two"}}
    values = {
        "model": {
            "source": "pvc",
            "name": "m",
            "path": "v1",
            "revision": "one",
            "pvc": {"existingClaim": "c"},
        },
        "encoderPools": [{"name": "old"}, new],
        "pdPools": [{"name": "old"}, new],
    }
    manifests = render(values)
    for role in ("encoder", "pd"):
        for pool, folder, revision in (("old", "/model/v1", "one"), ("new", "/model/v2", "two")):
            arguments = main_container(called(manifests, "Deployment", f"triptych-{role}-{pool}"))["args"]
            assert arguments[1] == folder
            assert arguments[arguments.index("--model-revision") + 1] == revision
            assert arguments[arguments.index("--served-model-name") + 1] == "m"


def test_several_models_are_served_by_pools_of_their_own_names() -> None:
    served = {}
    for manifest in workloads(case("several-models")):
        if component(manifest) in ("encoder", "pd", "colocated"):
            arguments = main_container(manifest)["args"]
            name = arguments[arguments.index("--served-model-name") + 1]
            served[manifest["metadata"]["name"].removeprefix("triptych-")] = (name, arguments[1])
            for sidecar in containers(manifest):
                if sidecar["name"] == "vllm":
                    words = sidecar["args"]
                    assert words[words.index("--served-model-name") + 1] == name and arguments[1] in words
    qwen3 = ("qwen3-vl-8b", "/model/Qwen3-VL-8B-Instruct")
    qwen25 = ("qwen2.5-vl-7b", "/model/Qwen2.5-VL-7B-Instruct")
    assert served == {
        "encoder-qwen3": qwen3,
        "encoder-qwen25": qwen25,
        "pd-qwen3": qwen3,
        "pd-qwen25": qwen25,
        "colocated-whisper": ("whisper-large-v3", "/model/whisper-large-v3"),
    }


def test_a_pool_with_weights_of_its_own_never_has_the_name_of_the_others() -> None:
    values = {
        "model": {"source": "image", "name": "m", "revision": "one", "image": {"reference": "a:1"}},
        "pdPools": [{"name": "new", "model": {"image": "a:2"}}],
    }
    manifests = render(values)
    deployment = called(manifests, "Deployment", "triptych-pd-new")
    assert "--model-revision" not in main_container(deployment)["args"]
    (volume,) = [one for one in pod(deployment)["volumes"] if one["name"] == "model"]
    assert volume["image"]["reference"] == "a:2"


def test_a_branch_names_no_weights() -> None:
    values = {"model": {"source": "download", "name": "m", "download": {"id": "a/b", "revision": "main"}}}
    for manifest in of_kind(render(values), "Deployment"):
        assert "--model-revision" not in main_container(manifest)["args"]
