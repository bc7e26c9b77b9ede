"""What chat waits for beside a hundred clients of each other endpoint, before and after a change.

One cluster with the demo model for each tree of code. In every round each tree answers some chats alone and
some beside the clients of each endpoint, which ask again as soon as they have their answer, from a process of
their own. The ratio is that of the medians within a round; the page has the median over all rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.new_user import free_port
from benchmarks.result_page import RESULTS, add_write_flag, publish
from triptych.goodput.report.machine import describe, load_average
from triptych.launch.parent import supervised

RESULT = RESULTS / "endpoint_latency.md"
CLIENTS = 100
#: Seconds that the clients have asked for before chats are timed, and that one chat may take.
WARM_SECONDS, MOST_SECONDS = 1.0, 10.0
#: Seconds that a cluster may take to start.
START_SECONDS = 120.0
_TEXT = "the quick brown fox jumps over the lazy dog " * 1000
_CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 16, "ignore_eos": True}
#: Bodies by path; None: GET.
ENDPOINTS: dict[str, dict[str, Any] | None] = {
    "/tokenize": {"prompt": _TEXT},
    "/detokenize": {"tokens": [5] * 50_000},
    "/v1/models": None,
    "/metrics": None,
    "/openapi.json": None,
    "/docs": None,
    "/health": None,
    "/v1/chat/completions": _CHAT,
    "/v1/completions": {"prompt": "hello", "max_tokens": 16, "ignore_eos": True},
    "/v1/responses": {"input": "hello", "max_output_tokens": 16},
}
ALONE = "alone"
Seconds = dict[str, dict[str, list[list[float]]]]


async def load(url: str, path: str) -> None:
    """The clients of one endpoint, until the process is ended."""
    body = ENDPOINTS[path]
    connector = aiohttp.TCPConnector(limit=0)

    async def ask(session: aiohttp.ClientSession) -> None:
        while True:
            call = session.get(url + path) if body is None else session.post(url + path, json=body)
            with contextlib.suppress(aiohttp.ClientError):
                async with call as reply:
                    words = await reply.text()
                if reply.status not in (200, 429):
                    raise SystemExit(f"{path}: {reply.status} {words[:200]}")
                sys.stdout.write("answered\n")
                sys.stdout.flush()

    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(ask(session) for _ in range(CLIENTS)))


@contextlib.contextmanager
def clients_of(url: str, path: str) -> Iterator[None]:
    """The clients, in a process of their own."""
    if path == ALONE:
        yield
        return
    command = [sys.executable, "-m", "benchmarks", "endpoint_latency", "--load", url, path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        process.stdout.readline()  # of the first reply: all clients have asked by then
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield
        if process.poll() is not None:
            raise RuntimeError(f"the clients of {path} have ended: what was measured is chat alone")
    finally:
        process.kill()
        process.wait()


async def chats(url: str, count: int) -> list[float]:
    """Seconds of each chat, one after the other, with no more than `MOST_SECONDS` in all."""
    taken: list[float] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(MOST_SECONDS)) as session:
        end = time.monotonic() + MOST_SECONDS
        while len(taken) < count and time.monotonic() < end:
            begun = time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with session.post(f"{url}/v1/chat/completions", json=_CHAT) as reply:
                    await reply.read()
            taken.append(time.monotonic() - begun)
    return taken


async def measure(urls: Mapping[str, str], rounds: int, count: int) -> Seconds:
    """By tree and endpoint, the chats of each round; trees take turns within an endpoint."""
    found: Seconds = {tree: {path: [] for path in (ALONE, *ENDPOINTS)} for tree in urls}
    for url in urls.values():
        await chats(url, count)
    for _ in range(rounds):
        for path in (ALONE, *ENDPOINTS):
            for tree, url in urls.items():
                with clients_of(url, path):
                    await asyncio.sleep(0 if path == ALONE else WARM_SECONDS)
                    taken = await chats(url, count)
                found[tree][path].append(taken)
                sys.stderr.write(f"{tree} {path}: {statistics.median(taken):.3f} s\n")
    return found


def ratio(found: Mapping[str, list[list[float]]], path: str) -> float:
    """The median over the rounds of: median beside the endpoint's clients, by the median alone."""
    return statistics.median(
        statistics.median(beside) / statistics.median(alone)
        for beside, alone in zip(found[path], found[ALONE], strict=True)
    )


