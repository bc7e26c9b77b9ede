"""What one object says of another is so: selectors, ports, Secrets, claims, routes."""

from __future__ import annotations

import re
from hashlib import sha256

import pytest

from support.kubernetes.chart import CASES, ROOT, Manifest, case, example, render
from support.kubernetes.manifests import (
    SecretKey,
    called,
    component,
    main_container,
    of_kind,
    peer,
    pod,
    secrets_made,
    secrets_read,
    workloads,
)
from support.kubernetes.reach import selects
from triptych.proxy.auth.keys import KeyLimits, parse_key_lines

#: Secrets that the values of an example name, with the keys that the README asks of them.
GIVEN = {
    "external-redis": {
        SecretKey("triptych-internal", "token"),
        SecretKey("triptych-keys", "keys"),
        SecretKey("redis-ca", "ca.crt"),
        *(SecretKey("triptych-tls", key) for key in ("tls.crt", "tls.key", "ca.crt")),
        *(SecretKey("triptych-store", role) for role in ("proxy", "encoder", "pd")),
    }
}


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
def test_a_service_has_pods_and_its_ports_are_theirs(name: str) -> None:
    manifests = case(name)
    for service in of_kind(manifests, "Service"):
        chosen = selected(manifests, service)
        assert chosen, service["metadata"]["name"]
        for port in service["spec"]["ports"]:
            assert all(port["targetPort"] in peer(one).ports for one in chosen)
            assert port["name"] == port["targetPort"]
            assert all(peer(one).ports[port["name"]] == port["port"] for one in chosen)


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
        assert ports == set(peer(manifest).ports)


@pytest.mark.parametrize("name", CASES)
def test_clients_see_neither_metrics_nor_the_scaler(name: str) -> None:
    service = called(case(name), "Service", "triptych-proxy")
    assert [port["name"] for port in service["spec"]["ports"]] == ["http", "grpc"]


@pytest.mark.parametrize("name", CASES)
def test_every_secret_that_is_read_is_made_or_named(name: str) -> None:
    manifests = case(name)
    read, made = set(secrets_read(manifests)), set(secrets_made(manifests))
    assert read - made == GIVEN.get(name, set())


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


@pytest.mark.parametrize("name", CASES)
def test_the_store_that_services_connect_to_is_a_service(name: str) -> None:
    manifests = case(name)
    for manifest in workloads(manifests):
        arguments = main_container(manifest).get("args", [])
        if "--store" not in arguments or name == "external-redis":
            continue
        scheme, _, rest = arguments[arguments.index("--store") + 1].partition("://")
        user, _, place = rest.rpartition("@")
        host, _, port = place.partition("/")[0].partition(":")
        assert scheme in ("redis", "rediss")
        assert user == f"triptych-{component(manifest)}"
        service = called(manifests, "Service", host.split(".")[0])
        assert host == f"{service['metadata']['name']}.default.svc"
        assert int(port) in [one["port"] for one in service["spec"]["ports"]]


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


def test_a_route_leads_to_the_proxies_and_outlasts_their_requests() -> None:
    manifests = case("mixed-cpu-gpu")
    (route,) = of_kind(manifests, "HTTPRoute")
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    service = called(manifests, "Service", backend["name"])
    assert backend["port"] in [port["port"] for port in service["spec"]["ports"]]
    arguments = main_container(called(manifests, "Deployment", "triptych-proxy"))["args"]
    timeout = float(arguments[arguments.index("--request-timeout") + 1])
    assert float(rule["timeouts"]["request"].removesuffix("s")) > timeout


def test_a_route_has_every_path_that_clients_use() -> None:
    (route,) = of_kind(case("mixed-cpu-gpu"), "HTTPRoute")
    matches = [one["path"] for one in route["spec"]["rules"][0]["matches"]]
    paths = set(re.findall(r'"(/[^"]*)"', (ROOT / "proxy/openai/app.py").read_text()))
    assert "/v1/chat/completions" in paths

    def routed(path: str) -> bool:
        return any(
            path == one["value"] if one["type"] == "Exact" else path.startswith(one["value"] + "/")
            for one in matches
        )

    # For probes and Prometheus, not for clients.
    assert {path for path in paths if not routed(path)} == {"/health", "/ready", "/metrics"}


def test_workers_wait_for_the_model_that_the_job_downloads() -> None:
    manifests = case("cpu-cluster")
    (job,) = of_kind(manifests, "Job")
    folder = next(one["value"] for one in main_container(job)["env"] if one["name"] == "FOLDER")
    for role in ("encoder", "pd"):
        deployment = called(manifests, "Deployment", f"triptych-{role}-default")
        assert main_container(deployment)["args"][1] == folder
        (wait,) = pod(deployment)["initContainers"]
        assert wait["env"] == [{"name": "COMPLETE", "value": f"{folder}/.complete"}]
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


def test_another_model_is_another_job_and_folder() -> None:
    def job(revision: str) -> Manifest:
        model = {"source": "download", "name": "m", "download": {"id": "a/b", "revision": revision}}
        return of_kind(render({"model": model | {"pvc": {"existingClaim": "c"}}}), "Job")[0]

    first, second = job("v1"), job("v2")
    assert first["metadata"]["name"] != second["metadata"]["name"]
    assert job("v1")["metadata"]["name"] == first["metadata"]["name"]
    assert main_container(first)["env"] != main_container(second)["env"]
