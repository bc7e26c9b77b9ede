"""How many tokens and text requests per second one proxy core serves.

A PD worker in another process sends prepared messages as fast as the proxy takes them; clients in a third
process read the streams. The proxy's figure is tokens per second of its own CPU time (user and system, all
threads): gRPC receive, state machine, SSE rendering and the HTTP server's writes included. A process that
does nothing but receive the same messages takes turns with the proxy, round by round.

Text requests go to a PD worker whose engine only counts: it steps at a real one's pace, and its messages
leave through a real one's event streams.

    python -m benchmarks micro proxy_relay [--streams 8] [--tokens 2000] [--rounds 15] [--write]
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from typing import Any

from benchmarks.micro.proxy_processes import (
    MODEL,
    STEP_SECONDS,
    children,
    counting_process,
    pd_process,
    pin,
    proxy_process,
    receive_process,
)
from benchmarks.result_page import RESULTS, fill, page_parser, publish
from benchmarks.targets import record
from triptych_bench.goodput.report.machine import commit

#: Clients at once, the requests of each, and the output tokens of one.
CLIENTS, EACH, SHORT = 32, 10, 8
_PROMPT = "What is the capital of France? Answer in one word."
#: What an SSE chunk with one token holds.
_MARK = b'"content":" token"'


def post(tokens: int, *, stream: bool = True) -> bytes:
    """A chat request, as clients send it."""
    message = {"role": "user", "content": _PROMPT}
    fields = {"model": MODEL, "max_tokens": tokens, "stream": stream, "messages": [message]}
    body = json.dumps(fields).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAccept: */*\r\nAuthorization: Bearer x\r\n"
    return head + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


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


async def _client(port: int, *, stream: bool) -> None:
    """Asks again as soon as it has its answer, over one connection, as clients keep it."""
    request = post(SHORT, stream=stream)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(EACH):
        writer.write(request)
        reply = await reader.readuntil(b"0\r\n\r\n" if stream else b"}}}")
        assert reply.count(b" token") == SHORT, reply
    writer.close()


async def served(port: int, proxy: Any, *, stream: bool) -> float:
    """Short text requests per second of the proxy's CPU time, streamed or whole."""
    before = cpu_seconds(proxy)
    await asyncio.gather(*(_client(port, stream=stream) for _ in range(CLIENTS)))
    return CLIENTS * EACH / (cpu_seconds(proxy) - before)


RESULT = RESULTS / "proxy_relay.md"
#: Tokens/s per core, share of receive alone, text requests/s per core.
TARGET, SHARE_TARGET, REQUEST_TARGET = 80_000, 0.75, 800


def measure_tokens(streams: int, tokens: int, rounds: int) -> dict[str, float]:
    """The relay beside receive alone."""
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
    return {
        "receive": statistics.median(receive),
        "share": statistics.median(run[0] / alone for run, alone in zip(runs, receive, strict=True)),
        "cpu_median": statistics.median(run[0] for run in runs),
        "cpu_best": max(run[0] for run in runs),
        "clock_median": statistics.median(run[1] for run in runs),
    }


def measure_requests(rounds: int) -> dict[str, float]:
    """Short text requests per second of the proxy's CPU time, streamed and whole."""
    with children() as start:
        _, pd_port = start(counting_process)
        proxy, port = start(proxy_process, pd_port)
        pin(1)
        time.sleep(1.0)
        runs = [
            [asyncio.run(served(port, proxy, stream=stream)) for stream in (True, False)]
            for _ in range(rounds + 1)
        ]
    streamed, whole = (statistics.median(rates) for rates in zip(*runs[1:], strict=True))
    return {"streamed": streamed, "whole": whole}


def _judged(result: float, target: float) -> str:
    return f"{target:,}: {'reached' if result >= target else 'not reached'}"


def report(result: dict[str, float], streams: int, tokens: int, rounds: int) -> str:
    return fill(
        "proxy_relay",
        **result,
        streams=streams,
        tokens=tokens,
        rounds=rounds,
        clients=CLIENTS,
        short=SHORT,
        step_ms=f"{STEP_SECONDS * 1000:g}",
        target=_judged(result["cpu_median"], TARGET),
        share_target=_judged(result["share"], SHARE_TARGET),
        streamed_target=_judged(result["streamed"], REQUEST_TARGET),
        whole_target=_judged(result["whole"], REQUEST_TARGET),
    )


def main() -> None:
    options = page_parser(__doc__, RESULT, streams=8, tokens=2000, rounds=15).parse_args()
    shape = (options.streams, options.tokens, options.rounds)
    result = measure_tokens(*shape) | measure_requests(options.rounds)
    text = report(result, *shape)
    made_at = commit()  # before the page is changed
    publish(text, RESULT, write=options.write)
    if options.write:
        slower = min(result["streamed"], result["whole"])
        record("proxy, of gRPC receive alone", {"tokens/s": result["share"]}, RESULT, made_at=made_at)
        record("proxy, text requests per core", {"requests/s": slower}, RESULT, made_at=made_at)
