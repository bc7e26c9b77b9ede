"""Mixed load for minutes with a fault every 20 s: nothing lost, nothing wrong, memory flat, then at rest.

TRIPTYCH_SOAK_SECONDS (1800), TRIPTYCH_SOAK_AT_ONCE (1: faults that begin together), TRIPTYCH_SOAK_PICTURES
(waves; photos, documents, screenshots) and TRIPTYCH_SOAK_RESULT (a file for the table, its plot beside it)
change the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.chaos.rest import assert_at_rest
from support.chaos.soak import TOKENS, Clients, Faults
from support.chaos.soak_report import Memory, plot, table
from support.data.traffic import expected, mixed_cases
from support.processes.cluster import PATIENCE, Cluster, free_port, start_cluster, wait_for
from support.processes.relay import Relay
from support.waiting import within
from triptych.apps.launch.embedded_store import EmbeddedStore
from triptych.goodput.load.pictures import draw
from triptych.goodput.load.workload import Picture

SECONDS = float(os.environ.get("TRIPTYCH_SOAK_SECONDS", "1800"))
RESULT = os.environ.get("TRIPTYCH_SOAK_RESULT", "")
AT_ONCE = int(os.environ.get("TRIPTYCH_SOAK_AT_ONCE", "1"))
#: Width and height of the pictures.
SIZES = ((224, 224), (320, 240))
PICTURES = os.environ.get("TRIPTYCH_SOAK_PICTURES", "waves")
FAULT_SECONDS = 20.0
CLIENTS = 8
#: A line through a long-lived process's memory may rise by so much of it after the first quarter of the run.
GROWTH = 0.02
#: In runs of less than half an hour caches still fill, and the proxy's memory is one tooth of a saw of some
#: 15 MiB (it collects cycles once there are 50 000 new objects). The store's bound is its own 32 MiB.
GROWTH_MIB = 32.0
LONG = 1800.0
#: So small that they are full, and evict, before the first quarter of the run is over.
CACHES = ("--kv-memory", "16MiB", "--encoder-cache-memory", "8MiB")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 600)]


@dataclass(frozen=True)
class Relayed:
    """A cluster whose store, and one of whose two PD workers, are behind relays."""

    cluster: Cluster
    store: EmbeddedStore
    store_relay: Relay
    pd_relay: Relay


@pytest.fixture
def relayed(checkpoint: Path) -> Iterator[Relayed]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        store = EmbeddedStore(folder / "store", 32 << 20)
        store.start()
        stack.callback(store.stop)
        front = folder / "relay.sock"
        store_relay = stack.enter_context(Relay(front, folder / "store" / "store.sock"))
        ports = free_port(), free_port()
        pd_relay = stack.enter_context(Relay(ports[0], ports[1]))
        cluster = start_cluster(
            checkpoint,
            folder / "run",
            *("--store", f"unix://{front}", "--encoders", "2", "--pd-workers", "1", "--threads", "1"),
            *("--request-timeout", "120", "--store-wait", "120", *CACHES),
        )
        stack.callback(cluster.stop)
        cluster.add_worker(
            *("pd", str(checkpoint), "--threads", "1", *CACHES),
            *("--port", str(ports[1]), "--advertise", f"127.0.0.1:{ports[0]}"),
        )
        wait_for("the second PD worker", lambda: len(cluster.workers()) == 4)
        yield Relayed(cluster, store, store_relay, pd_relay)


async def test_nothing_is_lost_or_wrong_while_everything_breaks(relayed: Relayed, checkpoint: Path) -> None:
    cluster = relayed.cluster
    cases = mixed_cases(24, 6, SIZES, lambda *seed_and_size: draw(Picture(*seed_and_size, PICTURES)))
    reference = await asyncio.to_thread(expected, checkpoint, cases, TOKENS)
    clients = Clients(cluster.url, cases, reference, seed=6)
    faults = Faults(cluster, relayed.store.url, relayed.store_relay, relayed.pd_relay, clients)
    memory = Memory(
        {
            "proxy": cluster.pid("proxy"),
            "supervisor": cluster.process.pid,
            "fork-server": cluster.pid("fork-server"),
            "PD worker behind the relay": cluster.extra[0].pid,
            "store": relayed.store.pid,
        },
        lambda: cluster.pids("encoder") | cluster.pids("pd"),
    )
    watching = asyncio.create_task(memory.run())
    asking = asyncio.create_task(clients.run(CLIENTS))
    await faults.run(SECONDS, FAULT_SECONDS, seed=6, at_once=AT_ONCE)
    clients.end()
    await within("the last answers of the clients", asking, 2 * PATIENCE)
    await asyncio.to_thread(assert_at_rest, cluster)
    memory.poll()
    watching.cancel()
    counters = {
        "resumes and submits to another PD worker": cluster.total("proxy", "triptych_resumes_total"),
        "embeddings encoded again": cluster.total("proxy", "triptych_re_encodes_total"),
        "encoder jobs": cluster.total("proxy", "triptych_encoder_jobs_total"),
    }
    lines = table(clients.tally, faults, memory, counters, SECONDS)
    if RESULT:
        Path(RESULT).write_text("\n".join(_report(lines)) + "\n")
        plot(memory, faults, Path(RESULT).with_suffix(".png"))
    assert not clients.tally.wrong
    assert not clients.tally.lost
    assert clients.tally.ties * 100 <= clients.tally.answered
    if sum(count for name, count in faults.done.items() if "loaded" in name) > faults.unmet:
        assert counters["embeddings encoded again"] > 0, "no loss was in time to be noticed"
    grown = {name: memory.growth(name) for name in memory.samples}
    assert all(mib < _bound(memory, name) for name, mib in grown.items()), grown


def _bound(memory: Memory, name: str) -> float:
    """MiB that the process may grow by."""
    if name == "store" or LONG > SECONDS:
        return GROWTH_MIB
    return GROWTH * memory.settled(name)[0][1]


def _report(lines: list[str]) -> list[str]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], text=True, capture_output=True, check=True
    ).stdout.strip()
    command = (
        f"TRIPTYCH_SOAK_SECONDS={SECONDS:.0f} TRIPTYCH_SOAK_AT_ONCE={AT_ONCE} "
        f"TRIPTYCH_SOAK_PICTURES={PICTURES} TRIPTYCH_SOAK_RESULT=benchmarks/results/soak.md "
        "python -m pytest tests/chaos/test_soak.py"
    )
    return [
        "# Soak",
        "",
        f"Command: `{command}`",
        f"Date: {datetime.date.today()}. Commit: {commit}. {os.cpu_count()} cores ({platform.machine()}). "
        f"Load at the end: {os.getloadavg()[0]:.1f}.",
        "",
        f"{CLIENTS} clients in a closed loop stream {TOKENS} tokens each: text, one picture, three pictures,",
        f"and pictures that requests share ({PICTURES}); half of the requests repeat what is cached, half",
        "are new. Two encoders, two PD workers, a store of 32 MiB behind a relay, one PD worker behind",
        f"another. Every answer is compared with `transformers.generate`, token for token. {AT_ONCE} at a",
        f"time, faults begin {FAULT_SECONDS:.0f} s after the end of those before.",
        "",
        *lines,
        "",
        "![Memory of every process](soak.png)",
        "",
        "Memory counts as flat when a straight line through the samples of the last three quarters rises by",
        f"less than {GROWTH:.0%} of it in each process (in shorter runs, and for the store, whose",
        f"bound is its own: {GROWTH_MIB:.0f} MiB); the proxy's is a saw: it collects cycles seldom.",
    ]
