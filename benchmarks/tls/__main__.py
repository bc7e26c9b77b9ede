"""What TLS costs: tokens that one proxy core relays, and connections, with and without it in one run.

Two proxies, each before a scripted PD worker of its own, take turns round by round: one in clear text, one
with mutual TLS to its worker and HTTPS to its clients. Tokens per second of the proxy's CPU time, and per
second of the clock; then requests on a new connection each.

    python -m benchmarks.tls [--streams 8] [--tokens 1000] [--rounds 7] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import multiprocessing
import os
import ssl
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.proxy_relay.clients import relay
from benchmarks.proxy_relay.processes import pd_process, proxy_process
from benchmarks.result_page import RESULTS, add_write_flag, publish
from triptych.config import ServiceConfig, TlsFiles
from triptych.goodput.report.machine import chip, commit
from triptych.progress.progress import each
from triptych.rpc.channels import make_channel
from triptych.rpc.tls.material import TlsMaterial, read_material
from triptych.rpc.tls.own_ca import CA, CERT, KEY, write_certificates

RESULT = RESULTS / "tls.md"
CONNECTIONS = 200


@dataclass(frozen=True)
class Side:
    """One proxy with its worker, and how their clients connect."""

    pipe: Any
    port: int
    pd_port: int
    context: ssl.SSLContext | None
    material: TlsMaterial | None

    def cpu(self) -> float:
        """CPU seconds of the proxy so far."""
        self.pipe.send("cpu")
        return float(self.pipe.recv())


async def connections(side: Side) -> tuple[float, float]:
    """Seconds of the proxy's CPU, and of the clock, for a GET /health on a connection of its own."""
    before, began = side.cpu(), time.perf_counter()
    for _ in range(CONNECTIONS):
        reader, writer = await asyncio.open_connection("127.0.0.1", side.port, ssl=side.context)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
    clock = time.perf_counter() - began
    return (side.cpu() - before) / CONNECTIONS, clock / CONNECTIONS


async def channels(side: Side) -> float:
    """Seconds from nothing to the first answer of the worker, over a gRPC channel of its own."""
    found = []
    for _ in range(CONNECTIONS // 10):
        began = time.perf_counter()
        async with make_channel(f"127.0.0.1:{side.pd_port}", tls=side.material) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10.0)
            found.append(time.perf_counter() - began)
    return statistics.median(found)


def measure(streams: int, tokens: int, rounds: int, folder: Path) -> list[dict[str, float]]:
    """The figures of clear text and of TLS, and their ratios of the rounds: {name: value} each."""
    write_certificates(folder, [], ServiceConfig().tls_name, 30)
    files = TlsFiles(str(folder / CERT), str(folder / KEY), str(folder / CA), ServiceConfig().tls_name)
    context = multiprocessing.get_context("spawn")
    children = []

    def start(target: Any, *args: Any) -> tuple[Any, Any]:
        ours, theirs = context.Pipe()
        children.append(context.Process(target=target, args=(theirs, *args), daemon=True))
        children[-1].start()
        return ours, ours.recv()

    try:
        sides = []
        for given in (None, files):
            _, pd_port = start(pd_process, streams, given)
            pipe, port = start(proxy_process, pd_port, given)
            trust = ssl.create_default_context(cafile=files.ca) if given else None
            sides.append(Side(pipe, port, pd_port, trust, read_material(given) if given else None))
        time.sleep(1.0)
        found: list[list[dict[str, float]]] = [[], []]
        for number in each("rounds", range(rounds + 1)):
            for index in (0, 1) if number % 2 else (1, 0):
                one = asyncio.run(_round(sides[index], streams, tokens))
                if number:  # the first round is a warm-up
                    found[index].append(one)
    finally:
        for child in children:
            child.terminate()
            child.join()
    names = found[0][0]
    plain, tls = ({name: statistics.median(one[name] for one in side) for name in names} for side in found)
    pairs = list(zip(*found, strict=True))
    ratio = {name: statistics.median(after[name] / before[name] for before, after in pairs) for name in names}
    return [plain, tls, ratio]


async def _round(side: Side, streams: int, tokens: int) -> dict[str, float]:
    cpu, clock = await relay(side.port, side.pipe, streams, tokens, side.context)
    connection, latency = await connections(side)
    return {
        "tokens per second of the proxy's CPU time": cpu,
        "tokens per second of the clock": clock,
        "proxy's CPU for a request on a new connection, ms": connection * 1000,
        "time until its answer, ms": latency * 1000,
        "gRPC: from no connection to a worker's first answer, ms": await channels(side) * 1000,
    }


def report(found: list[dict[str, float]], streams: int, tokens: int, rounds: int) -> str:
    plain, tls, ratio = found
    rows = [f"| {name} | {plain[name]:,.2f} | {tls[name]:,.2f} | {ratio[name]:.2f} |" for name in plain]
    return "\n".join(
        [
            "# What TLS costs",
            "",
            f"Command: `python -m benchmarks.tls --streams {streams} --tokens {tokens} "
            f"--rounds {rounds} --write`",
            f"Date: {datetime.date.today()}. Commit: {commit()}. Chip: {chip()}, {os.cpu_count()} cores. "
            f"Load at the end: {os.getloadavg()[0]:.1f}.",
            "",
            "With TLS the proxy has mutual TLS to its PD worker and HTTPS to its clients; certificates of",
            f"`triptych cert` (P-256). {streams} streams, one token of each in a message, every token an SSE",
            "chunk, and so a TLS record. The two take turns; a ratio is the median over the rounds.",
            "",
            "| figure, median | clear text | TLS | ratio |",
            "|---|---|---|---|",
            *rows,
            "",
            "All processes share this machine's cores, and with them whatever else runs: ratios of one",
            "run hold, the figures beside them are this machine's at that load. Clients and worker encrypt",
            "too, so that the clock shows more than the proxy's share. Connections are made once: clients",
            "and proxies keep theirs.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    add_write_flag(parser, RESULT)
    options = parser.parse_args()
    shape = (options.streams, options.tokens, options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        text = report(measure(*shape, Path(folder)), *shape)
    publish(text, RESULT, write=options.write)


if __name__ == "__main__":
    main()
