"""State of a cluster: its registered workers, whether a proxy answers, and the file of its processes."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import tempfile
from collections.abc import Mapping
from pathlib import Path

from triptych.registry.registry import Registry
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore
from triptych.store.topology.location import redacted

FILE = "cluster.json"
_ANSWER_SECONDS = 2.0


async def registered(store_url: str) -> dict[str, int]:
    """How many workers each pool has; none while the store is away."""
    counts: dict[str, int] = {}
    try:
        store = await EmbeddingStore.connect(store_url)
    except StoreUnavailable:
        return counts
    try:
        for worker in await Registry(store).workers():
            counts[worker.pool] = counts.get(worker.pool, 0) + 1
    except StoreUnavailable:
        return {}
    finally:
        await store.close()
    return counts


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
    target = run_dir / FILE
    text = json.dumps({"store": redacted(store_url), **more})
    if not target.exists() or target.read_text() != text:
        # A new file of mode 0600: other users neither own it nor read it.
        descriptor, scratch = tempfile.mkstemp(dir=target.parent, prefix="cluster-")
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(scratch, target)


def remove_state(run_dir: Path) -> None:
    """Removes the file. Idempotent."""
    (run_dir / FILE).unlink(missing_ok=True)
