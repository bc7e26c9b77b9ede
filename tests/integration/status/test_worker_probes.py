"""Probes of real worker processes: while they start, serve, lose their store, drain, and withdraw."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from support.data.checkpoints import build_checkpoint
from support.matrix import matrix
from support.probing import probe
from support.processes.cluster import PATIENCE, free_port, wait_for
from triptych.apps.launch.embedded_store import EmbeddedStore
from triptych.registry.registry import Registry
from triptych.store.embedding_store import EmbeddingStore

READY = {"code": 200, "status": "ready"}
ALIVE = {"code": 200, "status": "ok"}
#: Little enough to be built in a second.
SMALL = ("--threads", "1")
FLAGS = {
    "encoder": SMALL,
    "pd": (*SMALL, "--kv-memory", "16MiB"),
    "colocated": (*SMALL, "--kv-memory", "16MiB"),
}


@contextmanager
def _frozen(store: EmbeddedStore) -> Iterator[None]:
    """The store answers nobody."""
    os.kill(store.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(store.pid, signal.SIGCONT)


@contextmanager
def _worker(role: str, store: EmbeddedStore, port: int) -> Iterator[subprocess.Popen[bytes]]:
    model = str(build_checkpoint("qwen3_vl"))
    command = [sys.executable, "-m", "triptych.apps.cli", role, model, "--store", store.url, *FLAGS[role]]
    process = subprocess.Popen([*command, "--metrics-port", str(port)], stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def _registered(store: EmbeddedStore) -> list[str]:
    """The pools of the workers in the registry."""
    connected = await EmbeddingStore.connect(store.url)
    try:
        return [worker.pool for worker in await Registry(connected).workers()]
    finally:
        await connected.close()


@pytest.mark.parametrize("role", matrix(["encoder", "pd", "colocated"]))
def test_probes_tell_a_workers_phase_and_are_answered_in_all_of_them(role: str, tmp_path: Path) -> None:
    store, port = EmbeddedStore(tmp_path, 64 << 20), free_port()
    store.start()
    try:
        with ExitStack() as stack:
            with _frozen(store):
                process = stack.enter_context(_worker(role, store, port))
                wait_for("its port to answer", lambda: probe(port, "/health") == ALIVE)
                assert probe(port, "/ready") == {"code": 503, "status": "starting"}
            wait_for("the worker to be ready", lambda: probe(port, "/ready") == READY)
            assert probe(port, "/health") == ALIVE
            with _frozen(store):
                wait_for("a store that is missed", lambda: "degraded" in probe(port, "/ready"))
                assert probe(port, "/ready") == {**READY, "degraded": ["store"]}
                assert probe(port, "/health") == ALIVE
            wait_for("a store that is back", lambda: probe(port, "/ready") == READY)
            wait_for("its registration", lambda: asyncio.run(_registered(store)))
            with _frozen(store):
                # It cannot withdraw its registration, which keeps it from ending for a while.
                process.terminate()
                wait_for("the worker to drain", lambda: probe(port, "/ready") != READY)
                assert probe(port, "/ready") == {"code": 503, "status": "draining"}
                assert probe(port, "/health") == ALIVE
            assert process.wait(PATIENCE) == 0
            assert asyncio.run(_registered(store)) == []
    finally:
        store.stop()
