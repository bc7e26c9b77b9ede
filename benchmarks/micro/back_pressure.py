"""Goodput while a PD worker is the bottleneck and the images are more than the store holds, rules on and off.

A burst fills the queue and clients keep it full, each request with an image of its own. With the rules, an
image is encoded once a PD worker has room for it; without them (`--no-flow-control`) as soon as an encoder is
free: the store then evicts what is not loaded yet, and it is encoded again.

    python -m benchmarks.micro.back_pressure [--seconds 90] [--clients 250] [--tokens 24] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import datetime
import io
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from benchmarks.result_page import RESULTS, add_write_flag, publish
from triptych.config import WorkerCounts
from triptych.goodput.launch import Launched, launched
from triptych.goodput.report.machine import commit
from triptych.launch.model_path import DEMO_MODEL

RESULT = RESULTS / "back_pressure.md"
WINDOW = 10.0
START_SECONDS = 180.0
STORE = "8MiB"
ENCODER_CACHE = "2MiB"


@dataclass(slots=True)
class MixRun:
    """What one run has shown."""

    rules: bool
    finished: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    #: Encoder jobs that the proxy has opened: first ones and repetitions.
    first: float = 0.0
    again: float = 0.0
    #: Items that went through a tower.
    encoded: float = 0.0

    def windows(self, seconds: float) -> list[float]:
        """Requests per second in each whole window."""
        counts = Counter(int(at // WINDOW) for at in self.finished)
        return [counts[index] / WINDOW for index in range(int(seconds // WINDOW))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--tokens", type=int, default=24, help="output tokens of each request")
    parser.add_argument("--side", type=int, default=384, help="pixels of an image's side")
    parser.add_argument("--images", type=int, default=1, help="images of each request")
    parser.add_argument("--clients", type=int, default=250, help="requests in flight")
    parser.add_argument("--encoders", type=int, default=1)
    add_write_flag(parser, RESULT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="back-pressure-") as folder:
        model = sized_model(Path(folder) / "demo", options.side)
        runs = [measure(model, rules, options) for rules in (True, False)]
    text = report(runs, options)
    publish(text, RESULT, write=options.write)


def sized_model(target: Path, side: int) -> Path:
    """The demo model with its pictures as large as `side`."""
    shutil.copytree(DEMO_MODEL, target)
    path = target / "preprocessor_config.json"
    config = json.loads(path.read_text())
    config["size"]["longest_edge"] = side * side
    path.write_text(json.dumps(config))
    return target


def measure(model: Path, rules: bool, options: argparse.Namespace) -> MixRun:
    words = ["--store-memory", STORE, "--encoder-cache-memory", ENCODER_CACHE, "--max-num-seqs", "1"]
    words += ["--threads", "1", "--kv-memory", "64MiB", "--prepared-memory", "1GiB"]
    words += ["--max-queue", str(options.clients + 8), "--no-prefix-caching", "--request-timeout", "600"]
    words += [] if rules else ["--no-flow-control"]
    shape = WorkerCounts(encoders=options.encoders, pd_workers=1)
    with launched(shape, str(model), words, START_SECONDS) as cluster:
        return asyncio.run(load(cluster, MixRun(rules), options))


async def load(cluster: Launched, run: MixRun, options: argparse.Namespace) -> MixRun:
    """Keeps `clients` requests in flight for `seconds`."""
    began = time.monotonic()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as session:
        clients = [
            asyncio.create_task(client(session, cluster.url, index, run, began, options))
            for index in range(options.clients)
        ]
        await asyncio.sleep(options.seconds)
        jobs, run.encoded = await asyncio.to_thread(counts, cluster.metrics_urls)
        for task in clients:
            task.cancel()
        ends = await asyncio.gather(*clients, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end
    run.first, run.again = jobs["first"], jobs["re_encode"]
    return run


async def client(
    session: aiohttp.ClientSession,
    url: str,
    index: int,
    run: MixRun,
    began: float,
    options: argparse.Namespace,
) -> None:
    """Asks about one new image after the other; a refused one is asked again after Retry-After."""
    number = 0
    while True:
        body = request(index * 10_000 + number, options)
        number += 1
        asked = time.monotonic()
        while True:
            async with session.post(f"{url}/v1/chat/completions", data=body) as reply:
                await reply.read()
                run.statuses[reply.status] += 1
                if reply.status == 200:
                    break
                await asyncio.sleep(float(reply.headers.get("retry-after", "1")))
        run.finished.append(time.monotonic() - began)
        run.latencies.append(time.monotonic() - asked)


def request(seed: int, options: argparse.Namespace) -> bytes:
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": picture(seed * options.images + index, options.side)}}
        for index in range(options.images)
    ]
    body = {
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "How many shapes?"}]}],
        "max_tokens": options.tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    return json.dumps(body).encode()


def picture(seed: int, side: int) -> str:
    """A picture of squares in colours of its own."""
    tiles = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    image = Image.fromarray(tiles).resize((side, side), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def counts(urls: Sequence[str]) -> tuple[dict[str, float], float]:
    """Encoder jobs of the proxy so far by kind, and items that went through the towers."""
    jobs, encoded = {"first": 0.0, "re_encode": 0.0}, 0.0
    for sample in (sample for url in urls for sample in samples(url)):
        if sample.name == "triptych_encoder_jobs_total":
            (kind,) = sample.labels.values()
            jobs[kind] += sample.value
        elif sample.name == "triptych_encoder_tower_items_total":
            encoded += sample.value
    return jobs, encoded


def samples(url: str) -> list[Sample]:
    with urllib.request.urlopen(url, timeout=30) as reply:
        families = text_string_to_metric_families(reply.read().decode())
        return [sample for family in families for sample in family.samples]


def report(runs: list[MixRun], options: argparse.Namespace) -> str:
    command = "python -m benchmarks.micro.back_pressure " + " ".join(
        f"--{name} {getattr(options, name):g}"
        for name in ("seconds", "clients", "images", "tokens", "side", "encoders")
    )
    windows = [run.windows(options.seconds) for run in runs]
    per_answer = [run.encoded / max(len(run.finished) * options.images, 1) for run in runs]
    rows = [
        ("goodput, requests/s over all", [len(run.finished) / options.seconds for run in runs], ".2f"),
        ("goodput, second half", [statistics.mean(w[len(w) // 2 :]) for w in windows], ".2f"),
        ("goodput, lowest window after the first", [min(w[1:]) for w in windows], ".2f"),
        ("images that the towers have encoded", [run.encoded for run in runs], ".0f"),
        ("of these again, for admitted requests", [run.again for run in runs], ".0f"),
        ("share of encoder work that was a repetition, %", [share(run) for run in runs], ".1f"),
        ("images encoded per image of an answered request", per_answer, ".2f"),
        ("429", [run.statuses[429] for run in runs], ".0f"),
        ("503", [run.statuses[503] for run in runs], ".0f"),
        ("latency, median, s", [statistics.median(run.latencies or [0]) for run in runs], ".1f"),
    ]
    lines = [
        "# Back-pressure",
        "",
        f"Command: `{command} --write`",
        f"Date: {datetime.date.today()}. Commit: {commit()}. {os.cpu_count()} cores ({platform.machine()}). "
        f"Load at the end: {os.getloadavg()[0]:.1f}.",
        "",
        "| | rules on | rules off |",
        "| --- | --- | --- |",
        *(f"| {name} | {format(on, form)} | {format(off, form)} |" for name, (on, off), form in rows),
        "",
        f"One PD worker that runs one request at a time and has {ENCODER_CACHE} for embeddings, a store of",
        f"{STORE}; {options.clients} clients begin at once, and each asks anew once it has its answer.",
        "Without the rules jobs run in the order of their coming, admitted or not, nothing bounds what is",
        "published and unread, repetitions have no precedence, and nothing is refused.",
        "",
        f"Requests answered per second in windows of {WINDOW:.0f} s:",
        "",
        "| seconds | rules on | rules off |",
        "| --- | --- | --- |",
        *(
            f"| {index * WINDOW:.0f}–{(index + 1) * WINDOW:.0f} | {on:.2f} | {off:.2f} |"
            for index, (on, off) in enumerate(zip(*windows, strict=True))
        ),
    ]
    return "\n".join(lines) + "\n"


def share(run: MixRun) -> float:
    return 100 * run.again / max(run.encoded, 1.0)


if __name__ == "__main__":
    main()
