"""What one hot path costs alone: the proxy's relay, the registry, an embedding's way to a PD worker.

python -m benchmarks micro hot_paths proxy_relay [--streams 8] [--tokens 2000] [--rounds 15] [--write]
python -m benchmarks micro hot_paths registry_load [--repeats 5] [--write]
python -m benchmarks micro hot_paths transfer_paths [--repeats 20] [--write]
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import redis
import torch

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
from benchmarks.result_page import RESULTS, fill, page_parser, publish, table
from benchmarks.targets import record
from triptych.apps.launch.embedded_store import EmbeddedStore
from triptych.base.config import MIB
from triptych.base.types import EmbeddingSource, ItemPlan, WorkerInfo
from triptych.ec_connector.base import DirectTransfer, ECTransferConfig, EncoderOutput
from triptych.ec_connector.metadata import Fetch, LoadId, TransferMetadata
from triptych.registry.registry import Registry
from triptych.store.embedding_store import EmbeddingStore
from triptych_bench.goodput.report.machine import commit, describe, load_average
from triptych_bench.simulator.profile.encoder import TransferRole

# The relay.

RELAY = RESULTS / "proxy_relay.md"
#: Tokens/s per core, share of receive alone, text requests/s per core.
TARGET, SHARE_TARGET, REQUEST_TARGET = 80_000, 0.75, 800
#: Clients at once, the requests of each, and the output tokens of one.
CLIENTS, EACH, SHORT = 32, 10, 8
_PROMPT = "What is the capital of France? Answer in one word."
#: What an SSE chunk with one token holds.
_MARK = b'"content":" token"'


def proxy_relay() -> None:
    """How many tokens and text requests per second one proxy core serves.

    A PD worker in another process sends prepared messages as fast as the proxy takes them; clients in a third
    process read the streams. The proxy's figure is tokens per second of its own CPU time (user and system,
    all threads): gRPC receive, state machine, SSE rendering and the HTTP server's writes included. A process
    that does nothing but receive the same messages takes turns with the proxy, round by round.

    Text requests go to a PD worker whose engine only counts: it steps at a real one's pace, and its messages
    leave through a real one's event streams.
    """
    options = page_parser(proxy_relay.__doc__, RELAY, streams=8, tokens=2000, rounds=15).parse_args()
    result = measure_tokens(options.streams, options.tokens, options.rounds)
    result |= measure_requests(options.rounds)
    text = fill(
        "proxy_relay",
        **result,
        streams=options.streams,
        tokens=options.tokens,
        rounds=options.rounds,
        clients=CLIENTS,
        short=SHORT,
        step_ms=f"{STEP_SECONDS * 1000:g}",
        target=_judged(result["cpu_median"], TARGET),
        share_target=_judged(result["share"], SHARE_TARGET),
        streamed_target=_judged(result["streamed"], REQUEST_TARGET),
        whole_target=_judged(result["whole"], REQUEST_TARGET),
    )
    made_at = commit()  # before the page is changed
    publish(text, RELAY, write=options.write)
    if options.write:
        slower = min(result["streamed"], result["whole"])
        record("proxy, of gRPC receive alone", {"tokens/s": result["share"]}, RELAY, made_at=made_at)
        record("proxy, text requests per core", {"requests/s": slower}, RELAY, made_at=made_at)


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


async def relay(port: int, pipe: Any, streams: int, tokens: int) -> tuple[float, float]:
    """(tokens per CPU second of the proxy, tokens per second of the clock)."""
    cpu, clock = _cpu_seconds(pipe), time.perf_counter()
    counts = await asyncio.gather(*(_ask(port, _post(tokens)) for _ in range(streams)))
    seconds = time.perf_counter() - clock
    used = _cpu_seconds(pipe) - cpu
    assert counts == [tokens] * streams, counts
    return streams * tokens / used, streams * tokens / seconds


async def served(port: int, proxy: Any, *, stream: bool) -> float:
    """Short text requests per second of the proxy's CPU time, streamed or whole."""
    before = _cpu_seconds(proxy)
    await asyncio.gather(*(_client(port, stream=stream) for _ in range(CLIENTS)))
    return CLIENTS * EACH / (_cpu_seconds(proxy) - before)


