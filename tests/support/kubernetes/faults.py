"""Faults of rendered manifests that pass every schema and show on a cluster: refused pods, cut streams."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

from support.kubernetes.chart import Manifest
from support.kubernetes.manifests import (
    SecretKey,
    amount,
    called,
    component,
    containers,
    main_container,
    of_kind,
    peer,
    pod,
    secrets_made,
    secrets_read,
    workloads,
)
from support.kubernetes.reach import Peer, allowed

#: Where the pods of common clusters find a name server: kube-dns, NodeLocal DNSCache, OpenShift's.
NAME_SERVERS = (
    (Peer({"k8s-app": "kube-dns"}, "kube-system"), 53),
    (Peer(address="169.254.20.10"), 53),
    (Peer({"dns.operator.openshift.io/daemonset-dns": "default"}, "openshift-dns"), 5353),
)
#: Seconds of a grace period that a process has to end in, after its drain.
ENDING = 15
_SECONDS = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600}
Given = Mapping[str, frozenset[str]]


def faults(manifests: Sequence[Manifest], given: Given | None = None) -> list[str]:
    """Every fault, in one sentence each. `given`: the keys of Secrets that are there already, by name."""
    checks: tuple[Callable[[Sequence[Manifest], Given], Iterator[str]], ...] = (
        _memory,
        _threads,
        _mounts,
        _secrets,
        _users,
        _times,
        _gateway,
        _name_servers,
        _disks,
        _reach_of_stores,
        _sizes,
        _scaling,
    )
    return [fault for check in checks for fault in check(manifests, given or {})]


def _each_container(manifests: Sequence[Manifest]) -> Iterator[tuple[str, Manifest, dict[str, Any]]]:
    """Every container of every pod with its place in words."""
    for one in workloads(manifests):
        for container in containers(one):
            yield f"{one['metadata']['name']}/{container['name']}", one, container


def _memory(manifests: Sequence[Manifest], _: Given) -> Iterator[str]:
    """Amounts that do not fit together are refused by the chart itself and by an API server; this is not."""
    for where, _workload, container in _each_container(manifests):
        resources = container["resources"]
        if not all("memory" in resources.get(kind, {}) for kind in ("requests", "limits")):
            yield f"{where} has no request or no limit of memory"


def _threads(manifests: Sequence[Manifest], _: Given) -> Iterator[str]:
    reference = {"resource": "requests.cpu", "divisor": "1"}
    for where, _workload, container in _each_container(manifests):
        if container.get("command") == ["triptych"] and not any(
            one["name"] == "TRIPTYCH_CPU_REQUEST" and one["valueFrom"] == {"resourceFieldRef": reference}
            for one in container["env"]
        ):
            yield f"{where} is not told the CPUs that it requests"


def _mounts(manifests: Sequence[Manifest], _: Given) -> Iterator[str]:
    for where, one, container in _each_container(manifests):
        volumes = [volume["name"] for volume in pod(one).get("volumes", [])]
        paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
        if len(set(volumes)) < len(volumes) or len(set(paths)) < len(paths):
            yield f"{where} has two volumes of one name, or two at one path"
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                yield f"{where} mounts {mount['name']}, which is no volume of its pod"


def _secrets(manifests: Sequence[Manifest], given: Given) -> Iterator[str]:
    there = set(secrets_made(manifests))
    there |= {SecretKey(name, key) for name, keys in given.items() for key in keys}
    for one in sorted(set(secrets_read(manifests)) - there, key=repr):
        yield f"nothing makes the key {one.key} of the Secret {one.secret}"


def _users(manifests: Sequence[Manifest], given: Given) -> Iterator[str]:
    """Every user of the store that the chart makes is one, and has the password that is mounted."""
    stores = [one for one in of_kind(manifests, "Secret") if "users.acl" in one["stringData"]]
    if not stores:
        return
    data = stores[0]["stringData"]
    hashes = dict(re.findall(r"^user (\S+) reset on #([0-9a-f]{64}) ", data["users.acl"], re.MULTILINE))
    for one in workloads(manifests):
        urls = [url for container in containers(one) for url in _store_urls(container)]
        for user in sorted(set(re.findall(r"//([^@/]+)@", ",".join(urls)))):
            password = data.get(user.removeprefix("triptych-"), "")
            if hashes.get(user) != sha256(password.encode()).hexdigest():
                yield f"{one['metadata']['name']} logs in as {user}, whom the store does not know"


def _store_urls(container: Mapping[str, Any]) -> Iterator[str]:
    words = container.get("args", [])
    if "--store" in words:
        yield words[words.index("--store") + 1]
    for variable in container.get("env", []):
        if variable["name"] == "EC_TRANSFER":
            yield json.loads(variable["value"])["ec_connector_extra_config"]["store"]


def number_after(flag: str, container: Mapping[str, Any]) -> float:
    """The number that a container's command line gives for the flag."""
    words = container["args"]
    return float(words[words.index(flag) + 1])


