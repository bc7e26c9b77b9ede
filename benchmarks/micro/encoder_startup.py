"""Start of an encoder worker: seconds from exec to ready, and resident memory, with a given checkpoint.

    python benchmarks/micro/encoder_startup.py MODEL [--runs 5] [--write]

Every run starts a store and a fresh `triptych encoder`, waits for its "ready" line, encodes one picture and
reads /proc; in turns with it, the same without `quick_imports`. Then `triptych serve` is started, and its
encoder is killed twice: the first is forked again, the second, without a fork server, starts by exec. CPU
seconds are reported beside the wall clock, since other processes may share the cores; the goal is 5 s and
1 GB. Needs the `worker` and `embedded` extras and a checkout with `triptych` installed
or on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from benchmarks.baselines.servers import usages
from benchmarks.result_page import RESULTS, add_write_flag, publish
from triptych.apps.launch.embedded_store import EmbeddedStore
from triptych.base import hashing
from triptych.base.config import WorkerCounts
from triptych.base.rpc.channels import make_channel
from triptych.base.types import WorkerInfo
from triptych.goodput.launch import Launched, launched, processes_of
from triptych.protos import encoder_pb2, encoder_pb2_grpc
from triptych.registry.registry import Registry
from triptych.store.embedding_store import EmbeddingStore

RESULT = RESULTS / "encoder_startup.md"
START_SECONDS = 120.0
#: `triptych encoder` as it would be without anything that quickens its imports.
_SLOW = """
import contextlib, sys
from triptych.apps.cli import main
sys.modules["triptych.apps.cli.commands.services"].worker_imports = lambda model: contextlib.nullcontext()
main()
"""
_QUICK = ("-m", "triptych.apps.cli")
_READY = "ready: encoder"


@dataclass(frozen=True, slots=True)
class Start:
    """One start: seconds, and MB of resident memory at ready and at the peak after one picture."""

    wall: float
    cpu: float
    ready_mb: float
    peak_mb: float
    job: float


@dataclass(frozen=True, slots=True)
class StartedCluster:
    """`triptych serve`: seconds to ready, and of an encoder's restart, forked and by exec."""

    wall: float
    forked: float
    alone: float


def main() -> None:
    """Measures, prints the table and writes it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    add_write_flag(parser, RESULT)
    options = parser.parse_args()
    starts, slow, clusters = [], [], []
    for _ in range(options.runs):
        starts.append(_measure(_QUICK, options.model, options.device))
        slow.append(_measure(("-c", _SLOW), options.model, options.device))
        clusters.append(_measure_cluster(options.model, options.device))
    report = _report(starts, slow, clusters, options)
    publish(report, RESULT, write=options.write)


def _measure(interpreter_words: Sequence[str], model: str, device: str) -> Start:
    with (
        tempfile.TemporaryDirectory(prefix="triptych-") as folder,
        EmbeddedStore(Path(folder), 64 << 20) as store,
    ):
        log = Path(folder, "log")
        begun = time.perf_counter()
        words = ("encoder", model, "--store", store.url, "--device", device)
        with log.open("wb") as out:
            process = subprocess.Popen([sys.executable, *interpreter_words, *words], stderr=out)
        try:
            wait_for(log, _READY)
            wall = time.perf_counter() - begun
            cpu, ready_mb = usages([process.pid])[process.pid].cpu, memory_mb(process.pid, "VmRSS")
            job = asyncio.run(_encode_one(store.url))
            return Start(wall, cpu, ready_mb, memory_mb(process.pid, "VmHWM"), job)
        finally:
            process.terminate()
            process.wait(timeout=60)


def _measure_cluster(model: str, device: str) -> StartedCluster:
    flags = ("--device", device, "--kv-memory", "64MiB")
    with launched(WorkerCounts(encoders=1, pd_workers=1), model, flags) as cluster:
        forked = _restart(cluster)
        os.kill(processes_of(cluster.run_dir)["fork-server"], signal.SIGKILL)
        return StartedCluster(cluster.startup["seconds_to_ready"], forked, _restart(cluster))


def _restart(cluster: Launched) -> float:
    """Seconds from the death of the encoder to ready again, the supervisor's pause left out."""
    known = len(cluster.log.read_text())
    os.kill(processes_of(cluster.run_dir)["encoder-0"], signal.SIGKILL)
    killed = time.perf_counter()
    line = wait_for(cluster.log, "encoder-0 ended with", known)
    wait_for(cluster.log, _READY, known)
    wall = time.perf_counter() - killed - float(line.rsplit("in ", 1)[1].removesuffix(" s"))
    # The supervisor writes the new process id down.
    time.sleep(1)
    return wall


