"""How many tokens and text requests per second one proxy core serves, and what the proxy adds to a request.

A PD worker in another process sends prepared messages as fast as the proxy takes them; clients in a third
process read the streams. The proxy's figure is tokens per second of its own CPU time (user and system, all
threads): gRPC receive, state machine, SSE rendering and the HTTP server's writes included. A process that
does nothing but receive the same messages takes turns with the proxy, round by round; and so do one-token
requests to the PD worker itself and through the proxy.

Text requests go to a PD worker whose engine only counts: it steps at a real one's pace, and its messages
leave through a real one's event streams. Its own CPU time shows what they cost there.

    python -m benchmarks proxy_relay [--streams 8] [--tokens 2000] [--rounds 15] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import statistics
import time
from collections.abc import Sequence

from benchmarks.proxy_relay.clients import CLIENTS, LONG, SHORT, latency, paced, relay, served
from benchmarks.proxy_relay.processes import (
    STEP_SECONDS,
    children,
    counting_process,
    pd_process,
    pin,
    proxy_process,
    receive_process,
)
from benchmarks.result_page import RESULTS, add_write_flag, publish
from benchmarks.targets import record
from triptych.goodput.report.machine import chip, commit

RESULT = RESULTS / "proxy_relay.md"
#: Tokens/s per core, share of receive alone, text requests/s per core.
TARGET, SHARE_TARGET, REQUEST_TARGET = 80_000, 0.75, 800


def measure_tokens(streams: int, tokens: int, rounds: int) -> dict[str, float]:
    """The relay beside receive alone, and the latency of one token."""
    runs, receive = [], []
    with children() as start:
        _, pd_port = start(pd_process, streams)
        proxy, port = start(proxy_process, pd_port)
        receiver, _ = start(receive_process, pd_port, streams)
        pin(1)
        time.sleep(1.0)
        for number in range(rounds + 1):
            run = asyncio.run(relay(port, proxy, streams, tokens))
            receiver.send(tokens)
            alone = receiver.recv()
            if number:  # the first round is a warm-up
                runs.append(run)
                receive.append(alone)
        direct, proxied = asyncio.run(latency(port, pd_port))
    return {
        "receive": statistics.median(receive),
        "share": statistics.median(run[0] / alone for run, alone in zip(runs, receive, strict=True)),
        "cpu_median": statistics.median(run[0] for run in runs),
        "cpu_best": max(run[0] for run in runs),
        "clock_median": statistics.median(run[1] for run in runs),
        "direct_p50": statistics.median(direct),
        "direct_p99": statistics.quantiles(direct, n=100)[98],
        "proxied_p50": statistics.median(proxied),
        "proxied_p99": statistics.quantiles(proxied, n=100)[98],
    }


def measure_requests(rounds: int) -> dict[str, float]:
    """CPU seconds of a short request, streamed and whole, and of a token that is a write of its own."""
    streamed: list[float] = []
    whole: list[float] = []
    long: list[tuple[float, float]] = []
    with children() as start:
        worker, pd_port = start(counting_process)
        proxy, port = start(proxy_process, pd_port)
        pin(1)
        time.sleep(1.0)
        for number in range(rounds + 1):
            by_stream = asyncio.run(served(port, proxy, stream=True))
            at_once = asyncio.run(served(port, proxy, stream=False))
            by_token = asyncio.run(paced(port, proxy, worker))
            if number:
                streamed.append(by_stream)
                whole.append(at_once)
                long.append(by_token)
    return {
        "streamed": statistics.median(streamed),
        "whole": statistics.median(whole),
        "written": statistics.median(seconds for seconds, _ in long),
        "emitted": statistics.median(seconds for _, seconds in long),
    }


def _verdict(found: float, target: float) -> str:
    return "reached" if found >= target else "not reached"


def rows(found: dict[str, float]) -> Sequence[tuple[str, str, str]]:
    """(figure, value, target and whether it is reached)."""
    added = found["proxied_p50"] - found["direct_p50"]
    requests = [1 / found[kind] for kind in ("streamed", "whole")]
    return (
        (
            "tokens per second of the proxy's CPU time (one core), median",
            f"{found['cpu_median']:,.0f}",
            f"{TARGET:,}: {_verdict(found['cpu_median'], TARGET)}",
        ),
        ("the same, best round", f"{found['cpu_best']:,.0f}", ""),
        ("gRPC receive alone, the same messages, median", f"{found['receive']:,.0f}", ""),
        (
            "proxy over receive alone, median of the rounds",
            f"{found['share']:.2f}",
            f"{SHARE_TARGET}: {_verdict(found['share'], SHARE_TARGET)}",
        ),
        ("tokens per second of the clock, on this machine", f"{found['clock_median']:,.0f}", ""),
        *(
            (
                f"{kind} text requests per second of the proxy's CPU time",
                f"{rate:,.0f}",
                f"{REQUEST_TARGET}: {_verdict(rate, REQUEST_TARGET)}",
            )
            for kind, rate in zip(("streamed", "whole"), requests, strict=True)
        ),
        (
            "proxy's CPU time for a token that is a write of its own",
            f"{found['written'] * 1e6:.1f} µs",
            "",
        ),
        ("PD worker's CPU time for the same token, without engine", f"{found['emitted'] * 1e6:.1f} µs", ""),
        (
            "one-token text request to the PD worker itself, p50 / p99",
            f"{found['direct_p50'] * 1000:.2f} / {found['direct_p99'] * 1000:.2f} ms",
            "",
        ),
        (
            "the same through the proxy, p50 / p99",
            f"{found['proxied_p50'] * 1000:.2f} / {found['proxied_p99'] * 1000:.2f} ms",
            "",
        ),
        ("latency that the proxy adds, difference of the medians", f"{added * 1000:.2f} ms", ""),
    )


def report(found: dict[str, float], streams: int, tokens: int, rounds: int) -> str:
    return "\n".join(
        [
            "# Proxy relay",
            "",
            f"Command: `python -m benchmarks proxy_relay --streams {streams} --tokens {tokens} "
            f"--rounds {rounds} --write`",
            f"Date: {datetime.date.today()}. Commit: {commit()}. Chip: {chip()}, {os.cpu_count()} cores. "
            f"Load at the end: {os.getloadavg()[0]:.1f}.",
            "",
            f"One message per step carries one token of each of {streams} streams; every token leaves as an",
            "SSE chunk. gRPC receive, state machine, rendering and HTTP writes are included.",
            "",
            "| figure | value | target |",
            "|---|---|---|",
            *(f"| {' | '.join(row)} |" for row in rows(found)),
            "",
            "CPU time includes what other processes on the same cores cost in caches and context switches:",
            "compare it with the receive-alone figure, whose rounds alternate with the proxy's and run none",
            "of its code. A real PD worker merges the steps that a slow proxy has not taken yet into one",
            "message; this one not.",
            "",
            f"Text requests: {CLIENTS} clients, each over one connection, ask for {SHORT} tokens, and again",
            f"when they have them; every {STEP_SECONDS * 1000:g} ms a PD worker without a model puts out a",
            "token of each request, through a real one's event streams. The tokens that are writes of their",
            f"own are {LONG} to each of these clients.",
            "",
            "Both one-token requests go over open connections and alternate: the difference is the HTTP",
            "server, the proxy's own work and one more process on the way.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=15)
    add_write_flag(parser, RESULT)
    options = parser.parse_args()
    shape = (options.streams, options.tokens, options.rounds)
    found = measure_tokens(*shape) | measure_requests(options.rounds)
    text = report(found, *shape)
    made_at = commit()  # before the page is changed
    publish(text, RESULT, write=options.write)
    if options.write:
        slower = max(found["streamed"], found["whole"])
        record("proxy, of gRPC receive alone", {"tokens/s": found["share"]}, RESULT, made_at=made_at)
        record("proxy, text requests per core", {"requests/s": 1 / slower}, RESULT, made_at=made_at)


if __name__ == "__main__":
    main()
