"""What pods of a release wait for, found or missed by kubectl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from support.kubernetes.chart import CASES, Manifest, case, example, notes
from support.kubernetes.manifests import of_kind
from triptych.apps.cli.app import app
from triptych.apps.doctor.finding import CheckOutcome
from triptych.apps.doctor.release import _OWN, ClusterNeed, check_needs, look_at_release, needs_of

#: kubectl's words for a kind, and the notes'.
SINGULAR = {
    "persistentvolumeclaims": "persistentvolumeclaim",
    "storageclasses": "storageclass",
    "priorityclasses": "priorityclass",
    "runtimeclasses": "runtimeclass",
    "secrets": "secret",
}
OWN = ("Deployment", "StatefulSet", "Job", "PersistentVolumeClaim")


def words(need: ClusterNeed) -> str:
    """As the notes have kubectl look for it."""
    if need.kind == "nodes":
        return "get nodes --selector " + ",".join(f"{key}={value}" for key, value in need.labels)
    return f"get {SINGULAR[need.kind]} {need.name}".rstrip()


def made(manifests: Sequence[Manifest]) -> dict[str, list[Any]]:
    """What the release brings itself."""
    secrets = [*of_kind(manifests, "Secret")]
    secrets += [
        {"metadata": {"name": one["spec"]["secretName"]}} for one in of_kind(manifests, "Certificate")
    ]
    return {**dict.fromkeys((*SINGULAR, "nodes"), []), "secrets": secrets} | {
        "persistentvolumeclaims": of_kind(manifests, "PersistentVolumeClaim")
    }


@pytest.mark.parametrize("name", CASES)
def test_in_a_cluster_that_has_nothing_else_it_misses_what_the_notes_name(name: str) -> None:
    manifests, told = case(name), notes(None if name == "defaults" else example(name))
    needs = needs_of(of_kind(manifests, *OWN))
    there = made(manifests)
    missed = {need for need, whom in needs.items() if check_needs({need: whom}, there)[0].remedy}
    for need in missed:
        assert (need.kind == "nodes" and not need.labels) or f"{words(need)}   #" in told, need
        for resource, _ in need.offers:
            # Of network cards the notes say nothing: their plugins are not what people forget.
            assert f"nodes with {resource}" in told or resource.startswith("rdma/")
    listed = [line for line in told.splitlines() if line.startswith("  kubectl") and "   # " in line]
    assert len({words(need) for need in missed if need.kind != "nodes" or need.labels}) == len(listed)


def test_each_need_is_found_and_the_findings_say_for_whom() -> None:
    needs = needs_of(of_kind(case("idle-cpu-encoders"), *OWN))
    there: dict[str, Any] = {
        "persistentvolumeclaims": [{"metadata": {"name": "models"}}],
        "priorityclasses": [{"metadata": {"name": "idle"}}],
        "secrets": [{"metadata": {"name": need.name}} for need in needs if need.kind == "secrets"],
        "nodes": [
            {
                "metadata": {"labels": dict(need.labels)},
                "status": {"allocatable": {key: str(n) for key, n in need.offers}},
            }
            for need in needs
            if need.kind == "nodes"
        ],
    }
    results = check_needs(needs, there)
    assert {each.verdict for each in results} == {CheckOutcome.OK}
    (claim,) = (each for each in results if each.check == "claim models")
    assert "triptych-encoder-default" in claim.found and "triptych-pd-default" in claim.found
    for kind in there:
        failed = [
            each for each in check_needs(needs, {**there, kind: []}) if each.verdict is CheckOutcome.FAIL
        ]
        assert failed and all(each.remedy for each in failed), kind
    told = [each for each in check_needs(needs, {**there, "nodes": "Forbidden"}) if "Forbidden" in each.found]
    assert told and {each.verdict for each in told} == {CheckOutcome.NOTE}


def test_a_node_needs_both_the_labels_and_enough_of_what_a_plugin_offers() -> None:
    need = ClusterNeed("nodes", "card", (("card", "l4"),), (("nvidia.com/gpu", 2),))

    def verdict(labels: dict[str, str], count: str) -> CheckOutcome:
        node = {"metadata": {"labels": labels}, "status": {"allocatable": {"nvidia.com/gpu": count}}}
        return check_needs({need: ["pd"]}, {"nodes": [node]})[0].verdict

    assert verdict({"card": "l4", "zone": "a"}, "2") is CheckOutcome.OK
    assert verdict({"card": "l4"}, "1") is verdict({"card": "h100"}, "8") is CheckOutcome.FAIL


def test_what_containers_and_sidecars_of_a_pod_ask_of_a_node_adds_up() -> None:
    def asks(count: Any, **more: str) -> dict[str, Any]:
        return {"resources": {"limits": {"nvidia.com/gpu": count, "cpu": "2"}}, **more}

    before = [asks("1", restartPolicy="Always"), asks(2)]
    pod = {"initContainers": before, "containers": [asks("2"), {}]}
    (need,) = needs_of([{"kind": "Job", "metadata": {"name": "j"}, "spec": {"template": {"spec": pod}}}])
    assert need.offers == (("nvidia.com/gpu", 3),)


@pytest.mark.parametrize(("there", "enough"), [("1k", True), ("1M", True), ("999", False)])
def test_a_thousand_of_a_plugins_devices_are_written_with_a_letter(there: str, enough: bool) -> None:
    need = ClusterNeed("nodes", "cards", (), (("rdma/shared", 1000),))
    node = {"metadata": {}, "status": {"allocatable": {"rdma/shared": there}}}
    (result,) = check_needs({need: ["pd"]}, {"nodes": [node]})
    assert result.verdict is (CheckOutcome.OK if enough else CheckOutcome.FAIL)


def test_a_claim_without_a_class_waits_for_the_default_one() -> None:
    need = ClusterNeed("storageclasses")
    marked = {"storageclass.kubernetes.io/is-default-class": "true"}
    for given, verdict in (({}, CheckOutcome.FAIL), (marked, CheckOutcome.OK)):
        found = {"storageclasses": [{"metadata": {"name": "standard", "annotations": given}}]}
        assert check_needs({need: ["models"]}, found)[0].verdict is verdict


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in that answers by the second word from a folder, and logs its words."""
    folder = tmp_path / "answers"
    folder.mkdir()
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/log\n'
        f'cat "{folder}/$2" 2>/dev/null && exit 0\n'
        'echo "noise" >&2; echo "Error from server (Forbidden): $2 is forbidden" >&2; exit 1\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return folder


