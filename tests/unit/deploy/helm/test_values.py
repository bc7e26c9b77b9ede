"""The values: a strict schema, a README made of it, and words for what does not fit together."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from helm_python.errors import HelmError
from jsonschema import Draft7Validator

from support.kubernetes.chart import CHART, ROOT, render
from support.kubernetes.manifests import called, main_container

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())


def objects(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema of an object with properties, by its place."""
    if isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict):
            yield path, schema
        for key, value in schema.items():
            yield from objects(value, f"{path}/{key}")
    elif isinstance(schema, list):
        for at, value in enumerate(schema):
            yield from objects(value, f"{path}/{at}")


def test_the_schema_is_one_and_takes_no_value_that_it_does_not_know() -> None:
    Draft7Validator.check_schema(SCHEMA)
    for path, one in objects(SCHEMA):
        assert one.get("additionalProperties") is False, path


def test_every_value_has_a_default_and_a_description() -> None:
    def compare(schema: dict[str, Any], default: object, path: str) -> None:
        assert schema["description"], path
        if "properties" in schema and default:
            assert isinstance(default, dict)
            assert set(schema["properties"]) == set(default), path
            for name, one in schema["properties"].items():
                compare(one, default[name], f"{path}.{name}")

    values = {name: one for name, one in SCHEMA["properties"].items() if name != "global"}
    compare({"description": "all", "properties": values}, DEFAULTS, "")


def test_the_readme_is_made_from_the_schema() -> None:
    spec = importlib.util.spec_from_file_location("chart_readme", ROOT / "deploy/helm/readme.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (CHART / "README.md").read_text() == module.readme(), "run: python deploy/helm/readme.py"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"proxy": {"replicas": "two"}}, "proxy/replicas"),
        ({"proxy": {"replica": 2}}, "replica"),
        ({"encoderPools": [{"name": "a", "devices": "cpu"}]}, "devices"),
        ({"encoderPools": [{"name": "Big_Pool"}]}, "encoderPools/0/name"),
        ({"encoderPools": [{}]}, "name"),
        ({"encoderPools": [{"name": "a", "device": "gpu"}]}, "device"),
        ({"encoderPools": [{"name": "a", "autoscale": {"min": 1}}]}, "autoscale"),
        ({"encoder": {"maxDecodeSeconds": 0}}, "maxDecodeSeconds"),
        ({"encoderPools": [{"name": "a", "storeRows": "int4"}]}, "storeRows"),
        ({"pdPools": [{"name": "a", "linearKernel": "mkl"}]}, "linearKernel"),
        ({"pdPools": [{"name": "a", "sharePrefixes": "yes"}]}, "sharePrefixes"),
        ({"pdPools": [{"name": "a", "role": "encode"}]}, "role"),
        ({"encoder": {"nearPd": "always"}}, "nearPd"),
        ({"encoder": {"ports": {"http": 80}}}, "http"),
        ({"pd": {"ports": {"grpc": 70000}}}, "ports/grpc"),
        ({"pd": {"rdma": {"count": 1}}}, "rdma"),
        ({"pd": {"rdma": {"resource": "hca"}}}, "rdma/resource"),
        ({"pd": {"encoder": {"args": []}}}, "encoder"),
        ({"networkPolicy": {"nodes": ["10.0.0.1"]}}, "nodes"),
        ({"proxy": {"prefillThreshold": -1}}, "prefillThreshold"),
        ({"model": {"source": "hub"}}, "model/source"),
        ({"store": {"maxMemory": "4 GB"}}, "maxMemory"),
        ({"store": {"external": {"ports": [70000]}}}, "ports"),
        ({"networkPolicy": {"prometheus": []}}, "prometheus"),
        ({"pdb": {"pd": {"minAvailable": 1}}}, "pdb/pd"),
        ({"logLevel": "trace"}, "logLevel"),
        ({"tls": {"certManager": {"issuerRef": {"kind": "Issuer"}}}}, "name"),
        ({"proxy": {"terminationGracePeriodSeconds": 5}}, "terminationGracePeriodSeconds"),
        ({"proxy": {"trustedProxies": ["gateway"]}}, "proxy/trustedProxies/0"),
        ({"store": {"mode": "external", "external": {"url": "redis.example:6379"}}}, "store/external/url"),
        ({"pd": None}, "missing property 'pd'"),
    ],
)
def test_a_value_that_the_schema_does_not_allow_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(HelmError, match=words):
        render(values)


