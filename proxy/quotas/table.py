"""QuotaTable: all quotas of one proxy, by name. docs/limits.md shows it; no budget exists outside it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from triptych.base.config import MIB, ProxyConfig
from triptych.base.metrics import ProxyMetrics
from triptych.proxy.quotas.quota import Quota, QuotaSpec

SWEEP_SECONDS = 1.0
#: gRPC calls at once beyond --max-queue: those that wait for their turn or for their message.
SPARE_CALLS = 256


class QuotaTable:
    """The quotas of one proxy; `run` expires overdue holds once a second."""

    def __init__(
        self,
        specs: Iterable[QuotaSpec],
        clock: Callable[[], float] = time.monotonic,
        shared: Callable[[], bool] = lambda: True,
    ) -> None:
        #: Whether several principals share them.
        self.shared = shared
        self._quotas = {spec.name: Quota(spec, clock, shared) for spec in specs}

    def __getitem__(self, name: str) -> Quota:
        return self._quotas[name]

    def __iter__(self) -> Iterator[Quota]:
        return iter(self._quotas.values())

    def show(self, metrics: ProxyMetrics) -> None:
        for quota in self:
            metrics.quota_used.labels(quota.spec.name).set_function(partial(getattr, quota, "used"))
            metrics.quota_capacity.labels(quota.spec.name).set(quota.spec.capacity)

    def sweep(self) -> None:
        for quota in self:
            quota.sweep()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep()


def quota_specs(config: ProxyConfig, files: int = 1024) -> tuple[QuotaSpec, ...]:
    """The quotas of a proxy that may have `files` open; an eighth is for the store, workers and media.

    What a client holds before its key is known, then of bodies, requests and media.
    """
    handshakes = max(files // 32, 16)
    message = min(config.max_body, config.body_memory)
    again, in_turn = "429 with Retry-After", "they wait, one of each key in turn; then 429 with Retry-After"
    # A row each: name, capacity, unit, what an error calls it, flag, what a client meets above it.
    # fmt: off
    return (
        QuotaSpec("connections", max(files * 3 // 4 - handshakes, 64), "connections",
            "places for HTTP connections", "",
            "503 with Retry-After, except for `/health` and `/ready`; beyond 256 more, closed at once",
            per="peer"),
        QuotaSpec("handshakes", handshakes, "handshakes",
            "places for TLS handshakes of HTTP", "", "closed at once",
            per="peer", total_seconds=10.0),
        QuotaSpec("grpc-connections", max(files * 3 // 32, 48), "connections",
            "places for gRPC connections", "",
            "closed, and further ones of that address are not accepted; the deadline is for a first call",
            per="peer", idle_seconds=15.0),
        QuotaSpec("grpc-calls", config.max_queue + SPARE_CALLS, "calls",
            "places for gRPC calls", "--max-queue",
            "RESOURCE_EXHAUSTED with `retry-after`; health checks do not count"),
        QuotaSpec("listeners", 32, "listeners",
            "places for listeners of /cluster/events", "",
            f"{again}: ask `/cluster` now and then instead"),
        QuotaSpec("bodies", config.body_memory, "bytes",
            "memory for request bodies", "--body-memory",
            "429 while the body arrives; a gRPC call waits before its message is read; the deadlines are for "
            "a body's arrival, then 408",
            largest=message, wait_seconds=10.0, idle_seconds=30.0, total_seconds=300.0),
        QuotaSpec("messages", max(1, config.body_memory // 2 // message), "messages",
            "places for gRPC messages that arrive", "--body-memory",
            "they wait, then RESOURCE_EXHAUSTED with `retry-after`; above the deadline DEADLINE_EXCEEDED",
            wait_seconds=10.0, total_seconds=60.0),
        QuotaSpec("parser", 1, "bodies",
            "thread that parses large bodies", "", in_turn,
            wait_seconds=60.0),
        QuotaSpec("parser-processes", 2, "bodies",
            "processes that parse bodies above 1 MiB first", "",
            "as for the thread; above 5 s of a core or 1 GiB of memory 413",
            wait_seconds=60.0),
        QuotaSpec("requests", config.max_queue, "answers",
            "places for requests in flight", "--max-queue",
            f"{again}, of a body above 1 MiB before it is parsed; each answer of `n` counts",
            largest=min(config.max_choices, config.max_queue)),
        QuotaSpec("replies", config.reply_memory, "bytes",
            "memory for replies", "--reply-memory",
            "a stream is held back at its PD worker until its client reads; a reply in one piece gets 429",
            largest=64 << 10),
        QuotaSpec("queries", config.max_queue, "queries",
            "places for /tokenize, /detokenize and echo", "--max-queue", again),
        QuotaSpec("query-turns", 8, "queries",
            "turns of /tokenize, /detokenize and echo at the workers", "", in_turn,
            wait_seconds=60.0),
        QuotaSpec("fetches", config.media_fetches, "fetches",
            "places for fetches of media", "--media-fetches", in_turn,
            wait_seconds=30.0, total_seconds=config.media_timeout),
        QuotaSpec("look-ups", 32, "look-ups",
            "places for look-ups of names", "",
            "they wait, one of each key in turn; one that takes 5 s ends in 503, but keeps its place",
            wait_seconds=5.0),
        QuotaSpec("loads", 4, "loads",
            "threads that decode, hash and store media", "", in_turn,
            wait_seconds=60.0),
        QuotaSpec("media-disk", config.media_disk, "bytes",
            "disk for media", "--media-disk", again,
            largest=64 * MIB),
        QuotaSpec("media", config.media_memory, "bytes",
            "memory for media", "--media-memory", again,
            largest=64 * MIB),
    )
    # fmt: on
