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
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib import pyplot as plt

from support.chaos.rest import assert_at_rest
from support.chaos.soak import TOKENS, Clients, Faults, Tally
from support.data.traffic import expected, mixed_cases
from support.processes.cluster import PATIENCE, Cluster, free_port, start_cluster, wait_for
from support.processes.relay import Relay
from support.waiting import within
from triptych.apps.launch.embedded_store import EmbeddedStore
from triptych_bench.goodput.load.pictures import draw
from triptych_bench.goodput.load.workload import Picture

matplotlib.use("Agg")


class Memory:
    """Resident memory of processes over time, in MiB; and their open files at the two ends."""

    def __init__(self, pids: dict[str, int], restarted: Callable[[], dict[str, int]]) -> None:
        self._pids = pids
        self._restarted = restarted
        self.samples: dict[str, list[tuple[float, float]]] = {name: [] for name in pids}
        #: Of processes that faults end: each sample is of whichever process has the name then.
        self.restarted: dict[str, list[tuple[float, float]]] = {}
        self.files: dict[str, list[int]] = {name: [] for name in pids}

    async def run(self) -> None:
        while True:
            self.poll()
            await asyncio.sleep(2)

    def poll(self) -> None:
        for name, pid in self._pids.items():
            with contextlib.suppress(OSError):
                self.samples[name].append((time.monotonic(), resident(pid)))
                self.files[name].append(len(os.listdir(f"/proc/{pid}/fd")))
        for name, pid in self._restarted().items():
            with contextlib.suppress(OSError):
                self.restarted.setdefault(name, []).append((time.monotonic(), resident(pid)))

    def settled(self, name: str) -> list[tuple[float, float]]:
        """Samples of the last three quarters: the first one warms up."""
        samples = self.samples[name]
        return samples[len(samples) // 4 :]

    def growth(self, name: str) -> float:
        """MiB that a straight line through the settled samples grows from their first to their last."""
        samples = self.settled(name)
        times = [at - samples[0][0] for at, _ in samples]
        sizes = [size for _, size in samples]
        mean_t, mean_s = sum(times) / len(times), sum(sizes) / len(sizes)
        spread = sum((t - mean_t) ** 2 for t in times)
        slope = sum((t - mean_t) * (s - mean_s) for t, s in zip(times, sizes, strict=True)) / (spread or 1.0)
        return slope * times[-1]


def resident(pid: int) -> float:
    """MiB of a process that are in memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(pid)


def table(
    tally: Tally, faults: Faults, memory: Memory, counters: dict[str, float], seconds: float
) -> list[str]:
    """Lines of a Markdown report."""
    slow = sorted(tally.seconds)
    rows: list[tuple[str, Any]] = [
        ("seconds", f"{seconds:.0f}"),
        ("faults", sum(faults.done.values()) - faults.unmet),
        ("requests answered", tally.answered),
        ("lost", len(tally.lost)),
        ("wrong", len(tally.wrong)),
        ("first difference at a tie of the reference", tally.ties),
        ("429 and 503 with Retry-After, tried again", f"{tally.refused[429]} and {tally.refused[503]}"),
        ("streams that their clients left", tally.abandoned),
        *counters.items(),
        ("latency, median / P99 / worst, s", _latencies(slow)),
    ]
    lines = ["| figure | value |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)]
    lines += ["", "| fault | times |", "| --- | --- |"]
    lines += [f"| {name} | {count} |" for name, count in sorted(faults.done.items())]
    lines += [
        "",
        "| process | RSS first | settled | last, MiB | growth after settling | files first, last |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, samples in memory.samples.items():
        sizes = [size for _, size in samples]
        files = memory.files[name]
        lines.append(
            f"| {name} | {sizes[0]:.1f} | {memory.settled(name)[0][1]:.1f} | {sizes[-1]:.1f} "
            f"| {memory.growth(name):+.1f} MiB | {files[0]}, {files[-1]} |"
        )
    return lines


def _latencies(ordered: Sequence[float]) -> str:
    return " / ".join(
        f"{ordered[min(int(len(ordered) * share), len(ordered) - 1)]:.2f}" for share in (0.5, 0.99, 1.0)
    )


def plot(memory: Memory, faults: Faults, path: Path) -> None:
    """Memory of every process over the minutes of the run; each fault is a grey line."""
    shown = memory.samples | {f"{name}, restarted by faults": on for name, on in memory.restarted.items()}
    figure, axes = plt.subplots(
        len(shown), 1, figsize=(9, 1.7 * len(shown)), sharex=True, layout="constrained"
    )
    start = min(samples[0][0] for samples in memory.samples.values())
    for axis, (name, samples) in zip(axes, shown.items(), strict=True):
        for at, _ in faults.log:
            axis.axvline((at - start) / 60, color="#dddddd", linewidth=0.6)
        axis.plot([(at - start) / 60 for at, _ in samples], [size for _, size in samples], color="#0072b2")
        axis.set_ylim(0, 1.15 * max(size for _, size in samples))
        axis.set_ylabel("RSS, MiB")
        axis.set_title(name, loc="left", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("minutes (grey lines: faults begin)")
    figure.savefig(path, dpi=110)
    plt.close(figure)


SECONDS = float(os.environ.get("TRIPTYCH_SOAK_SECONDS", "1800"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 600)]
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
