"""Loads and saves against the number of shards, Redis Cluster and TLS."""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.result_page import RESULTS, add_write_flag, publish
from benchmarks.store_scale.arrangements import CLUSTER, ONE, SHARDS, TLS, arrangements, sharded
from benchmarks.store_scale.clients import BYTES, ITEM_BYTES, Clients
from triptych.goodput.report.machine import chip
from triptych.progress.progress import each

ROOT = Path(__file__).parents[2]
RESULT = RESULTS / "store_scale.md"
_CLIENTS = 2

_READING = (
    "Without the limit, clients and servers share this machine's cores. Where other programs compete for",
    "them, more server processes also get a larger part of them: these rows say little about bandwidth.",
    "With the limit, the servers' links are what is scarce, as on a network: the rate grows with the shards,",
    "short of their number where a round's items are spread unevenly, or where the cores are the limit.",
)

Rates = dict[tuple[str, str], list[float]]


def measure(names: list[str], clients: Clients, repeats: int) -> Rates:
    """GB/s of every repeat by operation and arrangement; one of each per round, so that noise meets all."""
    rates: Rates = {(operation, name): [] for operation in ("load", "save") for name in names}
    for turn in each("rounds", range(repeats + 1)):
        for name in names:
            clients.rate("free", name)
            saved, loaded = clients.rate("save", name), clients.rate("load", name)
            # The first round opens the connections.
            if turn:
                rates["save", name].append(saved)
                rates["load", name].append(loaded)
    return rates


def report(rates: Rates, names: list[str], options: argparse.Namespace) -> str:
    """The results as the committed page has them."""
    bases = {name: sharded(1, limited=True) if "limited" in name else ONE for name in names}

    def row(name: str) -> str:
        cells = []
        for operation in ("load", "save"):
            ours, base = rates[operation, name], rates[operation, bases[name]]
            ratio = statistics.median(a / b for a, b in zip(ours, base, strict=True))
            cells += [f"{statistics.median(ours):.3f}", f"{max(ours):.3f}", f"{ratio:.2f}"]
        return f"| {name} | {' | '.join(cells)} |"

    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    lines = [
        "# The store's topologies",
        "",
        f"`python -m benchmarks store_scale --repeats {options.repeats} --limit {options.limit:g}`, "
        f"{datetime.date.today().isoformat()}, {chip()}, {os.cpu_count()} cores, Debian's Redis on "
        f"loopback TCP. Load averages at the end: {load}.",
        "",
        f"{_CLIENTS} client processes, each with {BYTES // ITEM_BYTES} items of {ITEM_BYTES / 1e6:.1f} MB "
        "at once, checksums included. Rounds are interleaved; a ratio is the median over rounds against "
        'one server in the same round. In the rows "limited", a relay lets '
        f"{options.limit:g} MB/s through to each server, both ways together, as a network card would.",
        "",
        "| store | load GB/s | best | / 1 server | save GB/s | best | / 1 server |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *map(row, names),
        "",
        *_READING,
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--limit", type=float, default=20.0, help="MB/s of a server behind a relay")
    add_write_flag(parser, RESULT)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    names = [ONE, *(sharded(count) for count in SHARDS[1:]), CLUSTER, TLS]
    names += [sharded(count, limited=True) for count in SHARDS]
    with tempfile.TemporaryDirectory() as folder, arrangements(Path(folder), options.limit * 1e6) as urls:
        clients = Clients({name: urls[name] for name in names}, _CLIENTS)
        try:
            rates = measure(names, clients, options.repeats)
        finally:
            clients.stop()
    publish(report(rates, names, options), RESULT, write=options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
