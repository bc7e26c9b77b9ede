"""The file `targets.json` of a running cluster: the addresses of /metrics of all its processes.

Prometheus reads it by `file_sd_configs`, again whenever it changes: workers choose free ports.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

from triptych.base.types import WorkerInfo
from triptych.registry.registry import Registry
from triptych.store.control import StoreUnavailable

FILE = "targets.json"
SECONDS = 5.0


class TargetGroup(TypedDict):
    """Addresses with equal labels, as Prometheus' file_sd has them."""

    targets: list[str]
    labels: dict[str, str]


def scrape_targets(workers: Iterable[WorkerInfo], proxy: str) -> list[TargetGroup]:
    """The processes by pool. One that is registered in two pools is named once."""
    pools: dict[str, str] = {}
    for info in workers:
        host = info.address.rpartition(":")[0]
        if port := info.capacity.get("metrics_port", 0):
            address = f"{host}:{port}"
            pools[address] = "colocated" if pools.get(address, info.pool) != info.pool else info.pool
    groups = {"proxy": [proxy]}
    for address, pool in sorted(pools.items()):
        groups.setdefault(pool, []).append(address)
    return [{"targets": targets, "labels": {"component": pool}} for pool, targets in groups.items()]


def write_targets(folder: Path, groups: list[TargetGroup]) -> None:
    """Replaces the file where it says something else; a reader never sees half of it."""
    target, text = folder / FILE, json.dumps(groups, indent=1)
    if target.exists() and target.read_text() == text:
        return
    descriptor, scratch = tempfile.mkstemp(dir=folder, prefix="targets-")
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.replace(scratch, target)


async def keep_targets(registry: Registry, folder: Path, proxy: str) -> None:
    """Keeps the file up to date, for ever. While the store is away it stays as it is."""
    while True:
        with contextlib.suppress(StoreUnavailable):
            write_targets(folder, scrape_targets(await registry.workers(), proxy))
        await asyncio.sleep(SECONDS)