def test_the_doctor_asks_kubectl_in_the_releases_namespace_and_fails_by_what_it_misses(
    kubectl: Path,
) -> None:
    manifests = of_kind(case("idle-cpu-encoders"), *OWN)
    (kubectl / _OWN).write_text(json.dumps({"items": manifests}))
    (kubectl / "persistentvolumeclaims").write_text(json.dumps({"items": []}))
    (kubectl / "priorityclasses").write_text(json.dumps({"items": [{"metadata": {"name": "idle"}}]}))
    names = {need.name for need in needs_of(manifests) if need.kind == "secrets"}
    (kubectl / "secrets").write_text("".join(f"secret/{name}\n" for name in names))
    shown = CliRunner().invoke(app, ["doctor", "--cluster", "models/triptych"])
    assert shown.exit_code == 1, shown.output
    assert "FAIL  claim models" in shown.output and "pods stay Pending (" in shown.output
    assert "ok    priority class idle" in shown.output and "machine" not in shown.output
    assert "not known: Error from server (Forbidden): nodes is forbidden" in shown.output
    asked = (kubectl / "log").read_text()
    assert "--namespace models --selector app.kubernetes.io/instance=triptych" in asked
    assert "get secrets --namespace models --output name" in asked and "get nodes --output json" in asked


def test_a_release_that_is_not_there_and_a_machine_without_kubectl_are_named(
    kubectl: Path, monkeypatch
) -> None:
    (kubectl / _OWN).write_text(json.dumps({"items": []}))
    (nothing,) = look_at_release("mine")
    assert nothing.verdict is CheckOutcome.FAIL and "helm list" in nothing.remedy
    (kubectl / _OWN).write_text("<html>")
    assert "JSONDecodeError" in look_at_release("mine")[0].found
    (kubectl / _OWN).unlink()
    assert "Forbidden" in look_at_release("mine")[0].found
    monkeypatch.setenv("PATH", "/nonexistent")
    (lacking,) = look_at_release("mine")
    assert lacking.found == "kubectl is not installed here"
