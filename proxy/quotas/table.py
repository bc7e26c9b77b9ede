"""QuotaTable: all quotas of one proxy, by name. docs/limits.md shows it; no budget exists outside it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator

from triptych.config import MIB, ProxyConfig
from triptych.proxy.quotas.quota import Quota, QuotaSpec

SWEEP_SECONDS = 1.0


class QuotaTable:
    """The quotas of one proxy; `run` expires overdue holds once a second."""

    def __init__(self, specs: Iterable[QuotaSpec], clock: Callable[[], float] = time.monotonic) -> None:
        self._quotas = {spec.name: Quota(spec, clock) for spec in specs}

    def __getitem__(self, name: str) -> Quota:
        return self._quotas[name]

    def __iter__(self) -> Iterator[Quota]:
        return iter(self._quotas.values())

    def sweep(self) -> None:
        for quota in self:
            quota.sweep()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep()


def quota_specs(config: ProxyConfig, files: int) -> tuple[QuotaSpec, ...]:
    """The quotas of a proxy that may have `files` open."""
    message = min(config.max_body, config.body_memory)
    return (
        QuotaSpec(
            "bodies",
            config.body_memory,
            "bytes",
            "memory for request bodies",
            "--body-memory",
            "429 while the body arrives; a gRPC call waits before its message is read",
            largest=message,
            wait_seconds=10.0,
            idle_seconds=30.0,
            total_seconds=300.0,
        ),
        QuotaSpec(
            "requests",
            config.max_queue,
            "answers",
            "places for requests in flight",
            "--max-queue",
            "429 with Retry-After; each answer of `n` counts",
        ),
        QuotaSpec(
            "fetches",
            config.media_fetches,
            "fetches",
            "places for fetches of media",
            "--media-fetches",
            "they wait, then 503 with Retry-After",
            wait_seconds=30.0,
            total_seconds=config.media_timeout,
        ),
        QuotaSpec(
            "media",
            config.media_memory,
            "bytes",
            "memory for media",
            "--media-memory",
            "429 with Retry-After",
            largest=64 * MIB,
        ),
    )
