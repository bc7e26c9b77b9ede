"""One pod of every workload of a rendered chart, as processes of this machine: started, probed and ended.

Environment, Secrets, volumes, init containers, sidecars, readiness probes, preStop hooks and grace periods
are as in the manifests. Nothing is scheduled or restarted, and a Service is the address of its one pod. An
upgrade replaces pods one by one, each by a new one that is ready before the old one is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from support.kubernetes.containers import ContainerProcess
from support.kubernetes.manifests import of_kind
from support.kubernetes.pod_spec import Command, Manifest, PodContext, make_volumes, mounts_of, resolve
from support.waiting import within


class Pod:
    """The pod of a workload's template; `name` is the workload's."""

    def __init__(self, manifest: Manifest, context: PodContext) -> None:
        self.name, self.context = context.name, context
        self.spec: Manifest = manifest["spec"]["template"]["spec"]
        #: What runs, by container.
        self.processes: dict[str, ContainerProcess] = {}
        #: Those that start before the containers, and end after them.
        self.sidecars: dict[str, ContainerProcess] = {}
        self._commands: dict[str, Command] = {}

    def log(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self.context.folder.glob("*.log"))

    async def start(self) -> None:
        """Runs the init containers, one after the other, then the containers."""
        self.context.folder.mkdir(parents=True)
        volumes = make_volumes(self.spec, self.context)
        for container in self.spec.get("initContainers", ()):
            name = container["name"]
            self._commands[name] = resolve(container, self.context, mounts_of(container, volumes))
            launched = await self._launch(self._commands[name], name)
            if container.get("restartPolicy") == "Always":
                self.sidecars[name] = launched
                await within(f"{self.name}'s {name} to start", self._until_started(container), 60)
            else:
                assert await launched.wait() == 0, self.log()
        for container in self.spec["containers"]:
            name = container["name"]
            self._commands[name] = resolve(container, self.context, mounts_of(container, volumes))
            self.processes[name] = await self._launch(self._commands[name], name)

    async def ready(self) -> bool:
        """Whether every container passes its readiness probe now."""
        codes = {name: process.code for name, process in self.processes.items()}
        assert set(codes.values()) == {None}, f"{self.name} ended: {codes}\n{self.log()[-4000:]}"
        return all([await self._asked(one, one.get("readinessProbe")) for one in self.spec["containers"]])

    async def end(self) -> list[int]:
        """The exit codes after the preStop hooks and SIGTERM, or SIGKILL when the grace period is over."""
        deadline = time.monotonic() + self.spec.get("terminationGracePeriodSeconds", 30)
        for container in self.spec["containers"]:
            hook = container.get("lifecycle", {}).get("preStop")
            if hook and "sleep" in hook:
                await asyncio.sleep(float(hook["sleep"]["seconds"]))
            else:
                await self._asked(container, hook)
        codes: list[int] = []
        for processes in (self.processes, self.sidecars):
            ends = (one.end(deadline - time.monotonic()) for one in processes.values())
            codes += await asyncio.gather(*ends)
        return codes

    async def kill(self) -> None:
        every = [*self.processes.values(), *self.sidecars.values()]
        await asyncio.gather(*(process.kill() for process in every))

    async def _until_started(self, container: Manifest) -> None:
        while not await self._asked(container, container.get("startupProbe")):
            assert self.sidecars[container["name"]].code is None, self.log()[-4000:]
            await asyncio.sleep(0.2)

    async def _asked(self, container: Manifest, action: Manifest | None) -> bool:
        """Carries a probe or hook out, by HTTP or as a command; True where there is none."""
        if action is None:
            return True
        if "exec" in action:
            words = tuple(map(self.context.in_pod, action["exec"]["command"]))
            command = Command(words, self._commands[container["name"]].environment)
            return await (await self._launch(command, "exec")).wait() == 0
        port = action["httpGet"]["port"]
        ports = {one.get("name"): one["containerPort"] for one in container["ports"]}
        with contextlib.suppress(OSError, TimeoutError, IndexError, ValueError):
            async with asyncio.timeout(5):
                number = ports.get(port, port)
                return await http_status(self.context.ip, number, action["httpGet"]["path"]) < 400
        return False

    async def _launch(self, command: Command, name: str) -> ContainerProcess:
        return await ContainerProcess.start(command, self.context.ip, self.context.folder / f"{name}.log")


class MiniCluster:
    """The pods of a rendered chart, each at a loopback address of its own, inside `async with`.

    `claims` are the folders of volumes that are there already.
    """

    def __init__(
        self, folder: Path, manifests: Sequence[Manifest], claims: Mapping[str, Path] | None = None
    ) -> None:
        self._folder, self._claims = folder, claims or {}
        self._network = f"127.{16 + hash(folder) % 200}.{hash(folder) // 200 % 250}"
        self._count = 1
        self._services: dict[str, str] = {}
        self._ending: list[Pod] = []
        self.pods = self._made(manifests, [])

    def _made(self, manifests: Sequence[Manifest], kept: Sequence[Pod]) -> list[Pod]:
        """The pods of the manifests: those of `kept`, and a new one for each workload without one there."""
        workloads = of_kind(manifests, "StatefulSet", "Deployment")
        addresses = {pod.name: pod.context.ip for pod in kept}
        numbers = {}
        for one in workloads:
            name = one["metadata"]["name"]
            if name not in addresses:
                self._count += 1
                numbers[name], addresses[name] = self._count, f"{self._network}.{self._count}"
        for service in of_kind(manifests, "Service"):
            for workload in filter(partial(_selects, service), workloads):
                self._services[service["metadata"]["name"]] = addresses[workload["metadata"]["name"]]
        forms = ("", ".default", ".default.svc", ".default.svc.cluster.local")
        hosts = {name + form: ip for name, ip in self._services.items() for form in forms}
        secrets = {one["metadata"]["name"]: one for one in of_kind(manifests, "Secret")}
        by_name = {pod.name: pod for pod in kept}
        for one in workloads:
            name = one["metadata"]["name"]
            if name in numbers:
                folder = self._folder / f"{name}-{numbers[name]}"
                context = PodContext(name, addresses[name], folder, secrets, hosts, self._claims)
                by_name[name] = Pod(one, context)
        return list(by_name.values())

    async def apply(self, manifests: Sequence[Manifest]) -> dict[str, list[int]]:
        """Upgrades: replaces pods whose specs have changed, starts those of new workloads, ends removed ones.

        Returns the exit codes of pods that were ended.
        """
        specs = {
            one["metadata"]["name"]: one["spec"]["template"]["spec"]
            for one in of_kind(manifests, "StatefulSet", "Deployment")
        }
        kept = [pod for pod in self.pods if specs.get(pod.name) == pod.spec]
        old = self._ending = [pod for pod in self.pods if pod not in kept]
        self.pods = self._made(manifests, kept)
        codes = {}
        for pod in self.pods:
            if pod not in kept:
                await self._start(pod)
                for before in [one for one in old if one.name == pod.name]:
                    codes[before.name] = await before.end()
        for pod in old:
            if pod.name not in codes:
                codes[pod.name] = await pod.end()
        return codes

    async def _start(self, pod: Pod) -> None:
        await pod.start()
        await within(f"{pod.name} to be ready", _until_ready(pod), 180)

    async def __aenter__(self) -> MiniCluster:
        try:
            for pod in self.pods:
                await pod.start()
            for pod in self.pods:
                await within(f"{pod.name} to be ready", _until_ready(pod), 180)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(pod.kill() for pod in (*self.pods, *self._ending)))

    def address(self, service: str, port: int) -> str:
        """host:port of a Service."""
        return f"{self._services[service]}:{port}"

    async def stop(self) -> dict[str, list[int]]:
        """The exit codes of every pod, ended as `helm uninstall` ends them."""
        codes = await asyncio.gather(*(pod.end() for pod in self.pods))
        return {pod.name: found for pod, found in zip(self.pods, codes, strict=True)}


async def _until_ready(pod: Pod) -> None:
    while not await pod.ready():
        await asyncio.sleep(0.2)


def _selects(service: Manifest, workload: Manifest) -> bool:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    first = {"statefulset.kubernetes.io/pod-name": f"{workload['metadata']['name']}-0"}
    selector: dict[str, str] = service["spec"]["selector"]
    return selector.items() <= (labels | first).items()


async def http_status(host: str, port: int, path: str) -> int:
    """The status of the answer to GET."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        return int((await reader.readline()).split()[1])
    finally:
        writer.transport.abort()
