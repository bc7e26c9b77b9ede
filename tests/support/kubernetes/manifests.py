"""Parts of rendered manifests: pods, containers, the secrets that they read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from support.kubernetes.chart import Manifest
from support.kubernetes.reach import Peer

WORKLOADS = ("Deployment", "StatefulSet", "Job")
_UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def amount(text: str | float) -> float:
    """A quantity as Kubernetes writes it."""
    match = re.fullmatch(r"([0-9.]+)([mkMGT]|[KMGT]i|)", str(text))
    assert match, text
    return float(match[1]) * _UNITS[match[2]]


def of_kind(manifests: Sequence[Manifest], *kinds: str) -> list[Manifest]:
    return [one for one in manifests if one["kind"] in kinds]


def called(manifests: Sequence[Manifest], kind: str, name: str) -> Manifest:
    """The one object of this kind and name; LookupError where there is none."""
    for one in of_kind(manifests, kind):
        if one["metadata"]["name"] == name:
            return one
    raise LookupError(f"no {kind} {name}")


def workloads(manifests: Sequence[Manifest]) -> list[Manifest]:
    """All objects that make pods."""
    return of_kind(manifests, *WORKLOADS)


def component(manifest: Manifest) -> str:
    """proxy, encoder, pd, colocated, store or download; "" for what belongs to none."""
    return str(manifest["metadata"]["labels"].get("app.kubernetes.io/component", ""))


def pod(manifest: Manifest) -> dict[str, Any]:
    """The pod's spec of a workload."""
    spec: dict[str, Any] = manifest["spec"]["template"]["spec"]
    return spec


def containers(manifest: Manifest) -> list[dict[str, Any]]:
    """All containers of a workload's pod, the init containers first."""
    spec = pod(manifest)
    return [*spec.get("initContainers", []), *spec["containers"]]


def main_container(manifest: Manifest) -> dict[str, Any]:
    """The container that serves."""
    (only,) = pod(manifest)["containers"]
    found: dict[str, Any] = only
    return found


def peer(manifest: Manifest) -> Peer:
    """A workload's pod as an end of connections."""
    meta = manifest["spec"]["template"]["metadata"]
    ports = {
        one["name"]: one["containerPort"] for each in containers(manifest) for one in each.get("ports", [])
    }
    return Peer(meta["labels"], manifest["metadata"]["namespace"], ports)


@dataclass(frozen=True, slots=True)
class SecretKey:
    """One key of a Secret that something reads."""

    secret: str
    key: str


def secrets_read(manifests: Sequence[Manifest]) -> Iterator[SecretKey]:
    """Every key of a Secret that a pod or KEDA reads."""
    for one in workloads(manifests):
        for volume in pod(one).get("volumes", []):
            if secret := volume.get("secret"):
                yield from (SecretKey(secret["secretName"], item["key"]) for item in secret["items"])
        for container in containers(one):
            for variable in container.get("env", []):
                if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                    yield SecretKey(reference["name"], reference["key"])
    for one in of_kind(manifests, "TriggerAuthentication"):
        yield from (SecretKey(ref["name"], ref["key"]) for ref in one["spec"]["secretTargetRef"])


def secrets_made(manifests: Sequence[Manifest]) -> Iterator[SecretKey]:
    """Every key of a Secret that the release makes, or has cert-manager make."""
    for one in of_kind(manifests, "Secret"):
        yield from (SecretKey(one["metadata"]["name"], key) for key in one["stringData"])
    for one in of_kind(manifests, "Certificate"):
        for key in ("tls.crt", "tls.key", "ca.crt"):
            yield SecretKey(one["spec"]["secretName"], key)
