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

import asyncio
import json
import statistics
import time
from typing import Any

from benchmarks.proxy_relay.processes import (
    MODEL,
    STEP_SECONDS,
    Direct,
    children,
    counting_process,
    pd_process,
    pin,
    proxy_process,
    receive_process,
)
from benchmarks.result_page import RESULTS, fill, page_parser, publish
from benchmarks.targets import record
from triptych.goodput.report.machine import commit

#: Clients at once, and the requests of each; output tokens of a short request, and of a long one.
CLIENTS, EACH, SHORT, LONG = 32, 10, 8, 100
_PROMPT = "What is the capital of France? Answer in one word."
#: What an SSE chunk with one token holds.
_MARK = b'"content":" token"'


def post(tokens: int) -> bytes:
    """A streamed chat request."""
    message = {"role": "user", "content": "x"}
    fields = {"model": MODEL, "max_tokens": tokens, "stream": True, "messages": [message]}
    body = json.dumps(fields).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body


async def ask(port: int, request: bytes) -> int:
    """Reads one streamed reply to its end; the number of its tokens."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(request)
    chunks, tail = 0, b""
    while b"[DONE]" not in tail:
        data = tail + await reader.read(1 << 18)
        if len(data) == len(tail):
            raise RuntimeError(f"the proxy closed the stream after {tail!r}")
        chunks += data.count(_MARK) - tail.count(_MARK)
        tail = data[-64:]
    writer.close()
    return chunks


def cpu_seconds(pipe: Any) -> float:
    """Of the process behind the pipe, so far."""
    pipe.send("cpu")
    return float(pipe.recv())


async def relay(port: int, pipe: Any, streams: int, tokens: int) -> tuple[float, float]:
    """(tokens per CPU second of the proxy, tokens per second of the clock)."""
    cpu, clock = cpu_seconds(pipe), time.perf_counter()
    counts = await asyncio.gather(*(ask(port, post(tokens)) for _ in range(streams)))
    seconds = time.perf_counter() - clock
    used = cpu_seconds(pipe) - cpu
    assert counts == [tokens] * streams, counts
    return streams * tokens / used, streams * tokens / seconds


async def latency(port: int, pd_port: int, repeats: int = 300) -> tuple[list[float], list[float]]:
    """Seconds of one-token requests to the PD worker itself, and through the proxy; taking turns."""
    direct = Direct(pd_port, "latency")
    await direct.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    alone, proxied = [], []
    for number in range(repeats):
        started = time.perf_counter()
        await direct.submit(1, number)
        await direct.read()
        alone.append(time.perf_counter() - started)
        started = time.perf_counter()
        writer.write(post(1))
        await reader.readuntil(b"[DONE]")
        proxied.append(time.perf_counter() - started)
        await reader.readuntil(b"0\r\n\r\n")
    writer.close()
    await direct.close()
    return alone, proxied


async def _client(port: int, requests: int, tokens: int, *, stream: bool) -> None:
    """Asks again as soon as it has its answer, over one connection, as clients keep it."""
    fields = {"model": MODEL, "max_tokens": tokens, "stream": stream}
    body = json.dumps(fields | {"messages": [{"role": "user", "content": _PROMPT}]}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAccept: */*\r\nAuthorization: Bearer x\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(requests):
        writer.write(head + body)
        reply = await reader.readuntil(b"0\r\n\r\n" if stream else b"}}}")
        assert reply.count(b" token") == tokens, reply
    writer.close()


async def served(port: int, proxy: Any, *, stream: bool, clients: int = CLIENTS, each: int = EACH) -> float:
    """CPU seconds of the proxy for one short text request, streamed or whole."""
    before = cpu_seconds(proxy)
    await asyncio.gather(*(_client(port, each, SHORT, stream=stream) for _ in range(clients)))
    return (cpu_seconds(proxy) - before) / (clients * each)


async def paced(port: int, proxy: Any, worker: Any) -> tuple[float, float]:
    """CPU seconds of the proxy, and of the PD worker, for one token that leaves in a write of its own."""
    before = cpu_seconds(proxy), cpu_seconds(worker)
    await asyncio.gather(*(_client(port, 1, LONG, stream=True) for _ in range(CLIENTS)))
    tokens = CLIENTS * LONG
    return (cpu_seconds(proxy) - before[0]) / tokens, (cpu_seconds(worker) - before[1]) / tokens


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


def report(found: dict[str, float], streams: int, tokens: int, rounds: int) -> str:
    streamed, whole = (1 / found[kind] for kind in ("streamed", "whole"))
    return fill(
        "proxy_relay",
        **found | {name: 1000 * found[name] for name in found if name.endswith(("_p50", "_p99"))},
        streams=streams,
        tokens=tokens,
        rounds=rounds,
        clients=CLIENTS,
        short=SHORT,
        long=LONG,
        step_ms=f"{STEP_SECONDS * 1000:g}",
        target=f"{TARGET:,}: {_verdict(found['cpu_median'], TARGET)}",
        share_target=f"{SHARE_TARGET}: {_verdict(found['share'], SHARE_TARGET)}",
        per_streamed=f"{streamed:,.0f} | {REQUEST_TARGET}: {_verdict(streamed, REQUEST_TARGET)}",
        per_whole=f"{whole:,.0f} | {REQUEST_TARGET}: {_verdict(whole, REQUEST_TARGET)}",
        written_us=found["written"] * 1e6,
        emitted_us=found["emitted"] * 1e6,
        added=1000 * (found["proxied_p50"] - found["direct_p50"]),
    )


def main() -> None:
    options = page_parser(__doc__, RESULT, streams=8, tokens=2000, rounds=15).parse_args()
    shape = (options.streams, options.tokens, options.rounds)
    found = measure_tokens(*shape) | measure_requests(options.rounds)
    text = report(found, *shape)
    made_at = commit()  # before the page is changed
    publish(text, RESULT, write=options.write)
    if options.write:
        slower = max(found["streamed"], found["whole"])
        record("proxy, of gRPC receive alone", {"tokens/s": found["share"]}, RESULT, made_at=made_at)
        record("proxy, text requests per core", {"requests/s": 1 / slower}, RESULT, made_at=made_at)
