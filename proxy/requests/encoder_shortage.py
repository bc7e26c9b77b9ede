"""Requests that wait for an item which nobody can encode give their room at PD workers back meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from triptych.proxy.pool import WorkerPool
from triptych.proxy.requests.flow import Flow
from triptych.proxy.requests.lifecycle import Instruction

#: Encoders that are away for less, as while they are started again, cost no attempt.
GRACE_SECONDS = 2.0


class EncoderShortage:
    """Looks only at requests while a namespace of theirs is served by no encoder."""

    def __init__(
        self,
        pool: WorkerPool,
        flows: Mapping[str, Flow],
        carry_out: Callable[[Flow, Iterable[Instruction]], None],
    ) -> None:
        self._pool = pool
        self._flows = flows
        self._carry_out = carry_out
        self._served: frozenset[str] = frozenset()
        self._since: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def pool_changed(self) -> None:
        """Other encoders than before may be there."""
        served = self._pool.namespaces_served()
        if served != self._served:
            self._served = served
            self._look()

    def admitted(self, flow: Flow) -> None:
        """A PD worker has reserved room for the request's items."""
        if self._timer is None and flow.lifecycle.lacks_items and self._unserved(flow):
            self._look()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _unserved(self, flow: Flow) -> bool:
        return flow.binding is not None and flow.binding.namespace not in self._served

    def _look(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = asyncio.get_running_loop().time()
        for namespace in self._since.keys() & self._served:
            del self._since[namespace]
        lacking = False
        for flow in list(self._flows.values()):
            if not flow.lifecycle.lacks_items or flow.binding is None:
                continue
            if not self._unserved(flow):
                self._carry_out(flow, flow.lifecycle.encoders_back())
                continue
            lacking = True
            if now - self._since.setdefault(flow.binding.namespace, now) >= GRACE_SECONDS:
                self._carry_out(flow, flow.lifecycle.encoders_gone())
        if lacking:
            self._timer = asyncio.get_running_loop().call_later(GRACE_SECONDS / 2, self._look)