def _times(manifests: Sequence[Manifest], _: Given) -> Iterator[str]:
    """A request ends within the drain, and the drain within the grace period."""
    for one in workloads(manifests):
        container = main_container(one)
        if "--drain-timeout" not in container.get("args", []):
            continue
        name = one["metadata"]["name"]
        drain = number_after("--drain-timeout", container)
        pause = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        if drain + pause + ENDING > pod(one)["terminationGracePeriodSeconds"]:
            yield f"{name} is killed before its drain of {drain:g} s ends"
        if component(one) == "proxy" and number_after("--request-timeout", container) >= drain:
            yield f"{name} drains for {drain:g} s, no longer than a request takes"


def _gateway(manifests: Sequence[Manifest], _: Given) -> Iterator[str]:
    for route in of_kind(manifests, "HTTPRoute"):
        for rule in route["spec"]["rules"]:
            proxy = called(manifests, "Deployment", rule["backendRefs"][0]["name"])
            longest = number_after("--request-timeout", main_container(proxy))
            text = rule["timeouts"]["request"]
            number, unit = re.fullmatch(r"(\d+)(ms|s|m|h)", text).groups()  # type: ignore[union-attr]
            # Zero switches it off.
            if int(number) and int(number) * _SECONDS[unit] < longest:
                yield f"the route ends requests after {text}, the proxy after {longest:g} s"


def _name_servers(manifests: Sequence[Manifest], _: Given) -> Iterator[str]:
    policies = of_kind(manifests, "NetworkPolicy")
    for one in workloads(manifests):
        for server, port in NAME_SERVERS:
            for protocol in ("UDP", "TCP"):
                reached = allowed(policies, peer(one), server, port, protocol)
                # The store connects to nothing.
                if not reached and component(one) != "store":
                    yield f"{one['metadata']['name']} does not reach {server} {port} by {protocol}"


def _disks(manifests: Sequence[Manifest], _: Given) -> Iterator[str]:
    """A claim of the chart's is of a class that many pods can mount, or a pod's own, which it fills."""
    made = {one["metadata"]["name"]: one["spec"] for one in of_kind(manifests, "PersistentVolumeClaim")}
    for one in workloads(manifests):
        for volume in pod(one).get("volumes", []):
            spec = made.get(volume.get("persistentVolumeClaim", {}).get("claimName"), {})
            if spec and (spec["accessModes"] != ["ReadWriteMany"] or not spec.get("storageClassName")):
                yield f"{one['metadata']['name']} shares the claim {volume['name']}, which one node can mount"
            if "ephemeral" in volume and not any(
                mount["name"] == volume["name"] and not mount.get("readOnly")
                for container in pod(one).get("initContainers", [])
                for mount in container["volumeMounts"]
            ):
                yield f"{one['metadata']['name']} has the volume {volume['name']} that nothing fills"


def _reach_of_stores(manifests: Sequence[Manifest], _: Given) -> Iterator[str]:
    """Every port of --store is open; a store outside has the address that an example gives it."""
    policies, outside = of_kind(manifests, "NetworkPolicy"), Peer(address="10.20.0.7")
    stores = [peer(one) for one in of_kind(manifests, "StatefulSet")]
    for where, one, container in _each_container(manifests):
        for url in _store_urls(container):
            for port in re.findall(r":(\d+)(?=[,/])", url):
                if not allowed(policies, peer(one), (stores or [outside])[0], int(port)):
                    yield f"{where} does not reach port {port} of its store"


def _sizes(manifests: Sequence[Manifest], _: Given) -> Iterator[str]:
    """A pod that writes more than a volume's limit is evicted, and /dev/shm is memory of its container."""
    for one in of_kind(manifests, "Deployment"):
        container = main_container(one)
        for volume in pod(one)["volumes"]:
            limit = amount(volume.get("emptyDir", {}).get("sizeLimit", 0))
            if volume["name"] == "spool" and number_after("--media-disk", container) >= limit:
                yield f"{one['metadata']['name']} spools more than its volume may hold"
            served = next((each for each in containers(one) if each["name"] == "vllm"), container)
            memory = served["resources"].get("limits", {}).get("memory", "1Ti")
            if volume["name"] == "shm" and limit >= amount(memory):
                yield f"{one['metadata']['name']} has a /dev/shm above the memory of {served['name']}"


def _scaling(manifests: Sequence[Manifest], _: Given) -> Iterator[str]:
    """While the scaler knows nothing, KEDA keeps the pods that there are: a fallback would end some."""
    for one in of_kind(manifests, "ScaledObject"):
        if "fallback" in one["spec"]:
            yield f"{one['metadata']['name']} has a number of pods for an outage"


def store_users(manifests: Sequence[Manifest]) -> tuple[str, str]:
    """The users in the file that the chart makes, and the checksum by which the store's pods are replaced."""
    (store,) = of_kind(manifests, "StatefulSet")
    (secret,) = [one for one in of_kind(manifests, "Secret") if "users.acl" in one["stringData"]]
    names = re.findall(r"^user (\S+)", secret["stringData"]["users.acl"], re.MULTILINE)
    return " ".join(names), store["spec"]["template"]["metadata"]["annotations"]["checksum/users"]
