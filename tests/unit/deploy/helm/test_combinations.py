"""No example and no combination of values renders what a cluster would refuse, or cut, or never start."""

from __future__ import annotations

from collections import Counter

import pytest

from support.kubernetes.chart import CASES, case, render
from support.kubernetes.combinations import GIVEN, VLLM, merged, rows
from support.kubernetes.commands import check_command, services
from support.kubernetes.faults import faults, store_users
from support.kubernetes.manifests import containers, of_kind
from support.kubernetes.validation import validate

ROWS = rows()
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
    manifests = render(ROWS[at])
    assert faults(manifests, GIVEN) == [], ROWS[at]
    for manifest in manifests:
        validate(manifest, "1.37")
    for manifest in services(manifests):
        check_command(manifest)
    names = Counter((one["kind"], one["metadata"]["name"]) for one in manifests)
    assert max(names.values()) == 1


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
    assert names == [[], ["triptych-colocated"], ["triptych-vllm"], ["triptych-colocated", "triptych-vllm"]]
    assert len({checksum for _, checksum in found}) == 4


def test_no_container_has_a_cpu_limit_by_default() -> None:
    for manifest in of_kind(case("defaults"), "Deployment", "StatefulSet"):
        assert not [one for one in containers(manifest) if "cpu" in one["resources"]["limits"]]
