"""TTFT and encoder jobs of a growing chat whose embeddings the store has lost, with and without skipped jobs.

One encoder, one PD worker and two proxies: one makes no job for what the PD worker's KV cache holds, the
other one runs with --no-skip-held-items. They take turns, chat by chat, each chat with pictures of its own.
Before every turn the store loses all embeddings, as one that is too small for its users does.

    python -m benchmarks.multi_turn [--chats 12] [--pictures 3] [--size 448] [--write]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from benchmarks.result_page import RESULTS, add_write_flag, publish
from benchmarks.scaling.timeline import scrape
from triptych.config import WorkerCounts
from triptych.ec_connector.store import keys
from triptych.goodput.launch import Launched, launched
from triptych.goodput.load.pictures import data_url
from triptych.goodput.load.workload import Picture
from triptych.goodput.report.machine import chip, commit
from triptych.launch.parent import supervised
from triptych.progress.progress import each

RESULT = RESULTS / "multi_turn.md"
TOKENS = 8
PATIENCE = 300.0
QUESTION = (
    "Describe this picture beside the earlier ones, with all shapes and colours that you can see in it."
)


@dataclass
class Found:
    """Of one proxy: seconds to the first token and encoder jobs, a list of turns for every chat."""

    ttft: list[list[float]] = field(default_factory=list)
    jobs: list[list[int]] = field(default_factory=list)

    def turn(self, index: int) -> tuple[float, float]:
        """Median TTFT and mean jobs of a turn."""
        seconds = statistics.median(chat[index] for chat in self.ttft)
        return seconds, statistics.mean(chat[index] for chat in self.jobs)


@contextlib.contextmanager
def second_proxy(cluster: Launched) -> Iterator[str]:
    """The URL of a proxy before the same workers that skips no jobs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["proxy", "--store", cluster.store_url, "--port", str(port), "--no-skip-held-items"]
    command, environment = supervised([sys.executable, "-m", "triptych.cli", *words])
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, env=environment, stdin=null, stdout=null, stderr=null)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for("the second proxy to answer", lambda: _ready(url) or process.poll() is not None)
        if process.poll() is not None:
            raise SystemExit(f"the second proxy ended with {process.returncode}")
        yield url
    finally:
        process.terminate()
        process.wait(60)


def wait_for(what: str, holds: Callable[[], bool]) -> None:
    """Returns once `holds()`; SystemExit that names `what` after PATIENCE seconds."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {PATIENCE:.0f} s for {what}")
        time.sleep(0.02)


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def jobs_of(url: str) -> int:
    """Encoder jobs that the proxy has made."""
    return int(scrape(f"{url}/metrics").get("triptych_encoder_jobs_total", 0))


def idle(pages: Sequence[str]) -> bool:
    """Whether no job is open and no embedding is being saved, by the workers' /metrics pages."""
    gauges = ("triptych_encoder_jobs", "triptych_encoder_inflight")
    return not any(samples.get(name) for samples in map(scrape, pages) for name in gauges)


