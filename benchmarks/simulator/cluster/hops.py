"""How long messages between processes take: an idle machine's latency, and waits for a core on a full one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triptych.simulator.cluster.clock import Clock
from triptych.simulator.cluster.processors import Host

#: Threads that a message wakes one after another before its receiver has it. gRPC: one of its event
#: engine's, the one that polls the completion queue, the event loop's. A client or the store: its loop.
RPC_WAKES = 3
PLAIN_WAKES = 1


class Hops:
    """`rpc` seconds for a message where cores are free; each thread that it wakes waits up to `wake` longer.

    What `host`, where the proxy is, has to do stands for both ends: every message begins or ends there, but
    for those to the store.
    """

    def __init__(self, clock: Clock, rpc: float, wake: float, host: Host) -> None:
        self._clock = clock
        self._rpc = rpc
        self._wake = wake
        self._host = host

    def stream(self) -> Stream:
        """gRPC messages of one direction, which keep their order."""
        return Stream(self._clock, self.rpc)

    def rpc(self) -> float:
        """Seconds of a gRPC message, one way."""
        return self._rpc + RPC_WAKES * self._waits()

    def plain(self) -> float:
        """Seconds between the client and the proxy, one way, beyond what both compute."""
        return PLAIN_WAKES * self._waits()

    def store_trip(self) -> float:
        """Seconds to the store and back."""
        return 2 * (self._rpc + PLAIN_WAKES * self._waits())

    def _waits(self) -> float:
        return self._wake * self._host.crowding if self._wake else 0.0


class Stream:
    """Messages that do not overtake each other."""

    def __init__(self, clock: Clock, latency: Callable[[], float]) -> None:
        self._clock = clock
        self._latency = latency
        self._last = 0.0

    def send(self, call: Callable[..., None], *arguments: Any) -> None:
        """Calls once the message is there."""
        self._last = max(self._last, self._clock.now + self._latency())
        self._clock.at(self._last, call, *arguments)
