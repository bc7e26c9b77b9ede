"""A pod: its containers as processes, probed, restarted and ended as a kubelet does."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from support.kubernetes.containers import ContainerProcess
from support.kubernetes.pod_spec import (
    Command,
    Manifest,
    PodContext,
    SpecError,
    make_volumes,
    mounts_of,
    resolve,
)
from support.kubernetes.probes import Probe, ProbeCount, http_status

logger = logging.getLogger(__name__)

#: Kubernetes' back-off between restarts: none before the first, then doubled up to the most.
_BACK_OFF, _MOST_BACK_OFF = 10.0, 300.0


def back_off(restarts: int) -> float:
    """Seconds before a restart, after so many of them."""
    return 0.0 if restarts == 0 else float(min(_BACK_OFF * 2 ** (restarts - 1), _MOST_BACK_OFF))


class PodPhase(enum.Enum):
    """A pod's phase; one that terminates is RUNNING until its last process has ended."""

    PENDING = enum.auto()
    RUNNING = enum.auto()
    GONE = enum.auto()


@dataclass(slots=True)
class ContainerState:
    """What is known of one container. `restarts` names why each run but the last ended."""

    name: str
    command: Command | None = None
    process: ContainerProcess | None = None
    ready: bool = False
    restarts: list[str] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)


