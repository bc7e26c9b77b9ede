"""What `helm install` prints: how to reach the release, what is open, and what its pods wait for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from support.kubernetes.chart import CASES, Manifest, case, example, notes, render
from support.kubernetes.combinations import rows
from support.kubernetes.manifests import of_kind, pod, secrets_made, secrets_read, workloads
from triptych import __version__

ROWS = rows()


def needed(manifests: Sequence[Manifest]) -> Iterator[str]:
    """What pods wait for and the release does not make, as the words by which kubectl finds it."""
    made = {one["metadata"]["name"] for one in of_kind(manifests, "PersistentVolumeClaim")}
    own = {one.secret for one in secrets_made(manifests)}
    for one in [*manifests, *(pod(each) for each in workloads(manifests))]:
        if one.get("kind") == "PersistentVolumeClaim":
            yield from _classes(one["spec"])
        for volume in one.get("volumes", []):
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim and claim not in made:
                yield f"persistentvolumeclaim {claim}"
            if "ephemeral" in volume:
                yield from _classes(volume["ephemeral"]["volumeClaimTemplate"]["spec"])
        if name := one.get("priorityClassName"):
            yield f"priorityclass {name}"
        if name := one.get("runtimeClassName"):
            yield f"runtimeclass {name}"
        if labels := one.get("nodeSelector"):
            yield "nodes --selector " + ",".join(f"{key}={labels[key]}" for key in sorted(labels))
        yield from (f"secret {secret['name']}" for secret in one.get("imagePullSecrets", []))
    yield from (f"secret {one.secret}" for one in secrets_read(manifests) if one.secret not in own)


def _classes(claim: dict[str, Any]) -> Iterator[str]:
    name = claim.get("storageClassName")
    yield f"storageclass {name}" if name else "storageclass"


def listed(text: str) -> set[str]:
    """What the notes have kubectl look for."""
    return set(re.findall(r"kubectl (?:--namespace \S+ )?get ([^#\n]*[^#\n ]) +#", text))


@pytest.mark.parametrize("name", CASES)
def test_what_an_example_waits_for_is_in_its_notes_and_nothing_else(name: str) -> None:
    assert listed(notes(None if name == "defaults" else example(name))) == set(needed(case(name)))


@pytest.mark.parametrize("at", range(len(ROWS)))
def test_what_a_combination_waits_for_is_in_its_notes_and_nothing_else(at: int) -> None:
    assert listed(notes(ROWS[at])) == set(needed(render(ROWS[at]))), ROWS[at]


def test_the_notes_say_what_happens_without_it_and_for_whom() -> None:
    text = notes(example("idle-cpu-encoders"), namespace="models")
    assert "--namespace models get persistentvolumeclaim models" in text and "stay Pending" in text
    assert re.search(r"get priorityclass idle +# encoderPools.default: .*no pod", text)
    assert re.search(r"pdPools.default: nodes with nvidia.com/gpu", text)
    labels = notes(example("mixed-cpu-gpu"))
    assert re.search(r"nodes --selector nvidia.com/gpu.product=NVIDIA-L40S +# pdPools.l40s", labels)
    assert "must be there" not in notes()


def test_the_notes_name_the_service_and_say_what_is_open() -> None:
    text = notes(name="blue", namespace="models")
    assert "kubectl --namespace models port-forward service/blue-proxy 8000:8000" in text
    assert "get secret blue-api-keys" in text
    assert "WARNING: tls.enabled is false" not in text
    assert "WARNING: tls.enabled is false" in notes({"tls": {"enabled": False}})
    assert f"triptych-proxy:{__version__}, which is not there" in text and "set image.registry" in text
    assert "which is not there" not in notes({"image": {"registry": "registry.example"}})
    open_door = notes({"apiKeys": {"enabled": False}, "networkPolicy": {"enabled": False}})
    assert "WARNING: apiKeys.enabled is false" in open_door
    assert "WARNING: networkPolicy.enabled is false" in open_door
    assert "WARNING" not in text
