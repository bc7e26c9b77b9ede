"""What a container runs: command, args, environment and mounts of a pod's spec, resolved as a kubelet does.

Pure functions, but for the volumes, which are written into the pod's folder.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.kubernetes.manifests import amount

Manifest = dict[str, Any]

#: Addresses that would be the whole machine's, where a pod has only its own.
ANY_HOST = ("0.0.0.0", "::", "127.0.0.1")
#: Where a pod's worker finds its own vLLM.
OWN_ENGINE = "127.0.0.1:8000"
#: Mounts that stay the machine's: shared memory has no path that a process is given.
UNMOVED = ("/dev/shm",)
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")


class SpecError(Exception):
    """The API server or the kubelet would refuse this pod."""


@dataclass(frozen=True, slots=True)
class PodContext:
    """What the fields of one pod's containers may refer to: Secrets, and IP addresses by DNS name."""

    name: str
    ip: str
    folder: Path
    secrets: Mapping[str, Manifest]
    hosts: Mapping[str, str]
    #: Folders of volumes by the name of their claim.
    claims: Mapping[str, Path] = field(default_factory=dict)

    def in_pod(self, text: str) -> str:
        """The text with the pod's address in place of those that mean it there."""
        return self.ip if text in ANY_HOST else text.replace(OWN_ENGINE, f"{self.ip}:8000")


@dataclass(frozen=True, slots=True)
class Command:
    """A program with its arguments, in the pod's words, and its whole environment."""

    words: tuple[str, ...]
    environment: Mapping[str, str]


def resolve(container: Manifest, context: PodContext, mounts: Mapping[str, Path]) -> Command:
    """The container's command. SpecError for a reference to what is not there."""
    variables = _variables(container, context)
    words = [*container.get("command", ()), *container.get("args", ())]
    if not container.get("command"):
        raise SpecError(f"container {container['name']} has no command: images are not run here")

    def moved(text: str) -> str:
        return on_machine(with_hosts(context.in_pod(text), context.hosts), mounts)

    expanded = [expand(word, variables) for word in words]
    return Command(tuple(map(moved, expanded)), {name: moved(value) for name, value in variables.items()})


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)` replaced where NAME is known; `$$` is a dollar."""

    def value(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return variables.get(found[1], found[0])

    return _REFERENCE.sub(value, text)


def with_hosts(text: str, hosts: Mapping[str, str]) -> str:
    """DNS names replaced by addresses, where they stand as a whole: between //, @, commas and a port."""
    for name in sorted(hosts, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])(?=[:/,]|$)", hosts[name], text)
    return text


def on_machine(text: str, mounts: Mapping[str, Path]) -> str:
    """Paths below a mount replaced by those below its folder, in one pass."""
    moved = [path for path in mounts if path not in UNMOVED]
    if not moved:
        return text
    paths = "|".join(re.escape(path) for path in sorted(moved, key=len, reverse=True))
    return re.sub(rf"(?<![\w/.-])({paths})(?=[/,:]|$)", lambda found: str(mounts[found[1]]), text)


def _variables(container: Manifest, context: PodContext) -> dict[str, str]:
    variables: dict[str, str] = {}
    for one in container.get("env", ()):
        if "valueFrom" in one:
            variables[one["name"]] = _value_from(one["valueFrom"], container, context)
        else:
            variables[one["name"]] = expand(str(one.get("value", "")), variables)
    return variables


def _value_from(source: Manifest, container: Manifest, context: PodContext) -> str:
    if reference := source.get("resourceFieldRef"):
        return _whole(container, reference)
    if "fieldRef" in source:
        return _field(source["fieldRef"]["fieldPath"], context)
    raise SpecError(f"valueFrom {sorted(source)} is not modelled")


def _whole(container: Manifest, reference: Manifest) -> str:
    """A request or limit in units of the divisor, rounded up; 0 where the container has none."""
    kind, _, name = reference["resource"].partition(".")
    given = container.get("resources", {}).get(kind, {}).get(name, 0)
    return str(math.ceil(amount(given) / amount(reference["divisor"])))


def _field(path: str, context: PodContext) -> str:
    fields = {"metadata.name": context.name, "status.podIP": context.ip}
    if path not in fields:
        raise SpecError(f"fieldRef {path} is not modelled")
    return fields[path]


def make_volumes(spec: Manifest, context: PodContext) -> dict[str, Path]:
    """The pod's volumes as folders, by name; SpecError for one that cannot be mounted."""
    folders = {}
    for volume in spec.get("volumes", ()):
        name = volume["name"]
        folder = context.folder / "volumes" / name
        if "emptyDir" in volume:
            folder.mkdir(parents=True, exist_ok=True)
        elif "secret" in volume:
            _write(folder, context.secrets[volume["secret"]["secretName"]]["stringData"], volume["secret"])
        elif "persistentVolumeClaim" in volume:
            folder = context.claims[volume["persistentVolumeClaim"]["claimName"]]
        else:
            raise SpecError(f"volume {name} of kind {sorted(volume)} is not modelled")
        folders[name] = folder
    return folders


def _write(folder: Path, entries: Mapping[str, str], source: Manifest) -> None:
    folder.mkdir(parents=True)
    for item in source.get("items") or [{"key": key, "path": key} for key in entries]:
        (folder / item["path"]).write_text(entries[item["key"]])


def mounts_of(container: Manifest, volumes: Mapping[str, Path]) -> dict[str, Path]:
    """The folder at each of the container's mount paths."""
    mounts = container.get("volumeMounts", ())
    return {mount["mountPath"]: volumes[mount["name"]] for mount in mounts}