class Pod:
    """One pod, started by `start` and ended by `delete`, in the running event loop."""

    def __init__(
        self,
        manifest: Manifest,
        context: PodContext,
        *,
        tempo: float = 1.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.context = context
        self.spec: Manifest = manifest["spec"]
        self.phase = PodPhase.PENDING
        self.terminating = False
        #: Seconds from the deletion to the end of the last process.
        self.ended_in = 0.0
        self.errors: list[str] = []
        self.containers = [ContainerState(one["name"]) for one in self.spec["containers"]]
        self._tempo = tempo
        self._environment = environment or {}
        self._tasks: list[asyncio.Task[None]] = []
        self._deletion: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.context.name

    @property
    def ready(self) -> bool:
        """The pod's Ready condition."""
        return self.phase is PodPhase.RUNNING and all(one.ready for one in self.containers)

    @property
    def ports(self) -> dict[str, int]:
        declared = (port for one in self.spec["containers"] for port in one.get("ports", ()))
        return {port["name"]: int(port["containerPort"]) for port in declared if "name" in port}

    def log(self, container: str = "") -> str:
        """What a container has written, the first one by default."""
        path = self._log(container or self.containers[0].name)
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> None:
        self.context.folder.mkdir(parents=True, exist_ok=True)
        self._tasks.append(asyncio.create_task(self._run(), name=f"pod {self.name}"))

    def check(self) -> None:
        """Raises what has gone wrong in this module, not in the pod."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()):
                raise error

    def delete(self, grace: float | None = None) -> asyncio.Task[None]:
        """The end of the pod, which the first call begins, until the last process has ended."""
        if self._deletion is None:
            seconds = self.spec.get("terminationGracePeriodSeconds", 30) if grace is None else grace
            self.terminating = True
            self._deletion = asyncio.create_task(self._end(float(seconds)), name=f"end of {self.name}")
        return self._deletion

    async def _run(self) -> None:
        try:
            volumes = make_volumes(self.spec, self.context)
            for container in self.spec.get("initContainers", ()):
                await self._initialize(container, self._command(container, volumes))
            for container, state in zip(self.spec["containers"], self.containers, strict=True):
                state.command = self._command(container, volumes)
        except SpecError as error:
            self.errors.append(str(error))
            return
        self.phase = PodPhase.RUNNING
        for container, state in zip(self.spec["containers"], self.containers, strict=True):
            keeping = self._keep_running(container, state)
            self._tasks.append(asyncio.create_task(keeping, name=f"container {self.name}/{state.name}"))

    def refresh(self) -> None:
        """Writes the mounted Secrets and ConfigMaps as they are now."""
        if self.phase is PodPhase.RUNNING:
            make_volumes(self.spec, self.context)

    def _command(self, container: Manifest, volumes: Mapping[str, Path]) -> Command:
        return resolve(container, self.context, mounts_of(container, volumes))

    async def _initialize(self, container: Manifest, command: Command) -> None:
        """Runs an init container until it succeeds."""
        for attempt in itertools.count():
            await asyncio.sleep(back_off(attempt) * self._tempo)
            process = await self._launch(container, command)
            try:
                if await process.wait() == 0:
                    return
            finally:
                await process.kill()

    async def _launch(self, container: Manifest, command: Command) -> ContainerProcess:
        return await ContainerProcess.start(
            command, self.context.ip, self._log(container["name"]), self._environment
        )

    async def _keep_running(self, container: Manifest, state: ContainerState) -> None:
        assert state.command is not None
        while True:
            process = state.process = await self._launch(container, state.command)
            unhealthy = asyncio.create_task(self._probe(container, state.command, state))
            ended = asyncio.create_task(process.wait())
            try:
                await asyncio.wait((unhealthy, ended), return_when=asyncio.FIRST_COMPLETED)
            finally:
                unhealthy.cancel()
                ended.cancel()
                why = await asyncio.gather(unhealthy, ended, return_exceptions=True)
            if self.terminating:
                state.ready = False
                return
            reason = why[0] if isinstance(why[0], str) else f"exit code {process.code}"
            if isinstance(why[0], Exception):
                raise why[0]
            state.ready = False
            if process.code is None:
                await self._end_container(container, state, float(self._grace()))
            else:
                await process.kill()
            state.codes.append(process.code if process.code is not None else -1)
            await asyncio.sleep(back_off(len(state.restarts)) * self._tempo)
            logger.info("%s/%s is restarted: %s", self.name, state.name, reason)
            state.restarts.append(reason)

    def _grace(self) -> int:
        return int(self.spec.get("terminationGracePeriodSeconds", 30))

    async def _probe(self, container: Manifest, command: Command, state: ContainerState) -> str:
        """Probes until the container has to be restarted; the reason."""

        def probe(kind: str) -> Probe | None:
            spec = container.get(kind)

            async def execute(words: list[str]) -> bool:
                return await self._execute(words, command)

            return Probe(spec, self.context.ip, self.ports, execute, self._tempo) if spec else None

        startup = probe("startupProbe")
        if startup and not await self._repeat(startup, startup.count(), until=(True, False)):
            return "startup probe failed"
        readiness, liveness = probe("readinessProbe"), probe("livenessProbe")
        following = asyncio.create_task(self._follow_readiness(readiness, state))
        try:
            if liveness:
                await self._repeat(liveness, liveness.count(), until=(False,))
                return "liveness probe failed"
            await following
            raise AssertionError("readiness is followed for ever")
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _repeat(self, probe: Probe, count: ProbeCount, until: tuple[bool, ...]) -> bool:
        await asyncio.sleep(probe.initial_delay)
        while True:
            state = count.add(await probe.ask())
            if state is not None and state in until:
                return state
            await asyncio.sleep(probe.period)

    async def _follow_readiness(self, probe: Probe | None, state: ContainerState) -> None:
        if probe is None:
            state.ready = True
            await asyncio.Event().wait()
            return
        count = probe.count()
        await asyncio.sleep(probe.initial_delay)
        while True:
            state.ready = count.add(await probe.ask()) is True
            await asyncio.sleep(probe.period)

    async def _execute(self, words: list[str], command: Command) -> bool:
        process = await ContainerProcess.start(
            Command(tuple(words), command.environment), self.context.ip, self._log("exec"), self._environment
        )
        try:
            return await process.wait() == 0
        finally:
            await process.kill()

    async def _end(self, grace: float) -> None:
        began = time.monotonic()
        # Probes go on while the hooks run and the processes drain, as they do in Kubernetes.
        running = zip(self.spec["containers"], self.containers, strict=True)
        ending = [self._end_container(one, state, grace) for one, state in running if state.process]
        await asyncio.gather(*ending)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for state in self.containers:
            if state.process is not None:
                state.codes.append(await state.process.kill())
        self.phase = PodPhase.GONE
        self.ended_in = time.monotonic() - began

    async def _end_container(self, container: Manifest, state: ContainerState, grace: float) -> None:
        """The preStop hook, SIGTERM, and SIGKILL when the grace period is over."""
        process = state.process
        assert process is not None
        deadline = time.monotonic() + grace
        hook = container.get("lifecycle", {}).get("preStop")
        if hook and process.code is None:
            with contextlib.suppress(TimeoutError, OSError, ValueError):
                async with asyncio.timeout(grace):
                    await self._hook(hook, state)
        await process.end(deadline - time.monotonic())

    async def _hook(self, hook: Manifest, state: ContainerState) -> None:
        if "sleep" in hook:
            await asyncio.sleep(float(hook["sleep"]["seconds"]))
        elif action := hook.get("httpGet"):
            port = action["port"]
            number = self.ports[port] if isinstance(port, str) else int(port)
            await http_status(self.context.ip, number, action.get("path", "/"))
        else:
            assert state.command is not None
            await self._execute(hook["exec"]["command"], state.command)

    def _log(self, container: str) -> Path:
        return self.context.folder / f"{container}.log"