KEDA = {"engine": "keda"}
GPUS = {"device": "cuda", "resources": {"limits": {"nvidia.com/gpu": 1}}}
OTHER = {"name": "m", "path": "m"}
SCALED = {"name": "a", "autoscale": {"max": 3}}
DOWNLOAD = {"source": "download", "name": "m", "download": {"id": "a/b"}}
SHARED = {"model": DOWNLOAD | {"pvc": {"accessModes": ["ReadWriteMany"]}}}
ROUTE = {"enabled": True, "parentRefs": [{"name": "g"}]}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model": {"source": "container", "name": "m"}}, "give an image that fills /model"),
        ({"image": {"registry": "https://a.b"}}, "image.registry is https://a.b, and an image's name has no"),
        (
            {"pd": GPUS | {"tensorParallel": 2}},
            "pdPools.default.resources: limits.nvidia.com/gpu is 1 and the worker has 2 ranks",
        ),
        (
            {"encoder": GPUS | {"dataParallel": 4}},
            "leave it out, or give it 4",
        ),
        (
            {"model": DOWNLOAD | {"pvc": {"storageClass": "d"}}, "pdPools": [{"name": "a", "model": OTHER}]},
            "model.path is /model/m, and each pod downloads onto a disk of its own into /model/a--b",
        ),
        ({"inferencePool": {"enabled": True}}, "name the Service of your endpoint picker"),
        ({"encoderPools": []}, "nothing could encode a picture; name a pool"),
        ({"pdPools": []}, "nothing could decode; name a pool"),
        ({"pdPools": [{"name": "a"}, {"name": "a"}]}, 'names the pool "a" twice'),
        ({"encoderPools": [SCALED]}, "set the engine to keda or hpa"),
        (
            {
                "encoderPools": [SCALED, {"name": "b", "model": {"name": "m", "path": "m"}}],
                "autoscaling": KEDA,
            },
            "model.name is empty: set it",
        ),
        (
            {
                "encoderPools": [SCALED | {"args": ["--worker-kind", "x"]}, {"name": "b"}],
                "autoscaling": KEDA,
            },
            "args has --worker-kind",
        ),
        (
            {"encoderPools": [{"name": "a", "autoscale": {"min": 4, "max": 3}}], "autoscaling": KEDA},
            "min 4 is above max 3",
        ),
        (
            {"pdPools": [{"name": "a", "autoscale": {"min": 0, "max": 3}}], "autoscaling": KEDA},
            "set it to 1 or more",
        ),
        (
            {
                "encoderPools": [{"name": "a", "autoscale": {"min": 0, "max": 3}}],
                "autoscaling": {"engine": "hpa"},
            },
            "set it to 1 or more",
        ),
        ({"proxy": {"preStopSeconds": 320}}, "at least 20 s must be left to drain"),
        (
            {"pdPools": [{"name": "a", "preStopSeconds": 290}]},
            "pdPools.a: terminationGracePeriodSeconds is 300",
        ),
        ({"store": {"mode": "external"}}, "give store.external.url"),
        (
            {"store": {"mode": "external", "external": {"url": "redis://a:1", "urlSecret": {"name": "b"}}}},
            "leave one of them out",
        ),
        ({"store": {"external": {"url": "redis://a:1"}}}, "set store.mode to external"),
        ({"store": {"external": {"urlSecret": {"name": "b"}}}}, "set store.mode to external"),
        ({"model": {"name": "m", "download": {"id": "a/b"}}}, "is given: set model.source to download"),
        ({"model": {"pvc": {"existingClaim": "c"}}}, "existingClaim is given: set model.source to pvc"),
        ({"model": {"image": {"reference": "a:1"}}}, "reference is given: set model.source to image"),
        ({"model": {"container": {"image": "a:1"}}}, "is given: set model.source to container"),
        ({"model": {"source": "image", "name": "m"}}, "give model.image.reference"),
        ({"model": {"source": "download", "name": "m"}}, "give model.download.id"),
        ({"model": {"source": "pvc"}}, "give the name that clients ask for"),
        ({"model": {"source": "pvc", "name": "m"}}, "give model.pvc.existingClaim, or ReadWriteMany"),
        (SHARED, "name a class of a shared file system"),
        ({"proxy": {"requestTimeout": 305}}, "set proxy.terminationGracePeriodSeconds to 331 or more"),
        ({"gatewayApi": ROUTE | {"requestTimeout": "4m"}}, "raise it to 300s or more"),
        ({"proxy": {"args": ["--request-timeout", "900"]}}, "proxy.args has --request-timeout, which the"),
        ({"encoder": {"args": ["--max-decode-seconds=9"]}}, "has --max-decode-seconds, which the chart sets"),
        ({"proxy": {"args": ["--drain-timeout=900"]}}, "proxy.args has --drain-timeout, which the chart"),
        ({"pdPools": [{"name": "a", "args": ["--port", "1"]}]}, "pdPools.a.args has --port, which the chart"),
        ({"encoder": {"args": ["--device", "cuda"]}}, "encoderPools.default.args has --device"),
        ({"proxy": {"args": ["--max-queue 5"]}}, 'has "--max-queue 5", one word: write two, --max-queue and'),
        ({"store": {"acl": False}}, "set store.acl to true, or store.mode to external"),
        (
            {"store": {"mode": "external", "existingSecret": "s", "external": {"urlSecret": {"name": "b"}}}},
            "cannot name the user of each role; give store.external.url, or set store.acl to false",
        ),
        (
            {"pd": {"resources": {"requests": {"memory": "64Gi"}}}},
            "limits.memory 8Gi, which may be a default",
        ),
        ({"proxy": {"resources": {"requests": {"cpu": 2}, "limits": {"cpu": 1.5}}}}, "give limits.cpu too"),
        (
            {
                "encoderPools": [
                    {"name": "a", "resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1500m"}}}
                ]
            },
            "encoderPools.a.resources: requests.cpu 2 is above limits.cpu 1500m",
        ),
        (
            {"proxy": {"resources": {"requests": {"nvidia.com/gpu": 1}}}},
            'requests.nvidia.com/gpu is 1 and limits.nvidia.com/gpu "": give both the same amount',
        ),
        (
            {"model": DOWNLOAD | {"download": {"id": "a/b", "resources": {"limits": {"memory": "512Mi"}}}}},
            "model.download.resources: requests.memory 1Gi is above",
        ),
        (
            {"store": {"resources": {"limits": {"memory": "4Gi"}}}},
            "raise the limit, or lower store.maxMemory",
        ),
        (
            {"commonLabels": {"app.kubernetes.io/component": "x"}},
            "commonLabels has app.kubernetes.io/component",
        ),
        ({"pd": {"podLabels": {"triptych/pool": "x"}}}, "pdPools.default.podLabels has triptych/pool"),
        ({"fullnameOverride": "1st"}, "begin with a letter: set fullnameOverride"),
        ({"fullnameOverride": "a.b"}, "begin with a letter: set fullnameOverride"),
        ({"encoder": {"shmSize": "4Gi"}}, "encoderPools.default: /dev/shm of 4Gi"),
        (
            {"store": {"mode": "external", "external": {"url": "redis://:p@a:1"}}},
            "leave it out, and give store.existingSecret",
        ),
        (
            {"store": {"mode": "external", "existingSecret": "s", "external": {"url": "redis://me@a:1"}}},
            "leave the user out, or set store.acl to false",
        ),
        ({"encoder": {"hostNetwork": True}}, "needs networkPolicy.nodes: the networks of the nodes"),
        (
            {
                "encoder": {"hostNetwork": True},
                "pd": {"hostNetwork": True},
                "networkPolicy": {"enabled": False},
            },
            "pdPools.default: hostNetwork with port 50051, which encoderPools.default has on the same nodes",
        ),
        ({"pd": {"ports": {"metrics": 50051}}}, "pdPools.default.ports has 50051 twice"),
        (
            {"pd": {"hostNetwork": True, "encoder": {"resources": {}}}, "networkPolicy": {"enabled": False}},
            "pdPools.default.encoder: the containers of a pod share its network",
        ),
        ({"pd": {"encoder": {"resources": {}, "args": ["--port", "1"]}}}, "encoder.args has --port, which"),
        (
            {"encoder": {"nearPd": "required", "affinity": {"podAffinity": {}}}},
            "encoderPools.default: nearPd is a podAffinity, and affinity has one too",
        ),
        (
            {"encoder": {"numa": True, "resources": {"requests": {"cpu": "1500m"}}}},
            "requests whole ones, and requests.cpu is 1500m: round it",
        ),
        ({"proxy": {"proxyProtocol": True}}, "proxy.proxyProtocol needs proxy.trustedProxies"),
        (
            {"proxy": {"frontDoorTls": {"certManager": {"issuerRef": {"name": "a"}}}}},
            "the names that clients connect to",
        ),
        ({"proxy": {"frontDoorTls": {"hosts": ["a.b"]}}}, "would be served without TLS: give"),
        (
            {"encoderPools": [SCALED | {"name": f"a{at}"} for at in range(33)], "autoscaling": KEDA},
            "33 pools are scaled, and the proxies scale 32 apart: take autoscale out of some",
        ),
        ({"gatewayApi": {"enabled": True}}, "the Gateway that the route belongs to"),
        ({"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}}, "scraped twice"),
        ({"proxy": {"autoscale": {"max": 1}}}, "min is above max"),
        (
            {"encoderPools": [{"name": "a", "model": {"name": "b"}}]},
            'encoderPools.a encodes for the model "b", which no PD pool has',
        ),
    ],
)
def test_values_that_do_not_fit_together_are_refused_with_the_remedy(values, words):
    with pytest.raises(HelmError, match=words):
        render(values)


