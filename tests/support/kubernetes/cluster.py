"""A small Kubernetes for tests: it runs rendered manifests as real processes of this machine.

Modelled, by Kubernetes' own rules: Deployments (rolling updates with maxSurge and maxUnavailable),
StatefulSets, pods with init containers, environment, Secrets, emptyDirs, probes, hooks, grace
periods, restarts with back-off, Services over ready pods with a delay, nodes that are drained by
PodDisruptionBudgets.

Not modelled: the API server and its admission (schemas, defaults, RBAC), images and their users, file modes,
cgroups (limits of CPU and memory), NetworkPolicies, DNS at run time, IPv6, Gateways, PVC binding, affinity
and spreading, progress deadlines, Jobs and hooks of Helm. All pods share one network and one file system, so
some words are changed: 0.0.0.0 becomes the pod's IP, mount paths become folders, names of Services become
their IPs.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from support.kubernetes.addresses import Addresses
from support.kubernetes.pod_spec import Manifest, PodContext, with_hosts
from support.kubernetes.pods import Pod
from support.kubernetes.rollout import (
    PodView,
    deployment_changes,
    evictions_allowed,
    stateful_changes,
)
from support.kubernetes.services import Endpoint, ServicePort, matches
from support.waiting import until

#: Seconds between two looks of the controllers.
_LOOK = 0.05
WORKLOADS = ("Deployment", "StatefulSet")


class MiniCluster:
    """A cluster of `nodes` nodes in the running event loop, inside `async with`.

    `tempo` multiplies the seconds of probes and back-offs; hooks and grace periods keep theirs.
    """

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int = 2,
        tempo: float = 1.0,
        endpoint_delay: float = 1.0,
        disks: Mapping[str, Path] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.nodes = [f"node-{number}" for number in range(nodes)]
        self.pods: dict[str, Pod] = {}
        #: Pods that have ended, oldest first.
        self.gone: list[Pod] = []
        #: Variables of every container, besides those of its spec: what a test patches.
        self.environment = dict(environment or {})
        self._tempo = tempo
        self._delay = endpoint_delay
        self._disks = disks or {}
        self._objects: dict[tuple[str, str], Manifest] = {}
        self._addresses = Addresses()
        self._cluster_ips: dict[str, str] = {}
        self._pod_ips: dict[str, str] = {}
        self._ports: dict[tuple[str, int], ServicePort] = {}
        self._endpoints: dict[str, list[Endpoint]] = {}
        self._owners: dict[str, tuple[tuple[str, str], str, int]] = {}
        self._cordoned: set[str] = set()
        self._ages = itertools.count()
        self._controllers: asyncio.Task[None] | None = None

    async def __aenter__(self) -> MiniCluster:
        self._controllers = asyncio.create_task(self._control(), name="controllers")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Kills what still runs; `stop` ends it in order."""
        if self._controllers is not None:
            self._controllers.cancel()
            found = await asyncio.gather(self._controllers, return_exceptions=True)
        await asyncio.gather(*(pod.delete(0) for pod in list(self.pods.values())))
        await asyncio.gather(*(port.close() for port in self._ports.values()))
        self._addresses.close()
        if self._controllers is not None and isinstance(found[0], Exception):
            raise found[0]

    # What a user does.

    def apply(self, manifests: Iterable[Manifest]) -> None:
        """Creates or changes objects, as `kubectl apply` does. A spec without replicas keeps those it has."""
        for manifest in manifests:
            key = manifest["kind"], manifest["metadata"]["name"]
            before = self._objects.get(key)
            made = json.loads(json.dumps(manifest))
            if key[0] in WORKLOADS and "replicas" not in made["spec"]:
                made["spec"]["replicas"] = before["spec"]["replicas"] if before else 1
            self._objects[key] = made
            if key[0] == "Service" and made["spec"].get("clusterIP") != "None":
                self._serve(made)
            if key[0] in ("Secret", "ConfigMap") and before not in (None, made):
                for pod in self.pods.values():
                    pod.refresh()

    def object(self, kind: str, name: str) -> Manifest | None:
        return self._objects.get((kind, name))

    def restart(self, kind: str, name: str) -> None:
        """Replaces all pods by a rolling update, as `kubectl rollout restart` does."""
        metadata = self._objects[kind, name]["spec"]["template"]["metadata"]
        annotations = metadata.setdefault("annotations", {})
        annotations["kubectl.kubernetes.io/restartedAt"] = str(next(self._ages))

    def scale(self, kind: str, name: str, replicas: int) -> None:
        self._objects[kind, name]["spec"]["replicas"] = replicas

    async def drain(self, node: str) -> None:
        """Cordons the node and evicts its pods, each when its PodDisruptionBudgets allow it."""
        self._cordoned.add(node)

        def left() -> list[Pod]:
            return [pod for pod in self.pods.values() if pod.context.node == node]

        def step() -> bool:
            for pod in left():
                if not pod.terminating and self._may_evict(pod):
                    self._delete(pod)
            return not left()

        await until(step, f"the drain of {node}", 300)

    async def stop(self) -> None:
        """Deletes all workloads and waits for their pods, as `helm uninstall` does."""
        for key in [key for key in self._objects if key[0] in WORKLOADS]:
            del self._objects[key]
        await asyncio.gather(*(self._delete(pod) for pod in list(self.pods.values())))

    # What a user sees.

    def pods_of(self, name: str) -> list[Pod]:
        """Pods of a Deployment or StatefulSet that do not terminate, oldest first."""
        return [pod for pod, _ in self._owned(name)]

    def rolled_out(self, *names: str) -> bool:
        """Whether all these workloads, or all there are, run nothing but their current revision, ready."""
        workloads = [key for key in self._objects if key[0] in WORKLOADS and (not names or key[1] in names)]
        for key in workloads:
            spec = self._objects[key]["spec"]
            views = [view for _, view in self._owned(key[1])]
            leaving = [
                pod for pod in self.pods.values() if self._owners[pod.name][0] == key and pod.terminating
            ]
            if (
                leaving
                or len(views) != spec["replicas"]
                or not all(one.current and one.ready for one in views)
            ):
                return False
        return True

    async def wait_until_rolled_out(self, *names: str, seconds: float = 180.0) -> None:
        """And until Services send to these pods alone."""

        def holds() -> bool:
            self._update_endpoints()
            return self.rolled_out(*names) and all(port.settled for port in self._ports.values())

        try:
            await until(holds, f"the rollout of {names or 'everything'}", seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.describe()}") from None

    def address(self, service: str, port: int) -> str:
        """host:port of a Service."""
        return f"{self._cluster_ips[service]}:{port}"

    def resolved(self, text: str, namespace: str = "default") -> str:
        """The text with IPs in place of names."""
        return with_hosts(text, self._hosts(namespace))

    def describe(self) -> str:
        """All pods, with the last words of those that are not ready."""
        lines = []
        for pod in self.pods.values():
            restarts = [why for one in pod.containers for why in one.restarts]
            lines.append(f"{pod.name}: {pod.phase.name} ready={pod.ready} {pod.errors} {restarts}")
            if not pod.ready:
                lines.append(pod.log()[-2000:])
        return "\n".join(lines)

    # Controllers.

    async def _control(self) -> None:
        while True:
            for kind, name in [key for key in self._objects if key[0] in WORKLOADS]:
                self._reconcile(kind, name)
            self._update_endpoints()
            for pod in self.pods.values():
                pod.check()
            await asyncio.sleep(_LOOK)

    def _reconcile(self, kind: str, name: str) -> None:
        manifest = self._objects[kind, name]
        spec = manifest["spec"]
        owned = [view for _, view in self._owned(name)]
        if kind == "Deployment":
            rules = spec.get("strategy", {}).get("rollingUpdate", {})
            surge, fewer = rules.get("maxSurge", "25%"), rules.get("maxUnavailable", "25%")
            changes = deployment_changes(owned, spec["replicas"], surge, fewer)
            names = [f"{name}-{_revision(manifest)[:8]}-{next(self._ages)}" for _ in range(changes.create)]
        else:
            ordinals = [f"{name}-{number}" for number in range(spec["replicas"])]
            changes = stateful_changes(owned, ordinals)
            # A name is free only once the pod before it has ended.
            names = [one for one in ordinals if one not in self.pods][: changes.create]
        for pod_name in names:
            self._create(manifest, pod_name)
        for pod_name in changes.delete:
            self._delete(self.pods[pod_name])

    def _owned(self, name: str) -> list[tuple[Pod, PodView]]:
        found = []
        for pod in self.pods.values():
            owner, revision, age = self._owners[pod.name]
            if owner[1] == name and not pod.terminating:
                current = owner in self._objects and revision == _revision(self._objects[owner])
                found.append((pod, PodView(pod.name, current, pod.ready, age)))
        return found

    def _create(self, manifest: Manifest, name: str) -> None:
        template = manifest["spec"]["template"]
        key = manifest["kind"], manifest["metadata"]["name"]
        labels = dict(template["metadata"].get("labels", {}))
        if key[0] == "StatefulSet":
            labels["statefulset.kubernetes.io/pod-name"] = name
            ip = self._stable_ip(name)
        else:
            ip = self._addresses.take()
        namespace = manifest["metadata"].get("namespace", "default")
        age = next(self._ages)
        context = PodContext(
            name=name,
            namespace=namespace,
            ip=ip,
            node=self._node(),
            labels=labels,
            folder=self.folder / "pods" / f"{name}.{age}",
            lookup=self.object,
            disks=self._disks,
            hosts=self._hosts(namespace),
        )
        pod = Pod(template, context, tempo=self._tempo, environment=self.environment)
        self.pods[name] = pod
        self._owners[name] = key, _revision(manifest), age
        pod.start()

    def _delete(self, pod: Pod) -> asyncio.Task[None]:
        """Begins the pod's end, once; its name is free when it is over."""

        def forget(_: object) -> None:
            if self.pods.pop(pod.name, None):
                self.gone.append(pod)
                if pod.name not in self._pod_ips:
                    self._addresses.give_back(pod.context.ip)

        begun = pod.terminating
        task = pod.delete()
        if not begun:
            task.add_done_callback(forget)
        return task

    def _node(self) -> str:
        """The node with the fewest pods that takes any."""
        free = [node for node in self.nodes if node not in self._cordoned]
        assert free, "all nodes are cordoned"
        return min(free, key=lambda node: sum(pod.context.node == node for pod in self.pods.values()))

    def _may_evict(self, pod: Pod) -> bool:
        for (kind, _), budget in self._objects.items():
            spec = budget.get("spec", {})
            if kind != "PodDisruptionBudget" or not matches(
                spec["selector"]["matchLabels"], pod.context.labels
            ):
                continue
            alike = [
                one
                for one in self.pods.values()
                if matches(spec["selector"]["matchLabels"], one.context.labels)
            ]
            owners = {self._owners[one.name][0] for one in alike}
            expected = sum(self._objects[key]["spec"]["replicas"] for key in owners if key in self._objects)
            healthy = sum(one.ready and not one.terminating for one in alike)
            if not evictions_allowed(expected, healthy, spec["maxUnavailable"]) and pod.ready:
                return False
        return True

    # Names and Services.

    def _serve(self, service: Manifest) -> None:
        name = service["metadata"]["name"]
        if name not in self._cluster_ips:
            self._cluster_ips[name] = self._addresses.take()
        for port in service["spec"]["ports"]:
            key = name, int(port["port"])
            if key not in self._ports:
                target = port.get("targetPort", port["port"])
                self._ports[key] = ServicePort(self._cluster_ips[name], key[1], target, self._delay)

    def _hosts(self, namespace: str) -> dict[str, str]:
        """IP addresses by all DNS names of Services, and of pods of StatefulSets."""
        addresses = dict(self._cluster_ips)
        for (kind, name), one in self._objects.items():
            if kind == "StatefulSet":
                for number in range(one["spec"]["replicas"]):
                    pod = f"{name}-{number}"
                    addresses[f"{pod}.{one['spec']['serviceName']}"] = self._stable_ip(pod)
        forms = ("", f".{namespace}", f".{namespace}.svc", f".{namespace}.svc.cluster.local")
        return {name + form: ip for name, ip in addresses.items() for form in forms}

    def _stable_ip(self, pod: str) -> str:
        """The IP of a StatefulSet's pod. It keeps it, in place of a DNS name that clients ask for again."""
        if pod not in self._pod_ips:
            self._pod_ips[pod] = self._addresses.take()
        return self._pod_ips[pod]

    def _update_endpoints(self) -> None:
        for (kind, name), service in self._objects.items():
            if kind != "Service" or name not in self._cluster_ips:
                continue
            endpoints = [
                Endpoint(pod.context.ip, pod.ports)
                for pod in self.pods.values()
                if pod.ready
                and not pod.terminating
                and matches(service["spec"].get("selector", {}), pod.context.labels)
            ]
            if self._endpoints.get(name) != endpoints:
                self._endpoints[name] = endpoints
                for (owner, _), port in self._ports.items():
                    if owner == name:
                        port.follow(endpoints)


def _revision(manifest: Manifest) -> str:
    """A digest of the pod template: pods of another one are old."""
    return hashlib.sha256(json.dumps(manifest["spec"]["template"], sort_keys=True).encode()).hexdigest()
