"""A process's state as a kubelet's probes see it; read by threads, written by the event loop."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass


class ServicePhase(enum.Enum):
    """How far a process has come between its start and its end."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """The reply to a probe: the HTTP status, and what its JSON body says."""

    status: int
    text: str
    degraded: tuple[str, ...] = ()


def health_answer(*, healthy: bool) -> ProbeAnswer:
    """The answer to a liveness probe: 503 only where a restart helps, never because of a store or a peer."""
    return ProbeAnswer(200, "ok") if healthy else ProbeAnswer(503, "stalled")


def ready_answer(
    phase: ServicePhase, *, healthy: bool, cut_off: bool = False, degraded: Sequence[str] = ()
) -> ProbeAnswer:
    """The answer to a readiness probe. A degraded process does part of its work, and stays ready."""
    if phase is not ServicePhase.READY:
        return ProbeAnswer(503, phase.value)
    if not healthy:
        return ProbeAnswer(503, "stalled")
    if cut_off:
        return ProbeAnswer(503, "cut off from the store")
    return ProbeAnswer(200, phase.value, tuple(degraded))


class ServiceStatus:
    """The state of one process: its phase, whether its engines and event loop are well, what it lacks.

    A process that drains never becomes ready again.
    """

    def __init__(self) -> None:
        self._phase = ServicePhase.STARTING
        self._healthy: Callable[[], bool] = lambda: True
        self._degraded: Callable[[], Sequence[str]] = tuple
        #: Whether others, not this process, reach what all need.
        self.cut_off: Callable[[], bool] = lambda: False

    def follow(self, healthy: Callable[[], bool], degraded: Callable[[], Sequence[str]] = tuple) -> None:
        """From now on asks these two, which may be called from any thread."""
        self._healthy, self._degraded = healthy, degraded

    def ready(self) -> None:
        """All that is needed to serve has been loaded."""
        if self._phase is ServicePhase.STARTING:
            self._phase = ServicePhase.READY

    def drain(self) -> None:
        """New work should go elsewhere from now on."""
        self._phase = ServicePhase.DRAINING

    def health_probe(self) -> ProbeAnswer:
        return health_answer(healthy=self._healthy())

    def ready_probe(self) -> ProbeAnswer:
        return ready_answer(
            self._phase, healthy=self._healthy(), cut_off=self.cut_off(), degraded=self._degraded()
        )
