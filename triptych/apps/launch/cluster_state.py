"""State of a running cluster: its folder and files, its registered workers, whether a proxy answers."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import ssl
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

from triptych.base.errors import ConfigError
from triptych.base.types import WorkerInfo
from triptych.registry.registry import Registry
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore
from triptych.store.topology.location import redacted

logger = logging.getLogger("launch")

FILE, TARGETS_FILE = "cluster.json", "targets.json"
_ANSWER_SECONDS, _RETRY_SECONDS = 2.0, 0.5


async def connected(store_url: str) -> EmbeddingStore:
    """A connection to the store, as soon as that answers."""
    while True:
        try:
            return await EmbeddingStore.connect(store_url)
        except StoreUnavailable:
            await asyncio.sleep(_RETRY_SECONDS)


async def registered_workers(store_url: str) -> list[WorkerInfo]:
    """The workers of all pools; none while the store is away."""
    with contextlib.suppress(StoreUnavailable):
        store = await EmbeddingStore.connect(store_url)
        try:
            return await Registry(store).workers()
        finally:
            await store.close()
    return []


async def registered(store_url: str) -> Counter[str]:
    """How many workers each pool has."""
    return Counter(worker.pool for worker in await registered_workers(store_url))


async def answers_ready(host: str, port: int, *, tls: bool = False) -> bool:
    """Whether the proxy's GET /ready says 200, by HTTPS with `tls`."""
    context = _unverified() if tls else None
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
            writer.write(f"GET /ready HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            await writer.drain()
            line = await reader.readline()
            writer.close()
            await writer.wait_closed()
    except (OSError, TimeoutError):
        return False
    return line.split()[1:2] == [b"200"]


def _unverified() -> ssl.SSLContext:
    """TLS with any server: the address may be none of the certificate's names, and nothing secret is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def write_state(run_dir: Path, store_url: str, more: Mapping[str, object]) -> None:
    """Brings cluster.json up to date: the store's address, and `more`."""
    _replace(run_dir / FILE, json.dumps({"store": redacted(store_url), **more}))


def remove_state(run_dir: Path) -> None:
    """Removes the files. Idempotent."""
    for name in (FILE, TARGETS_FILE):
        (run_dir / name).unlink(missing_ok=True)


_LOCK = "serve.lock"


@contextmanager
def run_folder(given: str) -> Iterator[Path]:
    """The folder of --run-dir, or a new one that goes at the end, for this process alone.

    ConfigError where another cluster runs in it: two would replace each other's store.
    """
    path = Path(given or tempfile.mkdtemp(prefix="triptych-")).absolute()
    try:
        lock = _lock(path)
        try:
            yield path
        finally:
            os.close(lock)
    finally:
        if not given:
            shutil.rmtree(path, ignore_errors=True)


def _lock(path: Path) -> int:
    """The open lock file. The lock ends with this process at the latest; the file stays."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"--run-dir {path} cannot be used ({error.strerror}): name a folder that may be written"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise ConfigError(
            f"--run-dir {path} is in use by another `triptych serve`: name another folder, or leave it out"
        ) from error
    return lock


TARGETS_SECONDS = 5.0


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
    """Brings targets.json up to date, which Prometheus reads by `file_sd_configs`."""
    _replace(folder / TARGETS_FILE, json.dumps(groups, indent=1))


def _replace(target: Path, text: str) -> None:
    """Writes the file where it says something else; a reader never sees half of it."""
    if target.exists() and target.read_text() == text:
        return
    # A new file of mode 0600: other users neither own it nor read it.
    descriptor, scratch = tempfile.mkstemp(dir=target.parent, prefix=f"{target.stem}-")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(scratch, target)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


async def keep_targets(registry: Registry, folder: Path, proxy: str) -> None:
    """Keeps the file up to date, for ever. While the store is away it stays as it is."""
    while True:
        with contextlib.suppress(StoreUnavailable):
            try:
                write_targets(folder, scrape_targets(await registry.workers(), proxy))
            except OSError as error:
                logger.warning("%s is out of date: %s", TARGETS_FILE, error)
        await asyncio.sleep(TARGETS_SECONDS)
