"""Real proxies and real, supervised PD workers that end at a mark in a prompt; text only, no encoders."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from support.processes.cluster import free_port
from support.waiting import within
from triptych.apps.launch.children import Child

_TESTS = Path(__file__).parents[2]
_ENVIRONMENT = {"PYTHONPATH": f"{_TESTS.parent}{os.pathsep}{_TESTS}"}


@dataclass
class Fleet:
    """`urls` has one entry for each proxy."""

    urls: list[str]
    workers: list[Child]
    #: Process ids that the workers have had.
    pids: set[int]

    @property
    def ends(self) -> int:
        """How often a worker has ended."""
        return len(self.pids) - sum(worker.pid is not None for worker in self.workers)


@contextlib.asynccontextmanager
async def poisoned_fleet(
    model: Path, store_url: str, *, workers: int, proxies: int = 1, timeout: float = 150.0
) -> AsyncIterator[Fleet]:
    """All answer inside the `async with`. `timeout`: seconds that a request may take."""
    pids: set[int] = set()
    ports = [free_port() for _ in range(proxies)]
    pd = [_worker(f"pd-{index}", model, store_url, pids) for index in range(workers)]
    doors = [_proxy(f"proxy-{port}", port, store_url, timeout) for port in ports]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    # Children inherit it, those that are started again too.
    with patch.dict(os.environ, _ENVIRONMENT):
        watches = [asyncio.create_task(child.watch()) for child in (*pd, *doors)]
        try:
            for url in urls:
                await _answers(url, watches, workers)
            yield Fleet(urls, pd, pids)
        finally:
            await within("the fleet's end", asyncio.gather(*(child.end(20.0) for child in (*doors, *pd))))
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)


def _worker(name: str, model: Path, store_url: str, pids: set[int]) -> Child:
    words = ("pd", str(model), "--store", store_url, "--port", "0", "--metrics-port", "0")
    sizes = ("--kv-memory", "32MiB", "--threads", "1", "--max-num-batched-tokens", "64")
    command = (sys.executable, "-m", "support.fakes.poisoned_pd", *words, *sizes)

    def note() -> None:
        if child.pid is not None:
            pids.add(child.pid)

    child = Child(name, command, on_change=note)
    return child


def _proxy(name: str, port: int, store_url: str, timeout: float) -> Child:
    ports = ("--port", str(port), "--grpc-port", str(free_port()))
    words = ("proxy", "--store", store_url, *ports, "--request-timeout", str(timeout))
    return Child(name, (sys.executable, "-m", "triptych.apps.cli", *words))


async def _answers(url: str, watches: Sequence[asyncio.Task[int]], workers: int) -> None:
    """Returns when the proxy knows all workers."""
    seen = ""

    def poll() -> bool:
        nonlocal seen
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            seen = _page(f"{url}/metrics")
        return f'triptych_workers{{pool="pd"}} {float(workers)}' in seen

    async def all_there() -> None:
        while not await asyncio.to_thread(poll):
            assert not any(watch.done() for watch in watches), "a process cannot work as configured"
            await asyncio.sleep(0.1)

    await within(f"{workers} PD workers behind {url}", all_there())


def _page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as reply:
        return str(reply.read().decode())
