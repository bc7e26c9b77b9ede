"""P99 while hosts are cut off from each other: every pair both ways and one way, and each host alone."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.partitions.cuts import Cut, all_cuts
from benchmarks.partitions.page import Measured, table
from benchmarks.result_page import RESULTS, add_write_flag, publish
from triptych.goodput.report.machine import chip

if TYPE_CHECKING:
    from support.netns.cluster import Clients, Question, Reply, SplitCluster

ROOT = Path(__file__).parents[2]
RESULT = RESULTS / "partitions.md"
#: Requests per second of each kind.
RATE = 3.0
#: Seconds of load before a cut, and after it is healed.
BEFORE, AFTER = 2.0, 8.0
#: A moment that has not come.
NEVER = float("inf")


def _questions(numbers: Iterator[int]) -> list[Question]:
    from support.netns.cluster import REPEATED, TEXTS, fresh

    number = next(numbers)
    return [TEXTS[number % len(TEXTS)], REPEATED[number % len(REPEATED)], fresh(number)]


async def _load(
    cluster: SplitCluster, clients: Clients, numbers: Iterator[int], seconds: float, cut: Cut | None
) -> tuple[list[Reply], float, float]:
    """All replies to a steady load, with the moments at which the cut began and ended."""
    from support.netns.cluster import PROXIES

    loop = asyncio.get_running_loop()
    start, asked = loop.time(), []
    began, healed = NEVER, NEVER
    turn = itertools.count()
    end = start + BEFORE + seconds + AFTER
    while loop.time() < end:
        now = loop.time()
        if cut is not None and now >= start + BEFORE and began == NEVER:
            await asyncio.to_thread(cut.make, cluster.network)
            began = time.monotonic()
        if cut is not None and now >= start + BEFORE + seconds and healed == NEVER:
            await asyncio.to_thread(cluster.network.heal)
            healed = time.monotonic()
        standing = began != NEVER and healed == NEVER
        proxies = [p for p in PROXIES if not (standing and cut is not None and p in cut.silent)]
        for question in _questions(numbers):
            asked.append(asyncio.create_task(clients.ask(proxies[next(turn) % len(proxies)], question)))
        await asyncio.sleep(max(0.0, now + 1 / RATE - loop.time()))
    return list(await asyncio.gather(*asked)), began, healed


async def _wrong(clients: Clients, got: Sequence[Reply], right: dict[Question, tuple[int, ...]]) -> int:
    """How many answers differ from those that the healed cluster gives under other keys."""
    answered = [reply for reply in got if reply.status == 200]
    new = sorted({reply.question for reply in answered} - right.keys(), key=lambda q: q.seed)
    for at in range(0, len(new), 8):
        asks = [clients.ask("proxy-0", question, cache_salt="again") for question in new[at : at + 8]]
        for reply in await asyncio.gather(*asks):
            right[reply.question] = reply.token_ids
    return sum(reply.token_ids != right[reply.question] for reply in answered)


async def _measure(
    cluster: SplitCluster, clients: Clients, numbers: Iterator[int], seconds: float, cut: Cut | None
) -> Measured:
    """What was asked before the cut and not answered when it began, and while it stood."""
    replies, began, healed = await _load(cluster, clients, numbers, seconds, cut)
    # Connections to a silent proxy stand still with it: what they carry has no other way.
    met = [
        reply
        for reply in replies
        if cut is None
        or (
            reply.proxy not in cut.silent and reply.started < healed and reply.started + reply.seconds > began
        )
    ]
    by_kind: dict[str, list[float]] = {}
    for reply in met:
        if reply.status == 200:
            by_kind.setdefault(reply.question.kind, []).append(reply.seconds)
    refused = Counter(reply.status for reply in replies if reply.status != 200)
    wrong = await _wrong(clients, replies, {})
    return Measured("none" if cut is None else cut.name, by_kind, dict(refused), wrong)


async def _matrix(cluster: SplitCluster, cuts: Sequence[Cut], seconds: float) -> list[Measured]:
    from support.netns.cluster import REPEATED, Clients

    numbers = itertools.count()
    async with Clients(cluster) as clients:
        await clients.ask_all(REPEATED)
        # The first requests of a process take longer.
        await _load(cluster, clients, numbers, 0.0, None)
        rows = []
        for cut in (None, *cuts):
            rows.append(await _measure(cluster, clients, numbers, seconds, cut))
            sys.stderr.write("\n".join(table(rows[-1:])[2:]) + f" load {os.getloadavg()[0]:.1f}\n")
        return rows


def report(rows: Sequence[Measured], options: argparse.Namespace) -> str:
    """The results as the committed page has them."""
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    lines = [
        "# Hosts cut off from each other",
        "",
        f"`python -m benchmarks partitions {' '.join(sys.argv[1:])}`, {datetime.date.today()}, {chip()}, "
        f"{os.cpu_count()} cores. Load averages at the end: {load}.",
        "",
        "Two proxies, two encoders, two PD workers and a store, each in a network namespace of its own, with "
        f"a tiny checkpoint. Each cut stands for {options.seconds:g} s and is then healed, under {RATE:g} "
        "requests per second of each kind: text, repeated pictures and fresh ones, at both proxies in turn; "
        "an isolated proxy is not asked, as with a load balancer in front. Counted is what was asked while "
        "the cut stood, or was unanswered when it began. Every answer was compared with that of the healed "
        "cluster under another cache key.",
        "",
        *table(rows),
        "",
        "While the store is isolated no new picture has a way: it waits for --store-wait, then gets 503. The "
        "machine was shared with other work, as the load averages show: absolute figures are too high, and a "
        "single slow answer among some sixty is a P99.",
        "",
        "What a worker has when its proxy loses it goes on elsewhere after 1.25 s of silence of a health "
        "check, which comes once a second; a proxy that has just lost the store waits for look-ups, 0.5 s "
        "for pictures that it has seen and 1 s for others, until it knows.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each cut stands")
    parser.add_argument("--only", default="", help="only cuts whose name contains this text")
    add_write_flag(parser, RESULT)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    from support.data.checkpoints import build_checkpoint
    from support.netns.cluster import HOSTS, SplitCluster
    from support.netns.network import Network

    cuts = [cut for cut in all_cuts() if options.only in cut.name]
    with (
        tempfile.TemporaryDirectory(prefix="partitions-") as folder,
        Network(HOSTS) as network,
        SplitCluster(network, build_checkpoint("qwen3_vl"), Path(folder)) as cluster,
    ):
        rows = asyncio.run(_matrix(cluster, cuts, options.seconds))
    publish(report(rows, options), RESULT, write=options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