def ask(url: str, messages: list[dict[str, Any]]) -> tuple[float, str]:
    """Seconds to the first token of the streamed answer, and its text."""
    body = {"messages": messages, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    first, text, begun = 0.0, "", time.perf_counter()
    with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            choices = json.loads(line[6:])["choices"]
            piece = choices[0]["delta"].get("content") if choices else None
            if piece:
                first = first or time.perf_counter() - begun
                text += piece
    return first, text


def chat(
    url: str, store: redis.Redis, pages: Sequence[str], seed: int, pictures: int, size: int, found: Found
) -> None:
    """One chat: a picture more in each turn, then a turn without one. `pages`: the workers' metrics."""
    messages: list[dict[str, Any]] = []
    ttft, jobs = [], []
    for turn in range(pictures + 1):
        parts: list[dict[str, Any]] = [{"type": "text", "text": QUESTION}]
        if turn < pictures:
            drawn = data_url(Picture(seed * 100 + turn, size, size, "waves")).decode()
            parts.insert(0, {"type": "image_url", "image_url": {"url": drawn}})
        messages.append({"role": "user", "content": parts})
        lost = list(store.scan_iter(match=f"{keys.EMBEDDING}*", count=1000))
        if lost:
            store.delete(*lost)
        before = jobs_of(url)
        seconds, text = ask(url, messages)
        ttft.append(seconds)
        # A job that outlives its request would save an embedding after the next turn's loss.
        wait_for("the encoder to be idle", lambda: idle(pages))
        jobs.append(jobs_of(url) - before)
        messages.append({"role": "assistant", "content": text})
    found.ttft.append(ttft)
    found.jobs.append(jobs)


def measure(chats: int, pictures: int, size: int) -> list[Found]:
    os.environ.setdefault("TRIPTYCH_INTERNAL_TOKEN", secrets.token_hex(16))
    found = [Found(), Found()]
    shape = WorkerCounts(encoders=1, pd_workers=1)
    with (
        launched(shape, "", ["--threads", "1"]) as cluster,
        second_proxy(cluster) as other,
        redis.Redis.from_url(cluster.store_url, socket_timeout=60.0) as store,
    ):
        for number in each("chats", range(chats + 1)):
            for index in (0, 1) if number % 2 else (1, 0):
                into = found[index] if number else Found()  # the first chats are a warm-up
                url = (cluster.url, other)[index]
                chat(url, store, cluster.metrics_urls, 2 * number + index + 1, pictures, size, into)
    return found


def report(found: list[Found], chats: int, pictures: int, size: int) -> str:
    rows = []
    for turn in range(pictures + 1):
        (less, few), (more, many) = (side.turn(turn) for side in found)
        pairs = zip(found[0].ttft, found[1].ttft, strict=True)
        ratio = statistics.median(one[turn] / other[turn] for one, other in pairs)
        shown = f"{turn + 1}" + (" (no new picture)" if turn == pictures else "")
        rows.append(
            f"| {shown} | {few:.1f} | {many:.1f} | {less * 1000:.0f} | {more * 1000:.0f} | {ratio:.2f} |"
        )
    return "\n".join(
        [
            "# A growing chat whose embeddings are lost",
            "",
            f"Command: `python -m benchmarks.multi_turn --chats {chats} --pictures {pictures} --size {size} "
            "--write`",
            f"Date: {datetime.date.today()}. Commit: {commit()}. Chip: {chip()}, {os.cpu_count()} cores. "
            f"Load at the end: {os.getloadavg()[0]:.1f}.",
            "",
            "One encoder, one PD worker, the demo model, and two proxies that take turns, chat by chat. Each",
            f"turn but the last adds a picture of {size} x {size}. Before every turn the store loses all",
            "embeddings. Where jobs are skipped, only new pictures are encoded, since the PD worker's prefix",
            "cache has the others; where they are not, all pictures of the history. In the first both do",
            f"the same: it shows the noise. Medians of {chats} chats; ratios are those of pairs of chats.",
            "",
            "| turn | jobs, skipped | jobs, not | TTFT, skipped, ms | TTFT, not, ms | ratio |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            "While the store holds an embedding there is no job for it either way. The answer waits for the",
            "jobs' plans only: its prefix is cached, and the tower works beside it. All processes share this",
            "machine's cores with whatever else runs: the ratios of one run hold, the milliseconds are this",
            "machine's at that load.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=12)
    parser.add_argument("--pictures", type=int, default=3)
    parser.add_argument("--size", type=int, default=448)
    add_write_flag(parser, RESULT)
    options = parser.parse_args()
    shape = (options.chats, options.pictures, options.size)
    publish(report(measure(*shape), *shape), RESULT, write=options.write)


if __name__ == "__main__":
    main()