def longest(found: Mapping[str, list[list[float]]], path: str) -> float:
    return max(seconds for one in found[path] for seconds in one)


@contextlib.contextmanager
def clusters(trees: Mapping[str, Path]) -> Iterator[dict[str, str]]:
    """The URL of one cluster for each tree."""
    with contextlib.ExitStack() as stack:
        yield {tree: stack.enter_context(cluster(folder)) for tree, folder in trees.items()}


@contextlib.contextmanager
def cluster(tree: Path) -> Iterator[str]:
    """The URL of a cluster of the tree's code, known by its /ready alone: registrations differ by version."""
    port, grpc_port = free_port(), free_port()
    words = ["--port", str(port), "--grpc-port", str(grpc_port), "--max-queue", "512"]
    words += ["--log-level", "warning"]
    command, environment = supervised([sys.executable, "-m", "triptych.cli", "serve", *words])
    # Without the second one the folder that this runs in would come before the first.
    environment |= {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
        while not answers(f"{url}/ready"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the cluster of {tree} is not ready within {START_SECONDS:.0f} s")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def report(found: Seconds, options: argparse.Namespace, load_before: float) -> str:
    machine = describe(load_before)
    trees = list(found)
    loaded = " MADE ON A LOADED MACHINE." if machine.loaded else ""
    heads = [f"{tree}: × alone | {tree}: longest, s" for tree in trees]
    rows = [
        f"| `{path}` | "
        + " | ".join(f"{ratio(found[tree], path):.1f} | {longest(found[tree], path):.2f}" for tree in trees)
        + " |"
        for path in ENDPOINTS
    ]
    alone = ", ".join(
        f"{tree} {statistics.median(s for one in found[tree][ALONE] for s in one):.3f} s" for tree in trees
    )
    return "\n".join(
        (
            "# Chat beside the clients of each endpoint",
            "",
            f"Command: `python -m benchmarks endpoint_latency --rounds {options.rounds} "
            f"--chats {options.chats}{' --before FOLDER' if options.before else ''} --write`",
            f"Date: {datetime.date.today()}. Commit: {machine.commit}. Chip: {machine.chip}, "
            f"{machine.cores} cores.",
            f"Load before: {machine.load_before}, after: {machine.load_after}.{loaded}",
            "",
            f"The demo model on one encoder and one PD worker; a chat has 16 output tokens. Beside it "
            f"{CLIENTS} clients ask one endpoint again and again, on the same cores. "
            f"`/tokenize` has a text of {len(_TEXT)} characters. "
            f"A chat is given up after {MOST_SECONDS:.0f} s.",
            f"Chat alone, medians: {alone}.",
            "",
            "| beside | " + " | ".join(heads) + " |",
            "|---|" + "---|---|" * len(trees),
            *rows,
            "",
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--chats", type=int, default=5, help="chats of one measurement")
    parser.add_argument("--before", type=Path, help="another checkout, to compare with")
    parser.add_argument("--load", nargs=2, metavar=("URL", "PATH"), help=argparse.SUPPRESS)
    add_write_flag(parser, RESULT)
    options = parser.parse_args()
    if options.load:
        asyncio.run(load(*options.load))
        return 0
    if options.rounds < 1 or options.chats < 1:
        parser.error("--rounds and --chats must be at least 1")
    load_before = load_average()
    trees = {"before": options.before.resolve()} if options.before else {}
    trees["after"] = Path(__file__).resolve().parents[2]
    with clusters(trees) as urls:
        found = asyncio.run(measure(urls, options.rounds, options.chats))
    sys.stderr.write(json.dumps(found) + "\n")
    publish(report(found, options, load_before), RESULT, write=options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
