"""A real proxy process before scripted workers of the test's own, and how much memory it takes."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from support.fakes.fake_encoder import FakeEncoder
from support.fakes.fake_pd import FakePD
from support.fakes.fake_workers import TOKEN
from support.waiting import until
from triptych.registry.registry import Registry
from triptych.store.embedding_store import EmbeddingStore

_READY = re.compile(r"ready: proxy http://127\.0\.0\.1:(\d+) grpc 127\.0\.0\.1:(\d+)")


@dataclass
class ProxyProcess:
    """`port` and `grpc_port` on loopback."""

    pid: int
    port: int
    grpc_port: int
    pd: FakePD
    encoder: FakeEncoder

    def memory(self, name: str = "VmRSS") -> int:
        """Bytes resident now, or at their peak ("VmHWM")."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
        raise AssertionError(f"the kernel does not tell {name}")

    def forget_peak(self) -> int:
        """From here on the peak counts anew; the bytes resident now."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        return self.memory()


@asynccontextmanager
async def proxy_process(
    store: EmbeddingStore, store_url: str, folder: Path, *words: str
) -> AsyncIterator[ProxyProcess]:
    """`triptych proxy` with these further options, one FakePD and one FakeEncoder, until the block ends."""
    pd, encoder = FakePD(), FakeEncoder(store)
    try:
        for worker in (pd, encoder):
            await worker.start()
            await Registry(store).register(worker.info, term=600.0)
        async with started_proxy(store_url, folder / "proxy.log", *words) as (process, port, grpc_port):
            await until(lambda: pd.attaches, "the proxy's stream")
            yield ProxyProcess(process.pid, port, grpc_port, pd, encoder)
    finally:
        await pd.kill()
        await encoder.kill()


@asynccontextmanager
async def started_proxy(
    store_url: str, log: Path, *words: str
) -> AsyncIterator[tuple[subprocess.Popen[bytes], int, int]]:
    """`triptych proxy` alone with these further options: process, HTTP port and gRPC port."""
    async with started_service(store_url, log, "proxy", "--port", "0", "--grpc-port", "0", *words) as process:

        def ready() -> re.Match[str] | None:
            assert process.poll() is None, log.read_text()
            return _READY.search(log.read_text())

        await until(ready, "the proxy's start")
        found = ready()
        assert found is not None
        yield process, int(found[1]), int(found[2])


@asynccontextmanager
async def started_service(store_url: str, log: Path, *words: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    """`triptych WORDS` with the tests' internal token, until the block ends; it may still be starting."""
    command = [sys.executable, "-m", "triptych.apps.cli", *words, "--store", store_url]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=os.environ | {"TRIPTYCH_INTERNAL_TOKEN": TOKEN}
        )
    try:
        yield process
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 60)
