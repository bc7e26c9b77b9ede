"""No example and no combination of values renders what a cluster would refuse, or cut, or never start."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from support.kubernetes.chart import CASES, Manifest, case, render
from support.kubernetes.combinations import CHOICES, GIVEN, VLLM, merged, rows
from support.kubernetes.commands import check_command, services
from support.kubernetes.faults import faults, store_users
from support.kubernetes.manifests import called, containers, main_container, of_kind, pod
from support.kubernetes.validation import validate

ROWS = rows()
#: Secrets that the examples name.
OF_EXAMPLES = GIVEN | {
    "triptych-internal": GIVEN["tokens"],
    "triptych-keys": GIVEN["keys"],
    "redis-ca": GIVEN["certificates"],
    "triptych-store": GIVEN["roles"],
}


@pytest.mark.parametrize("name", CASES)
def test_no_example_has_a_fault(name: str) -> None:
    assert faults(case(name), OF_EXAMPLES if name == "external-redis" else {}) == []


@pytest.mark.parametrize("at", range(len(ROWS)))
def test_no_combination_has_a_fault(at: int) -> None:
    manifests = render(ROWS[at])
    assert faults(manifests, GIVEN) == [], ROWS[at]
    for manifest in manifests:
        validate(manifest, "1.37")
    for manifest in services(manifests):
        check_command(manifest)
    names = Counter((one["kind"], one["metadata"]["name"]) for one in manifests)
    assert max(names.values()) == 1


def test_the_combinations_are_of_more_than_forty_values() -> None:
    assert len(CHOICES) >= 40


def test_the_store_is_replaced_when_its_users_change_and_never_else() -> None:
    found = [render(values) for values in ROWS if "mode" not in values.get("store", {})]
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
    assert names == [
        [],
        ["triptych-colocated"],
        ["triptych-vllm"],
        ["triptych-colocated", "triptych-vllm"],
    ]
    assert len({checksum for _, checksum in found}) == 4


def first(manifests: list[Manifest], name: str = "triptych-proxy", kind: str = "Deployment") -> Manifest:
    return called(manifests, kind, name)


def lower_a_limit(manifests: list[Manifest]) -> None:
    main_container(first(manifests))["resources"]["limits"]["cpu"] = "500m"


def ask_for_a_gpu_without_a_limit(manifests: list[Manifest]) -> None:
    main_container(first(manifests))["resources"]["requests"]["nvidia.com/gpu"] = "1"


def forget_the_request(manifests: list[Manifest]) -> None:
    container = main_container(first(manifests))
    container["env"] = [one for one in container["env"] if one["name"] != "TRIPTYCH_CPU_REQUEST"]


def forget_a_volume(manifests: list[Manifest]) -> None:
    pod(first(manifests))["volumes"].pop()


def forget_a_key(manifests: list[Manifest]) -> None:
    del first(manifests, "triptych-store", "Secret")["stringData"]["pd"]


def forget_a_user(manifests: list[Manifest]) -> None:
    data = first(manifests, "triptych-store", "Secret")["stringData"]
    data["users.acl"] = data["users.acl"].replace("user triptych-vllm ", "user triptych-other ")


def lengthen_requests(manifests: list[Manifest]) -> None:
    words = main_container(first(manifests))["args"]
    words[words.index("--request-timeout") + 1] = "1800"


def shorten_the_grace_period(manifests: list[Manifest]) -> None:
    pod(first(manifests))["terminationGracePeriodSeconds"] = 310


def shorten_the_route(manifests: list[Manifest]) -> None:
    (route,) = of_kind(manifests, "HTTPRoute")
    route["spec"]["rules"][0]["timeouts"]["request"] = "4m"


def ask_kube_dns_alone(manifests: list[Manifest]) -> None:
    (_, *more) = first(manifests, kind="NetworkPolicy")["spec"]["egress"][0]["to"]
    for one in more:
        first(manifests, kind="NetworkPolicy")["spec"]["egress"][0]["to"].remove(one)


def share_a_disk(manifests: list[Manifest]) -> None:
    (claim,) = of_kind(manifests, "PersistentVolumeClaim")
    claim["spec"]["accessModes"] = ["ReadWriteOnce"]


def take_the_default_class(manifests: list[Manifest]) -> None:
    (claim,) = of_kind(manifests, "PersistentVolumeClaim")
    del claim["spec"]["storageClassName"]


def leave_a_disk_empty(manifests: list[Manifest]) -> None:
    spec = pod(first(manifests, "triptych-encoder-default"))
    volume = next(one for one in spec["volumes"] if one["name"] == "model")
    volume["ephemeral"] = {"volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteOnce"]}}}
    del volume["persistentVolumeClaim"]


def forget_the_stores_port(manifests: list[Manifest]) -> None:
    first(manifests, "triptych-encoder", "NetworkPolicy")["spec"]["egress"][1]["ports"][0]["port"] = 6380


def spool_more(manifests: list[Manifest]) -> None:
    words = main_container(first(manifests))["args"]
    words[words.index("--media-disk") + 1] = str(6 << 30)


def enlarge_shared_memory(manifests: list[Manifest]) -> None:
    spec = pod(first(manifests, "triptych-pd-default"))
    next(one for one in spec["volumes"] if one["name"] == "shm")["emptyDir"]["sizeLimit"] = "16Gi"


@pytest.mark.parametrize(
    ("put_back", "words"),
    [
        (lower_a_limit, "above its limit 500m"),
        (ask_for_a_gpu_without_a_limit, "which is not its limit"),
        (forget_the_request, "not told the CPUs"),
        (forget_a_volume, "which is no volume of its pod"),
        (forget_a_key, "nothing makes the key pd of the Secret triptych-store"),
        (forget_a_user, "logs in as triptych-vllm, whom the store does not know"),
        (lengthen_requests, "no longer than a request takes"),
        (shorten_the_grace_period, "is killed before its drain"),
        (shorten_the_route, "the route ends requests after 4m"),
        (ask_kube_dns_alone, "169.254.20.10"),
        (ask_kube_dns_alone, "openshift-dns"),
        (share_a_disk, "which one node can mount"),
        (take_the_default_class, "which one node can mount"),
        (leave_a_disk_empty, "that nothing fills"),
        (forget_the_stores_port, "does not reach port 6379 of its store"),
        (spool_more, "spools more than its volume"),
        (enlarge_shared_memory, "a /dev/shm above the memory of vllm"),
    ],
)
def test_a_fault_that_is_put_back_is_reported(put_back: Callable[[list[Manifest]], None], words: str) -> None:
    model = {"source": "download", "name": "m", "download": {"id": "a/b"}}
    values: dict[str, Any] = {
        "model": model | {"pvc": {"accessModes": ["ReadWriteMany"], "storageClass": "nfs"}},
        "gatewayApi": {"enabled": True, "parentRefs": [{"name": "g"}]},
    }
    manifests = copy.deepcopy(render(values | VLLM))
    assert faults(manifests) == []
    put_back(manifests)
    assert words in "\n".join(faults(manifests))


def test_no_container_has_a_cpu_limit_by_default() -> None:
    for manifest in of_kind(case("defaults"), "Deployment", "StatefulSet"):
        assert not [one for one in containers(manifest) if "cpu" in one["resources"]["limits"]]
