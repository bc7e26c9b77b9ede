"""Start and memory of a PD worker and of an encoder, with a checkpoint of a real size.

    python -m benchmarks role_startup MODEL [--dtype bfloat16] [--kv-memory 256MiB] [--runs 5] [--write]

Start: each worker alone, from exec to its "ready" line, its store running already. Memory: `triptych serve`
under a load of long texts and of pictures, all at once; the most that each worker had resident, what it
shares with others included, by 1.25 x its weights + KV cache + 400 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.baselines.tables import table
from benchmarks.micro.encoder_startup import free_port, memory_mb, wait_for
from benchmarks.result_page import RESULTS, add_write_flag, publish
from benchmarks.stages.work import Weights
from benchmarks.targets import record
from triptych.config import parse_size
from triptych.goodput.load.pictures import data_url
from triptych.goodput.load.workload import Picture
from triptych.goodput.report.machine import chip, commit
from triptych.launch.embedded_store import EmbeddedStore

RESULT = RESULTS / "role_startup.md"
ROLES = ("pd", "encoder")
#: Requests of each kind that are sent at once, and the words of a text.
_REQUESTS, _WORDS, _TOKENS = 16, 300, 32
_SIDE = 320
#: Beyond 1.25 x weights and KV cache.
_FIXED_MB = 400.0
_BYTES = {"bfloat16": 2, "float32": 4}


def start_seconds(role: str, model: Path, words: list[str]) -> float:
    """From exec to ready of one worker."""
    with tempfile.TemporaryDirectory(prefix="triptych-") as folder:
        store = EmbeddedStore(Path(folder), 64 << 20)
        store.start()
        begun = time.perf_counter()
        try:
            with _running([role, str(model), "--store", store.url, *words]) as process:
                wait_for(process, f"ready: {role}", begun)
                return time.perf_counter() - begun
        finally:
            store.stop()


def peaks(model: Path, words: list[str]) -> dict[str, float]:
    """The most MB that the workers of a cluster had resident by the end of the load."""
    with tempfile.TemporaryDirectory(prefix="triptych-") as folder:
        port, begun = free_port(), time.perf_counter()
        ports = ["--port", str(port), "--grpc-port", str(free_port()), "--run-dir", folder]
        with _running(["serve", str(model), "--encoders", "1", *ports, *words]) as process:
            wait_for(process, "1 of 1 encoder, 1 of 1 pd", begun)
            _load(f"http://127.0.0.1:{port}/v1/chat/completions", model.name)
            pids = json.loads(Path(folder, "cluster.json").read_text())["processes"]
            return {role: memory_mb(int(pids[f"{role}-0"]), "VmHWM") for role in ROLES}


@contextmanager
def _running(words: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "triptych.cli", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def _load(url: str, model: str) -> None:
    """Sends all requests at once; HTTPError for one that is not answered with a completion."""
    text = [{"type": "text", "text": " ".join(str(number) for number in range(_WORDS))}]
    bodies = []
    for number in range(_REQUESTS):
        picture = data_url(Picture(number, _SIDE, _SIDE)).decode()
        for content in (text, [{"type": "image_url", "image_url": {"url": picture}}]):
            message = {"role": "user", "content": content}
            bodies.append({"model": model, "messages": [message], "max_tokens": _TOKENS, "ignore_eos": True})

    def send(body: dict[str, object]) -> None:
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=300.0).read()

    with ThreadPoolExecutor(len(bodies)) as executor:
        list(executor.map(send, bodies))


def allowed_mb(weights: float, kv: float) -> float:
    """What a worker with so many MB of weights and KV cache may take at most."""
    return 1.25 * weights + kv + _FIXED_MB


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--title", default="MODEL", help="how the page names the checkpoint")
    parser.add_argument("--dtype", choices=tuple(_BYTES), default="bfloat16")
    parser.add_argument("--kv-memory", default="256MiB")
    parser.add_argument("--runs", type=int, default=5)
    add_write_flag(parser, RESULT)
    options = parser.parse_args()
    kv_words = ["--kv-memory", options.kv_memory]
    starts: dict[str, list[float]] = {role: [] for role in ROLES}
    for _ in range(options.runs):
        for role in ROLES:
            words = ["--dtype", options.dtype, *(kv_words if role == "pd" else ())]
            starts[role].append(start_seconds(role, options.model, words))
    most = peaks(options.model, ["--dtype", options.dtype, *kv_words])
    weights = Weights.of(options.model)
    width, kv = _BYTES[options.dtype] / 1e6, parse_size(options.kv_memory) / 1e6
    # The decoder's embeddings are as many numbers as its head has.
    needed = {
        "pd": allowed_mb((weights.decoder + 2 * weights.head) * width, kv),
        "encoder": allowed_mb((weights.tower + weights.merger) * width, 0.0),
    }
    publish(report(starts, most, needed, options), RESULT, write=options.write)
    if options.write:
        middle = {role: statistics.median(found) for role, found in starts.items()}
        record("start on small", {"PD s": middle["pd"], "encoder s": middle["encoder"]}, RESULT)
        share = max(most[role] / needed[role] for role in ROLES)
        record("memory on small", {"of 1.25 x weights + KV + 400 MB": share}, RESULT)


def report(
    starts: dict[str, list[float]],
    most: dict[str, float],
    needed: dict[str, float],
    options: argparse.Namespace,
) -> str:
    rows = [
        [
            role,
            f"{statistics.median(starts[role]):.2f} ({min(starts[role]):.2f} – {max(starts[role]):.2f})",
            f"{most[role]:.0f}",
            f"{needed[role]:.0f}",
            f"{most[role] / needed[role]:.2f}",
        ]
        for role in ROLES
    ]
    head = ["worker", "exec to ready, s", "peak, MB", "1.25 x weights + KV + 400 MB", "share"]
    lines = [
        "# Start and memory of the workers",
        "",
        f"`python -m benchmarks role_startup {options.title} --dtype {options.dtype} --kv-memory "
        f"{options.kv_memory} --runs {options.runs}`, {datetime.now(UTC):%Y-%m-%d}, commit {commit()}, "
        f"{chip()}; load average {os.getloadavg()[0]:.1f} at the end.",
        "",
        "Each worker alone, files in the page cache. The peak is of `triptych serve` under "
        f"{_REQUESTS} long texts and {_REQUESTS} pictures at once, what workers share included.",
        "",
        *table(head, rows),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