def wait_for(log: Path, text: str, known: int = 0) -> str:
    """The first line with `text` after the `known` part of the log."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        lines = log.read_text()[known:].splitlines()
        if (line := next((line for line in lines if text in line), None)) is not None:
            return line
        time.sleep(0.005)
    raise SystemExit(f"{text!r} did not come:\n{log.read_text()}")


def memory_mb(pid: int, name: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(name)) * 1024 / 1e6


async def _encode_one(url: str) -> float:
    """Seconds of one job, from its first message to ready."""
    store = await EmbeddingStore.connect(url)
    try:
        worker = await _worker(store)
        async with make_channel(worker.address) as channel:
            return await _job(encoder_pb2_grpc.EncoderServiceStub(channel), worker.namespaces[0])
    finally:
        await store.close()


async def _worker(store: EmbeddingStore) -> WorkerInfo:
    registry = Registry(store)
    async with asyncio.timeout(10):
        while not (workers := await registry.workers()):
            await asyncio.sleep(0.01)
    return workers[0]


async def _job(stub: encoder_pb2_grpc.EncoderServiceStub, namespace: str) -> float:
    out = io.BytesIO()
    Image.effect_noise((96, 96), 80).convert("RGB").save(out, "PNG")
    media = out.getvalue()
    job = encoder_pb2.EncodeJob(
        job_id="benchmark",
        mm_hash=hashing.mm_hash(media, namespace=namespace, modality="image"),
        namespace=namespace,
        modality="image",
        media_bytes=len(media),
        timeout=30,
    )
    begun = time.perf_counter()
    call = stub.Encode(timeout=30)
    await call.write(encoder_pb2.EncodeRequest(job=job))
    await call.write(encoder_pb2.EncodeRequest(media=media))
    await call.write(encoder_pb2.EncodeRequest(run=encoder_pb2.RunJob()))
    async for event in call:
        if event.WhichOneof("body") == "ready":
            return time.perf_counter() - begun
    raise SystemExit("the job was not answered with ready")


def _report(
    starts: list[Start], slow: list[Start], clusters: list[StartedCluster], options: argparse.Namespace
) -> str:
    model = Path(options.model).name
    lines = [
        "# Encoder worker: start to ready, and memory",
        "",
        f"`python -m benchmarks encoder_startup {model} --runs {options.runs} --device {options.device}`, "
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, "
        f"load average {os.getloadavg()[0]:.1f} at the end. Goals: ready within 5 s, below 1000 MB.",
        "",
        "| | median | best | worst |",
        "|---|---|---|---|",
    ]
    for title, runs, name, digits in (
        ("`triptych encoder`: exec to ready, s", starts, "wall", 2),
        ("… CPU until ready, s", starts, "cpu", 2),
        ("… exec to ready without `quick_imports`, s", slow, "wall", 2),
        ("… CPU until ready without `quick_imports`, s", slow, "cpu", 2),
        ("… resident at ready, MB", starts, "ready_mb", 0),
        ("… peak after one picture, MB", starts, "peak_mb", 0),
        ("… first job, media to ready, s", starts, "job", 3),
        ("`triptych serve`: exec to encoder and PD worker ready, s", clusters, "wall", 2),
        ("… encoder from SIGKILL to ready again, forked, s", clusters, "forked", 2),
        ("… encoder from SIGKILL to ready again, no fork server, s", clusters, "alone", 2),
    ):
        values = [getattr(run, name) for run in runs]
        cells = (statistics.median(values), min(values), max(values))
        lines.append(f"| {title} | " + " | ".join(f"{value:.{digits}f}" for value in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
