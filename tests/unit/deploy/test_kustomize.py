"""The kustomize base is the chart's own rendering."""

from __future__ import annotations

import runpy

import yaml

from support.kubernetes.chart import ROOT, Manifest
from support.kubernetes.manifests import SecretKey, secrets_read
from support.kubernetes.validation import validate

FOLDER = ROOT / "deploy" / "kustomize"
BASE = FOLDER / "base"


def manifests() -> list[Manifest]:
    resources = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    return [one for name in resources for one in yaml.safe_load_all((BASE / name).read_text())]


def test_the_base_is_rendered_from_the_chart() -> None:
    made = runpy.run_path(str(FOLDER / "render.py"))["base"]()
    kept = {path.name: path.read_text() for path in BASE.iterdir()}
    assert kept == made, "run: python deploy/kustomize/render.py"


def test_the_base_is_valid_and_belongs_to_no_namespace_and_no_release() -> None:
    found = manifests()
    assert {"Deployment", "StatefulSet", "Service", "NetworkPolicy", "PodDisruptionBudget"} <= {
        one["kind"] for one in found
    }
    for one in found:
        validate(one, "1.30")
        assert "namespace" not in one["metadata"]
        assert "Helm" not in repr(one)


def test_the_base_holds_no_secret_and_reads_those_that_the_docs_have_made() -> None:
    found = manifests()
    assert not [one for one in found if one["kind"] == "Secret"]
    assert set(secrets_read(found)) == {
        SecretKey("triptych-internal-token", "token"),
        SecretKey("triptych-api-keys", "keys"),
        *(SecretKey("triptych-store", key) for key in ("proxy", "encoder", "pd", "users.acl")),
    }
