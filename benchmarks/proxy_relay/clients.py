"""The clients: they ask, and read the CPU time of the proxy and of the PD worker around that."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from benchmarks.proxy_relay.processes import MODEL, Direct

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
