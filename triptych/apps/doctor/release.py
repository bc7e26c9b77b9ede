"""Checks of a release of the chart in Kubernetes: whether what its pods wait for is there, by kubectl.

`helm install` succeeds without a claim, a class or a node that values name, and nothing becomes ready.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from triptych.apps.doctor.finding import CheckResult, fail, note, ok
from triptych.base.types import JsonObject

_SECONDS = 30
#: What makes pods, and the claims that the chart makes.
_OWN = "deployments,statefulsets,jobs,persistentvolumeclaims"
#: The class that claims without one get is marked so.
_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
#: What each kind is called in a finding, and what pods do without it.
_WITHOUT = {
    "persistentvolumeclaims": ("claim", "pods stay Pending"),
    "storageclasses": ("storage class", "the claim stays Pending"),
    "priorityclasses": ("priority class", "no pod is made"),
    "runtimeclasses": ("runtime class", "no pod is made"),
    "secrets": ("secret", "pods do not start"),
    "nodes": ("nodes", "pods stay Pending"),
}
_NAMESPACED = ("persistentvolumeclaims", "secrets")


class ClusterNeed(NamedTuple):
    """An object that pods wait for: its kind as kubectl has it, and its name.

    Of nodes the name is their labels and the extended resources that one of them has to offer. No name: the
    default storage class.
    """

    kind: str
    name: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    offers: tuple[tuple[str, int], ...] = ()


def needs_of(objects: Iterable[JsonObject]) -> dict[ClusterNeed, list[str]]:
    """What workloads and claims of a release wait for, with the names of those that do."""
    found: dict[ClusterNeed, list[str]] = {}
    for one in objects:
        name = str(one["metadata"]["name"])
        is_claim = one["kind"] == "PersistentVolumeClaim"
        for need in _of_claim(one["spec"]) if is_claim else _of_pod(one["spec"]["template"]["spec"]):
            if name not in found.setdefault(need, []):
                found[need].append(name)
    return found


def _of_claim(spec: JsonObject) -> Iterator[ClusterNeed]:
    yield ClusterNeed("storageclasses", spec.get("storageClassName") or "")


def _of_pod(pod: JsonObject) -> Iterator[ClusterNeed]:
    for volume in pod.get("volumes") or ():
        if claim := volume.get("persistentVolumeClaim"):
            yield ClusterNeed("persistentvolumeclaims", claim["claimName"])
        if template := volume.get("ephemeral"):
            yield from _of_claim(template["volumeClaimTemplate"]["spec"])
        if secret := volume.get("secret"):
            yield ClusterNeed("secrets", secret["secretName"])
    for kind in ("priorityclasses", "runtimeclasses"):
        if name := pod.get(f"{kind.removesuffix('classes')}ClassName"):
            yield ClusterNeed(kind, name)
    for secret in pod.get("imagePullSecrets") or ():
        yield ClusterNeed("secrets", secret["name"])
    before = pod.get("initContainers") or ()
    # Sidecars: they run beside the containers, whose needs add up; of the others one runs at a time.
    beside = [*pod["containers"], *(each for each in before if each.get("restartPolicy") == "Always")]
    containers = (*before, *pod["containers"])
    for variable in (each for container in containers for each in container.get("env") or ()):
        if reference := (variable.get("valueFrom") or {}).get("secretKeyRef"):
            yield ClusterNeed("secrets", reference["name"])
    offers = sum(map(_devices, beside), Counter[str]())
    for container in before:
        offers |= _devices(container)
    labels = tuple(sorted((pod.get("nodeSelector") or {}).items()))
    if labels or offers:
        shown = [f"{key}={value}" for key, value in labels] + [f"{n} {key}" for key, n in offers.items()]
        yield ClusterNeed("nodes", ", ".join(shown), labels, tuple(sorted(offers.items())))


def _devices(container: JsonObject) -> Counter[str]:
    """GPUs, network cards and whatever else of a device plugin a container asks for."""
    limits = (container.get("resources") or {}).get("limits") or {}
    return Counter({resource: _number(amount) for resource, amount in limits.items() if "/" in resource})


def _number(quantity: str | int) -> int:
    """A whole number as Kubernetes writes it: 1000 is "1k"."""
    text = str(quantity)
    factor = {"k": 10**3, "M": 10**6, "G": 10**9}.get(text[-1:], 1)
    return int(text.rstrip("kMG")) * factor


def check_needs(
    needs: Mapping[ClusterNeed, Sequence[str]], there: Mapping[str, Sequence[JsonObject] | str]
) -> list[CheckResult]:
    """A finding for each need. `there` has the cluster's objects by kind, or why they could not be listed."""
    results = []
    for need, whom in sorted(needs.items()):
        what, without = _WITHOUT[need.kind]
        check = f"{what} {need.name or '(default)'}"
        found = there[need.kind]
        if isinstance(found, str):
            remedy = f"ask for the right to list {need.kind}, or have their owner look for it"
            results.append(note(check, f"not known: {found}", remedy))
        elif any(_fits(need, each) for each in found):
            results.append(ok(check, f"is there, for {', '.join(whom)}"))
        else:
            results.append(fail(check, f"none: {without} ({', '.join(whom)})", _remedy(need)))
    return results


