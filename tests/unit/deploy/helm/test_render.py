"""The chart renders, lints and is valid Kubernetes, for every example."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
from helm_python.chart import lint

from support.kubernetes.chart import CHART, Manifest, example, examples, render

#: The oldest version that the chart allows, and the newest one with a schema.
VERSIONS = ("1.30", "1.37")
CASES = ["defaults", *examples()]


def values_of(case: str) -> dict[str, Any]:
    return {} if case == "defaults" else example(case)


def is_kubernetes(manifest: Manifest) -> bool:
    """Whether the kind is Kubernetes' own, not of a custom resource."""
    group = manifest["apiVersion"].rpartition("/")[0]
    return "." not in group or group.endswith(".k8s.io")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", CASES)
def test_every_object_is_valid(case: str, version: str) -> None:
    manifests = [one for one in render(values_of(case)) if is_kubernetes(one)]
    assert manifests
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("case", CASES)
def test_helm_has_nothing_to_complain_of(case: str) -> None:
    report = lint(CHART, values_of(case), strict=True)
    # Severity 1 is information: a chart without an icon.
    assert [one for one in report["messages"] if one["severity"] > 1] == []
    assert report["errors"] == []


def test_a_typo_in_a_manifest_is_found() -> None:
    manifest = next(one for one in render() if one["kind"] == "Deployment")
    manifest["spec"]["replica"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, VERSIONS[0], strict=True)
