"""Start of an encoder worker: seconds from exec to ready, and resident memory, with a given checkpoint.

    python benchmarks/encoder_startup.py MODEL [--runs 5] [--write]

Every run starts a store and a fresh process, waits for its "ready" line, encodes one picture and reads
/proc. CPU seconds are reported beside the wall clock, since other processes may share the cores; the
goal is 5 s and 1 GB. Needs the `worker` and `embedded` extras and a checkout with `triptych` installed
or on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from triptych import hashing
from triptych.ec_connector.registry import Registry
from triptych.ec_connector.store import EmbeddingStore
from triptych.launch.embedded_store import EmbeddedStore
from triptych.protos import encoder_pb2, encoder_pb2_grpc
from triptych.rpc import make_channel
from triptych.types import WorkerInfo

RESULT = Path(__file__).parent / "results" / "encoder_startup.md"
START_SECONDS = 120.0
_CHILD = """
import asyncio, sys
from triptych.log import setup_logging
setup_logging("encoder-0")
from triptych.config import EncoderConfig
from triptych.encoder_worker.service import run
asyncio.run(run(EncoderConfig(model=sys.argv[1], store=sys.argv[2], device=sys.argv[3])))
"""


@dataclass(frozen=True, slots=True)
class Start:
    """One start: seconds, and MB of resident memory at ready and at the peak after one picture."""

    wall: float
    cpu: float
    ready_mb: float
    peak_mb: float
    job: float


def main() -> None:
    """Measures, prints the table and writes it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    starts = [_measure(options.model, options.device) for _ in range(options.runs)]
    report = _report(starts, options)
    sys.stdout.write(report)
    if options.write:
        RESULT.write_text(report)


def _measure(model: str, device: str) -> Start:
    with tempfile.TemporaryDirectory(prefix="triptych-") as folder:
        store = EmbeddedStore(Path(folder), 64 << 20)
        store.start()
        begun = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, model, store.url, device], stderr=subprocess.PIPE, text=True
        )
        try:
            _wait_until_ready(process, begun)
            wall = time.perf_counter() - begun
            cpu, ready_mb = _cpu_seconds(process.pid), _memory_mb(process.pid, "VmRSS")
            job = asyncio.run(_encode_one(store.url))
            return Start(wall, cpu, ready_mb, _memory_mb(process.pid, "VmHWM"), job)
        finally:
            process.terminate()
            process.communicate(timeout=60)
            store.stop()


def _wait_until_ready(process: subprocess.Popen[str], begun: float) -> None:
    assert process.stderr is not None
    log = []
    for line in process.stderr:
        log.append(line)
        if "ready: encoder" in line:
            return
        if time.perf_counter() - begun > START_SECONDS:
            break
    raise SystemExit("the worker did not become ready:\n" + "".join(log))


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_mb(pid: int, name: str) -> float:
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


def _report(starts: list[Start], options: argparse.Namespace) -> str:
    model = Path(options.model).name
    lines = [
        "# Encoder worker: start to ready, and memory",
        "",
        f"`python benchmarks/encoder_startup.py {model} --runs {options.runs} --device {options.device}`, "
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, "
        f"load average {os.getloadavg()[0]:.1f} at the end. Goals: ready within 5 s, below 1000 MB.",
        "",
        "| | median | best | worst |",
        "|---|---|---|---|",
    ]
    for title, name, digits in (
        ("exec to ready, s", "wall", 2),
        ("CPU until ready, s", "cpu", 2),
        ("resident at ready, MB", "ready_mb", 0),
        ("peak after one picture, MB", "peak_mb", 0),
        ("first job, media to ready, s", "job", 3),
    ):
        values = [getattr(start, name) for start in starts]
        cells = (statistics.median(values), min(values), max(values))
        lines.append(f"| {title} | " + " | ".join(f"{value:.{digits}f}" for value in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