def _fits(need: ClusterNeed, found: JsonObject) -> bool:
    about = found["metadata"]
    if need.kind == "nodes":
        labels, offered = about.get("labels") or {}, found.get("status", {}).get("allocatable") or {}
        return all(labels.get(key) == value for key, value in need.labels) and all(
            _number(offered.get(resource, 0)) >= amount for resource, amount in need.offers
        )
    if not need.name:
        return (about.get("annotations") or {}).get(_DEFAULT_CLASS) == "true"
    return bool(about["name"] == need.name)


def _remedy(need: ClusterNeed) -> str:
    if need.kind == "nodes":
        label = "label nodes so, or change nodeSelector" if need.labels else ""
        plugin = "install the device plugin, or take nodes that offer it" if need.offers else ""
        return "; ".join(filter(None, (label, plugin)))
    if not need.name:
        return "mark a StorageClass as the default, or name one by model.pvc.storageClass"
    return "make it, or name another in the values (the release's notes say by which)"


def look_at_release(given: str) -> list[CheckResult]:
    """The findings on the release `given`, NAME or NAMESPACE/NAME, in the cluster of kubectl's context."""
    namespace, _, name = given.rpartition("/")
    scope = ["--namespace", namespace] if namespace else []
    own = _listed(_OWN, *scope, "--selector", f"app.kubernetes.io/instance={name}")
    if isinstance(own, str):
        return [fail("release", own, "give --cluster a release that `kubectl` of this shell reaches")]
    if not own:
        remedy = "give NAMESPACE/NAME as `helm list --all-namespaces` has them"
        return [fail("release", f"{given}: nothing of it is there", remedy)]
    needs = needs_of(own)
    there = {
        kind: _listed(kind, *(scope if kind in _NAMESPACED else ()))
        for kind in sorted({need.kind for need in needs})
    }
    made = sum(one["kind"] != "PersistentVolumeClaim" for one in own)
    return [ok("release", f"{given}: {made} workloads"), *check_needs(needs, there)]


def _listed(kinds: str, *words: str) -> list[JsonObject] | str:
    """The objects that kubectl lists, or why it does not. Of Secrets their names alone."""
    output = "name" if kinds == "secrets" else "json"
    command = ["kubectl", "get", kinds, *words, "--output", output, f"--request-timeout={_SECONDS}s"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=2 * _SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        if output == "name":
            return [{"metadata": {"name": line.partition("/")[2]}} for line in done.stdout.splitlines()]
        items: list[JsonObject] = json.loads(done.stdout)["items"]
        return items
    except FileNotFoundError:
        return "kubectl is not installed here"
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines()
        return lines[-1] if lines else f"kubectl ended with {error.returncode}"
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError) as error:
        return f"kubectl: {type(error).__name__} {error}"
