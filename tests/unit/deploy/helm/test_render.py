"""The chart renders for all combinations of values."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from kubernetes_validate.utils import schema_contents  # type: ignore[import-untyped]
from referencing import Registry, Resource

from support.kubernetes.chart import CASES, CHART, Manifest, case, render, render_upgrade
from support.kubernetes.combinations import GIVEN, VLLM, merged, rows
from support.kubernetes.commands import check_command, services
from support.kubernetes.faults import faults, store_users
from support.kubernetes.manifests import (
    SecretKey,
    called,
    component,
    containers,
    main_container,
    of_kind,
    secrets_made,
    secrets_read,
    workloads,
)
from triptych import __version__
from triptych.base.config import TlsFiles
from triptych.base.errors import ConfigError
from triptych.base.rpc.tls.material import read_material

_CUSTOM = Path(__file__).parents[3] / "support" / "kubernetes" / "custom_resources.json"


def validate(manifest: Manifest, version: str) -> None:
    """ValidationError for a field that the object's kind does not have, or a value that it does not take.

    `version` is Kubernetes', like "1.30".
    """
    group, _, number = manifest["apiVersion"].rpartition("/")
    if "." in group and not group.endswith(".k8s.io") or group.startswith(("gateway.", "inference.")):
        _custom().validate(manifest)
        return
    short = "-".join(one for one in (group.partition(".")[0], number) if one)
    _kubernetes(f"{manifest['kind'].lower()}-{short}", version).validate(manifest)


@cache
def _custom() -> Draft202012Validator:
    return Draft202012Validator(json.loads(_CUSTOM.read_text(encoding="utf-8")))


@cache
def _kubernetes(name: str, version: str) -> Draft202012Validator:
    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    schema = schema_contents(f"{folder}/{name}.json", version)
    registry: Registry[object] = Resource.from_contents(schema) @ _definitions(folder, version)
    return Draft202012Validator(schema, registry=registry)


@cache
def _definitions(folder: str, version: str) -> Registry[object]:
    found: Registry[object] = Registry()
    return Resource.from_contents(schema_contents(f"{folder}/_definitions.json", version)) @ found


#: The oldest version that the chart allows, and the newest one with a schema.
VERSIONS = ("1.30", "1.37")
EXTERNAL = {"url": "rediss://a:1/0", "clientSecret": "c", "caSecret": "d"}
#: Options by which every kind of object appears.
EVERYTHING = {
    "model": {"source": "download", "name": "m", "download": {"id": "a/b", "tokenSecret": {"name": "hf"}}},
    "proxy": {
        "autoscale": {"max": 4},
        "frontDoorTls": {"certManager": {"issuerRef": {"name": "public"}}, "hosts": ["m.example"]},
    },
    "encoderPools": [{"name": "gpu", "device": "cuda", "autoscale": {"max": 8}}],
    "pdPools": [{"name": "gpu", "device": "cuda", "autoscale": {"max": 3}}],
    "autoscaling": {"engine": "keda"},
    "tls": {"enabled": True, "certManager": {"issuerRef": {"name": "ca", "kind": "Issuer"}}},
    "gatewayApi": {"enabled": True, "parentRefs": [{"name": "public"}]},
    "ingress": {"enabled": True, "className": "nginx", "hosts": ["m.example"], "tlsSecret": "public"},
    "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
    "serviceMonitor": {"enabled": True},
    "prometheusRules": {"enabled": True},
    "dashboards": {"enabled": True},
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CASES)
def test_every_object_is_valid(name: str, version: str) -> None:
    if name in ("mixed-cpu-gpu", "air-gapped") and version == "1.30":
        version = "1.31"  # an image volume
    manifests = case(name)
    assert manifests
    for manifest in manifests:
        validate(manifest, version)


@pytest.mark.parametrize(
    "values",
    [
        {"podSecurity": {"runAsUser": None, "storeUser": None}, "serviceAccount": {"create": False}},
        {"proxy": {"service": {"type": "LoadBalancer", "loadBalancerSourceRanges": ["203.0.113.0/24"]}}},
        {"commonLabels": {"team": "x"}, "extraEnv": [{"name": "A", "value": "b"}], "logFormat": "json"},
        {
            "topologySpread": {"enabled": False},
            "pdb": {"enabled": False},
            "networkPolicy": {"enabled": False},
        },
        {"networkPolicy": {"dns": {"to": []}}, "encoderPools": [{"name": "a", "runtimeClassName": "nvidia"}]},
        {"store": {"mode": "external", "acl": False, "existingSecret": "s", "external": EXTERNAL}},
    ],
)
def test_objects_are_valid_with_rarer_options(values: dict[str, Any]) -> None:
    for manifest in render(values):
        validate(manifest, VERSIONS[0])


@pytest.mark.parametrize("name", CASES)
def test_names_are_unique_and_labels_are_the_recommended_ones(name: str) -> None:
    manifests = case(name)
    names = Counter((one["kind"], one["metadata"]["name"]) for one in manifests)
    assert [one for one, count in names.items() if count > 1] == []
    for manifest in manifests:
        labels = manifest["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "triptych"
        assert labels["app.kubernetes.io/instance"] == "triptych"
        assert labels["app.kubernetes.io/version"] == __version__
        assert manifest["metadata"]["namespace"] == "default"


def test_a_release_may_have_any_name_and_namespace() -> None:
    manifests = render(EVERYTHING, name="blue", namespace="models")
    for manifest in manifests:
        assert manifest["metadata"]["name"].startswith("blue")
        assert manifest["metadata"]["namespace"] == "models"
    assert set(secrets_read(manifests)) - set(secrets_made(manifests)) == {SecretKey("hf", "token")}
    for scaled in of_kind(manifests, "ScaledObject"):
        assert called(manifests, "Deployment", scaled["spec"]["scaleTargetRef"]["name"])
        address = scaled["spec"]["triggers"][0]["metadata"]["scalerAddress"]
        assert address == "blue-proxy-internal.models.svc:6000"
    arguments = main_container(called(manifests, "Deployment", "blue-proxy"))["args"]
    assert "blue-store-0.models.svc" in arguments[arguments.index("--store") + 1]


def test_a_long_name_stays_within_kubernetes_limits() -> None:
    for manifest in render(EVERYTHING, name="a" * 53):
        assert len(manifest["metadata"]["name"]) <= 63


def test_a_secret_that_is_not_given_is_random_and_long() -> None:
    first, second = (
        {one["metadata"]["name"]: one["stringData"] for one in render() if one["kind"] == "Secret"}
        for _ in range(2)
    )
    assert len(first["triptych-internal-token"]["token"]) == 48
    assert first["triptych-internal-token"] != second["triptych-internal-token"]
    assert first["triptych-store"] != second["triptych-store"]
    passwords = [first["triptych-store"][role] for role in ("proxy", "encoder", "pd")]
    assert len(set(passwords)) == 3


def test_an_upgrade_keeps_every_secret_and_makes_what_is_missing(tmp_path: Path) -> None:
    before = [one for one in render() if one["kind"] == "Secret"]
    kept = [one for one in render_upgrade(tmp_path / "kept", before) if one["kind"] == "Secret"]
    assert kept == before
    without = [one for one in before if one["metadata"]["name"] != "triptych-tls"]
    after = [one for one in render_upgrade(tmp_path / "made", without) if one["kind"] == "Secret"]
    assert [one for one in after if one["metadata"]["name"] != "triptych-tls"] == without
    assert called(after, "Secret", "triptych-tls") != called(before, "Secret", "triptych-tls")


def test_the_charts_own_certificate_is_one_of_services_keda_and_the_store(tmp_path: Path) -> None:
    made = called(render(name="blue", namespace="models"), "Secret", "blue-tls")["stringData"]
    for name, content in made.items():
        (tmp_path / name).write_text(content)
    cert, key, ca = (str(tmp_path / name) for name in ("tls.crt", "tls.key", "ca.crt"))
    for name in ("triptych.internal", "blue-proxy-internal.models.svc", "blue-store-0.models.svc"):
        # As a server of this name and as a client, for nearly ten years.
        material = read_material(TlsFiles(cert, key, ca, name))
        assert 3640 < (material.not_after - time.time()) / 86400 < 3651
    with pytest.raises(ConfigError, match="mismatch"):
        read_material(TlsFiles(cert, key, ca, "blue-store-0.others.svc"))


ROWS = rows()


@cache
def combination(at: int) -> list[Manifest]:
    """The manifests of a row. They are shared: copy what shall be changed."""
    return render(ROWS[at])


#: Secrets that the examples name.
OF_EXAMPLES = GIVEN | {
    "triptych-internal": GIVEN["tokens"],
    "triptych-keys": GIVEN["keys"],
    "redis-ca": GIVEN["certificates"],
    "triptych-tls": GIVEN["certificates"],
    "triptych-store": GIVEN["roles"],
}


@pytest.mark.parametrize("name", CASES)
def test_no_example_has_a_fault(name: str) -> None:
    assert faults(case(name), OF_EXAMPLES if name == "external-redis" else {}) == []


@pytest.mark.parametrize("at", range(len(ROWS)))
def test_no_combination_has_a_fault(at: int) -> None:
    manifests = combination(at)
    assert faults(manifests, GIVEN) == [], ROWS[at]
    for manifest in manifests:
        validate(manifest, "1.37")
    for manifest in services(manifests):
        check_command(manifest)
    names = Counter((one["kind"], one["metadata"]["name"]) for one in manifests)
    assert max(names.values()) == 1


def test_the_flags_that_args_may_not_repeat_are_those_that_the_chart_sets() -> None:
    (listed,) = re.findall(r'splitList " " "(--[^"]+)"', (CHART / "templates/_checks.tpl").read_text())
    containers = [main_container(one) for at in range(len(ROWS)) for one in workloads(combination(at))]
    words = {word for one in containers if one["command"] == ["triptych"] for word in one["args"]}
    # Pools of several models, which no combination scales.
    proxy = next(one for one in workloads(case("several-models")) if component(one) == "proxy")
    words.update(main_container(proxy)["args"])
    # Encoders beside vLLM have --dtype from their own args; a worker's drain may be shorter; --worker-kind is
    # refused where the chart sets it.
    given = {"--drain-timeout", "--dtype", "--worker-kind"}
    assert {one for one in words if one.startswith("--")} - given == set(listed.split())


def test_the_store_is_replaced_when_its_users_change_and_never_else() -> None:
    found = [combination(at) for at, values in enumerate(ROWS) if "mode" not in values.get("store", {})]
    made = [
        one for one in found if any("users.acl" in secret["stringData"] for secret in of_kind(one, "Secret"))
    ]
    users, checksums = zip(*{store_users(one) for one in made}, strict=True)
    assert len(users) == len(set(users)) == len(set(checksums)) > 1


def test_a_pool_with_a_user_of_its_own_replaces_the_store() -> None:
    colocated = {"colocatedPools": [{"name": "a"}]}
    vllm = merged({"model": {"source": "image", "name": "m", "image": {"reference": "r.example/m:1"}}}, VLLM)
    found = [store_users(render(values)) for values in ({}, colocated, vllm, merged(colocated, vllm))]
    names = [users.split()[4:] for users, _ in found]
    assert names == [[], ["triptych-colocated"], ["triptych-vllm"], ["triptych-colocated", "triptych-vllm"]]
    assert len({checksum for _, checksum in found}) == 4


def test_no_container_has_a_cpu_limit_by_default() -> None:
    for manifest in of_kind(case("defaults"), "Deployment", "StatefulSet"):
        assert not [one for one in containers(manifest) if "cpu" in one["resources"]["limits"]]