def test_a_store_url_may_come_from_a_secret() -> None:
    values = {"store": {"mode": "external", "external": {"urlSecret": {"name": "redis", "key": "uri"}}}}
    for manifest in render(values):
        if manifest["kind"] == "Deployment":
            (container,) = manifest["spec"]["template"]["spec"]["containers"]
            assert "--store" not in container["args"]
            variables = {one["name"]: one for one in container["env"]}
            reference = variables["TRIPTYCH_STORE"]["valueFrom"]["secretKeyRef"]
            assert reference == {"name": "redis", "key": "uri"}


@pytest.mark.parametrize(
    ("given", "requested", "limit"),
    [
        ({}, 5637144576, 5637144576),
        ({"limits": {"memory": "8Gi"}}, "8Gi", "8Gi"),
        ({"requests": {"memory": "8Gi"}}, "8Gi", "8Gi"),
        ({"requests": {"memory": "2Gi"}}, "2Gi", 5637144576),
    ],
)
def test_the_stores_memory_is_what_the_values_say_or_what_it_needs(given, requested, limit):
    found = render({"store": {"resources": given}})
    resources = main_container(called(found, "StatefulSet", "triptych-store"))["resources"]
    assert (resources["requests"]["memory"], resources["limits"]["memory"]) == (str(requested), str(limit))