def _post(tokens: int, *, stream: bool = True) -> bytes:
    """A chat request, as clients send it."""
    message = {"role": "user", "content": _PROMPT}
    fields = {"model": MODEL, "max_tokens": tokens, "stream": stream, "messages": [message]}
    body = json.dumps(fields).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAccept: */*\r\nAuthorization: Bearer x\r\n"
    return head + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


async def _ask(port: int, request: bytes) -> int:
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


async def _client(port: int, *, stream: bool) -> None:
    """Asks again as soon as it has its answer, over one connection, as clients keep it."""
    request = _post(SHORT, stream=stream)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(EACH):
        writer.write(request)
        reply = await reader.readuntil(b"0\r\n\r\n" if stream else b"}}}")
        assert reply.count(b" token") == SHORT, reply
    writer.close()


def _cpu_seconds(pipe: Any) -> float:
    """Of the process behind the pipe, so far."""
    pipe.send("cpu")
    return float(pipe.recv())


def _judged(result: float, target: float) -> str:
    return f"{target:,}: {'reached' if result >= target else 'not reached'}"


# The registry.

REGISTRY = RESULTS / "registry_load.md"
WORKERS = (10, 100, 1000)
BEATS, LOOKS = 2000, 200
#: By name: CPU seconds of the store and of its client.
Costs = dict[str, tuple[float, float]]


def registry_load() -> None:
    """What the registry costs: CPU of the store and of a proxy per heartbeat, and per look at it.

    Workers register every two seconds; every proxy looks twice a second and reads all of them where one has
    come, gone or changed. The store's CPU time is its own account of it (`INFO cpu`), the client's is this
    process's. `triptych plan --scale` uses the fits.
    """
    options = page_parser(registry_load.__doc__, REGISTRY, repeats=5).parse_args()
    load_before = load_average()
    with tempfile.TemporaryDirectory() as folder, EmbeddedStore(Path(folder), 1 << 28) as server:
        costs = asyncio.run(measure_registry(server.url, options.repeats))
    machine, rows = describe(load_before), costs.items()
    fits = [f"{a * 1e6:.0f} µs + {b * 1e6:.2f} µs" for a, b in (_line(costs, 0), _line(costs, 1))]
    text = fill(
        "registry_load",
        repeats=options.repeats,
        machine=machine,
        fits=fits,
        loaded=" MADE ON A LOADED MACHINE." if machine.loaded else "",
        rows="\n".join(f"| {name} | {a * 1e6:.1f} | {b * 1e6:.1f} |" for name, (a, b) in rows),
    )
    publish(text, REGISTRY, write=options.write)


async def measure_registry(url: str, repeats: int) -> Costs:
    """Medians: a beat, and looks at each number of workers, changed and unchanged ones."""
    store = await EmbeddingStore.connect(url)
    taken: dict[str, list[tuple[float, float]]] = {}
    try:
        registry = Registry(store)
        for _ in range(repeats):
            await store.control.execute("FLUSHALL")
            held: list[WorkerInfo] = []
            for count in WORKERS:
                for index in range(len(held), count):
                    held.append(_worker(index))
                    await registry.register(held[index], 3600.0)
                result = await _cpu_of(store, lambda _: registry.poll("proxy", 3600.0), LOOKS)
                taken.setdefault(_changed(count), []).append(result)
                again = partial(_look_again, registry, (await registry.poll("proxy", 3600.0)).mark)
                result = await _cpu_of(store, again, LOOKS)
                taken.setdefault(f"look at workers that are as they were: {count}", []).append(result)
            result = await _cpu_of(store, partial(_beat, registry, held), BEATS)
            taken.setdefault("beat", []).append(result)
    finally:
        await store.close()
    return {
        name: (statistics.median(one[0] for one in every), statistics.median(one[1] for one in every))
        for name, every in taken.items()
    }


def _changed(count: int) -> str:
    return f"look at changed workers: {count}"


def _line(costs: Costs, side: int) -> tuple[float, float]:
    """(seconds of a look, further seconds per worker): through the least and the most workers."""
    minimum, maximum = costs[_changed(WORKERS[0])][side], costs[_changed(WORKERS[-1])][side]
    slope = (maximum - minimum) / (WORKERS[-1] - WORKERS[0])
    return minimum - slope * WORKERS[0], slope


def _worker(index: int) -> WorkerInfo:
    """As an encoder of Qwen3-VL registers itself."""
    return WorkerInfo(
        address=f"10.0.{index // 250}.{index % 250}:50051",
        pool="encoder" if index % 4 == 0 else "pd",
        incarnation=f"{index:032x}",
        model_key="a" * 64,
        model="Qwen3-VL-4B-Instruct",
        namespaces=("b" * 64,),
        capacity={"plan_credit": 16, "tower_credit": 8},
    )


async def _cpu_of(
    store: EmbeddingStore, work: Callable[[int], Awaitable[object]], count: int
) -> tuple[float, float]:
    """(store's, client's) CPU seconds of one call."""
    server, client = await _server_cpu(store), time.process_time()
    for index in range(count):
        await work(index)
    client = time.process_time() - client
    return (await _server_cpu(store) - server) / count, client / count


async def _beat(registry: Registry, held: Sequence[WorkerInfo], index: int) -> None:
    await registry.register(held[index % len(held)], 3600.0)


async def _look_again(registry: Registry, mark: str, _: int) -> None:
    result = await registry.poll("proxy", 3600.0, mark=mark)
    assert result.workers is None, "nothing has changed"


async def _server_cpu(store: EmbeddingStore) -> float:
    """User and system seconds since the store's start."""
    info: dict[str, float] = await store.control.execute("INFO", "cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


# An embedding's way.

TRANSFERS = RESULTS / "transfer_paths.md"
#: Rows and their width in bf16: a 1080p picture and one of 448 pixels of Qwen3-VL 8B, one of a small model.
SIZES = {"1080p, 66.8 MB": (2040, 16384), "448 px, 6.4 MB": (196, 16384), "448 px, 0.4 MB": (196, 1024)}
PATHS = ("store", "peer", "shm")
_PATIENCE = 60.0
#: Turns by size and path: milliseconds, and those of CPU.
Turns = dict[tuple[str, str], list[tuple[float, float]]]


def transfer_paths() -> None:
    """What an embedding costs by path, from a tower to a checked tensor in a PD worker's process."""
    options = page_parser(transfer_paths.__doc__, TRANSFERS, repeats=20).parse_args()
    with tempfile.TemporaryDirectory() as folder, EmbeddedStore(Path(folder), 1 << 30) as server:
        measured = measure_transfers(server.url, options.repeats)
    paths = table(("embedding", "path", "ms, median (best)", "CPU ms"), transfer_rows(measured), (0, 1))
    command = f"python -m benchmarks micro hot_paths transfer_paths --repeats {options.repeats}"
    publish(fill("transfer_paths", command=command, paths="\n".join(paths)), TRANSFERS, write=options.write)


def measure_transfers(url: str, repeats: int) -> Turns:
    """The transfers by size and path, which take turns; the save goes on beside them."""
    measured: Turns = {(size, path): [] for size in SIZES for path in PATHS}
    workers = Workers(url)
    try:
        for number in range(repeats + 1):
            for (size, path), turns in measured.items():
                taken = workers.transfer(f"{number} {size} {path}", SIZES[size], path)
                if number:  # connections were made, and memory was touched
                    turns.append(taken)
    finally:
        workers.close()
    return measured


def transfer_rows(measured: Turns) -> Iterator[tuple[str, str, str, str]]:
    """Of a table: size, path, milliseconds (median and best), CPU milliseconds."""
    for (size, path), turns in measured.items():
        times, cpu = zip(*turns, strict=True)
        best = f"{statistics.median(times):.1f} ({min(times):.1f})"
        yield size, path, best, f"{statistics.median(cpu):.1f}"


def plan_of(name: str, rows: int, width: int) -> ItemPlan:
    mm_hash = hashlib.sha256(name.encode()).hexdigest()
    return ItemPlan(mm_hash, "benchmark", "image", rows, width, "bfloat16", rows)


class Workers:
    """An encoder worker's connectors, by the store alone and by all paths, and a PD worker's process."""

    def __init__(
        self, url: str, read: Callable[[str, Connection], None] | None = None, host: str = "127.0.0.1"
    ) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._reader = context.Process(target=read or _read, args=(url, theirs), daemon=True)
        self._reader.start()
        self._store = redis.Redis.from_url(url)
        config = ECTransferConfig(store_url=url, ec_role="producer")
        direct = DirectTransfer(memory=256 * MIB, host=host)
        self._roles = [TransferRole(config), TransferRole(replace(config, direct=direct))]
        self._reader_cpu = 0.0

    def transfer(self, name: str, shape: tuple[int, int], path: str) -> tuple[float, float]:
        """Milliseconds until the reader has the embedding, and of CPU of all processes until it is stored."""
        plan = plan_of(name, *shape)
        output = EncoderOutput(plan, torch.randn(shape).to(torch.bfloat16))
        role = self._roles[path != "store"]
        cpu, began = self._cpu(), time.monotonic()
        # As in the encoder's engine: the pass that serves it checks it, where there is one.
        if role.worker.serve(output) is None and not output.data.aminmax().max.isfinite():
            raise RuntimeError("the output is not finite")
        role.worker.save_caches({plan.mm_hash: output}, plan.mm_hash)
        out = role.until(lambda out: out.saved if path == "store" else out.offered)
        source = None
        if path != "store":
            offered = out.offered[plan.mm_hash]
            source = (offered.name, offered.socket if path == "shm" else "", offered.address)
        self._pipe.send_bytes(msgspec.msgpack.encode(((name, *shape), source)))
        moment, taken, self._reader_cpu = msgspec.msgpack.decode(self._pipe.recv_bytes())
        if taken != path:
            raise RuntimeError(f"the item came by {taken!r}, not by {path}")
        if not out.saved:
            role.until(lambda out: out.saved)
        return (moment - began) * 1e3, (self._cpu() - cpu) * 1e3

    def _cpu(self) -> float:
        store = self._store.info("cpu")
        return time.process_time() + self._reader_cpu + float(store["used_cpu_user"] + store["used_cpu_sys"])

    def close(self) -> None:
        """Ends the processes and connections."""
        self._pipe.send_bytes(msgspec.msgpack.encode(None))
        self._reader.join(_PATIENCE)
        for role in self._roles:
            role.worker.shutdown()
        self._store.close()


def _read(url: str, pipe: Connection) -> None:
    """The PD worker's process: loads what comes, answers (moment, path, CPU seconds so far)."""
    role = TransferRole(ECTransferConfig(store_url=url, ec_role="consumer", direct=DirectTransfer()))
    generation = 0
    while (order := msgspec.msgpack.decode(pipe.recv_bytes())) is not None:
        generation += 1
        fetch = Fetch(plan_of(*order[0]), generation, order[1] and EmbeddingSource(*order[1]))
        role.worker.start_load_caches(TransferMetadata(1, fetches=(fetch,)), {})
        out = role.until(lambda out: out.fetched)
        moment, path = time.monotonic(), out.paths.get(fetch.plan.mm_hash, "")
        pipe.send_bytes(msgspec.msgpack.encode((moment, path, time.process_time())))
        drops = (LoadId(fetch.plan.mm_hash, generation),)
        role.worker.start_load_caches(TransferMetadata(2, drops=drops), {})
    role.worker.shutdown()


PARTS = {part.__name__: part for part in (proxy_relay, registry_load, transfer_paths)}


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in PARTS:
        sys.stderr.write(f"{__doc__}\nno hot path {name!r}: use one of {', '.join(PARTS)}\n")
        return 2
    sys.argv[:2] = [f"{sys.argv[0]} {name}"]
    PARTS[name]()
    return 0
