"""A cluster under mixed load while something breaks every few seconds: clients, faults, memory, the table."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import redis

from support.data.oracle import OracleResult, first_difference
from support.data.traffic import Case, ask_with, client_of
from support.processes.cluster import PATIENCE, Cluster
from support.processes.relay import Relay
from support.waiting import within
from triptych.store.keys import EMBEDDING

TOKENS = 48
#: Flips a bit in the middle of a value; one that has been evicted meanwhile stays away.
_FLIP = """
local middle = math.floor(redis.call('STRLEN', KEYS[1]) / 2)
local byte = redis.call('GETRANGE', KEYS[1], middle, middle)
if byte ~= '' then
  redis.call('SETRANGE', KEYS[1], middle, string.char((string.byte(byte) + 128) % 256))
end
"""
#: A client gives up a request that was refused so often.
MOST_RETRIES = 200
#: Looks for embeddings that are published and not loaded, before a loss is given up.
MOST_CATCHES = 200


@dataclass
class Tally:
    """What the clients saw. `wrong` and `lost` describe each case."""

    answered: int = 0
    refused: Counter[int] = field(default_factory=Counter)
    ties: int = 0
    abandoned: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class Clients:
    """A closed loop of clients over a pool of cases whose answers are known."""

    def __init__(
        self, url: str, cases: Sequence[Case], reference: Sequence[OracleResult], seed: int = 0
    ) -> None:
        self.tally = Tally()
        self._url = url
        self._cases = cases
        self._reference = reference
        self._random = random.Random(seed)
        self._ending = asyncio.Event()

    async def run(self, count: int) -> None:
        """Until `end`, then as long as the last answers take."""
        await asyncio.gather(*(self._one() for _ in range(count)))

    def end(self) -> None:
        self._ending.set()

    async def _one(self) -> None:
        async with client_of(self._url) as client:
            while not self._ending.is_set():
                await self._ask(client, self._random.randrange(len(self._cases)))

    async def _ask(self, client: openai.AsyncOpenAI, number: int) -> None:
        """Half of the requests repeat what is cached, half are new to the cluster."""
        salt: dict[str, Any] = {}
        if self._random.random() < 0.5:
            salt["cache_salt"] = f"{self._random.random()}"
        began = time.monotonic()
        for _ in range(MOST_RETRIES):
            try:
                answer = await ask_with(client, self._cases[number], TOKENS, **salt)
            except openai.APIStatusError as error:
                wait = error.response.headers.get("retry-after")
                if error.status_code not in (429, 503) or wait is None:
                    self.tally.lost.append(f"case {number}: {error.status_code} {error.message[:200]}")
                    return
                self.tally.refused[error.status_code] += 1
                await asyncio.sleep(float(wait))
            except openai.APIError as error:
                self.tally.lost.append(f"case {number}: {type(error).__name__} {error}"[:300])
                return
            except AssertionError as error:
                self.tally.lost.append(f"case {number}: {error}")
                return
            else:
                self.tally.seconds.append(time.monotonic() - began)
                self._judge(number, answer.token_ids)
                return
        self.tally.lost.append(f"case {number}: refused {MOST_RETRIES} times")

    def _judge(self, number: int, got: list[int]) -> None:
        """A difference is admitted where the two best logits of the reference tie, as `assert_exact` says."""
        self.tally.answered += 1
        result = self._reference[number]
        if got == result.token_ids:
            return
        at = first_difference(result.token_ids, got)
        if at < min(len(got), TOKENS) and result.margins[at] < 1e-4 and got[at] == result.runners_up[at]:
            self.tally.ties += 1
        else:
            self.tally.wrong.append(f"case {number}: token {at} of {len(got)}")


def _signal_all(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Faults:
    """Everything that is broken, by name; each is mended by itself or by the cluster."""

    def __init__(
        self, cluster: Cluster, store: str, store_relay: Relay, pd_relay: Relay, clients: Clients
    ) -> None:
        self.done: Counter[str] = Counter()
        self._cluster = cluster
        self._store = store
        self._store_relay = store_relay
        self._pd_relay = pd_relay
        self._clients = clients
        self.kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "encoder killed": lambda: self._signal("encoder-0", signal.SIGKILL),
            "PD worker killed": lambda: self._signal("pd-0", signal.SIGKILL),
            "encoder stopped for 5 s": lambda: self._stopped("encoder-1"),
            "PD worker stopped for 5 s": lambda: self._stopped("pd-0"),
            "store flushed": self._flush,
            "store flushed before embeddings were loaded": lambda: self._lose_unread(self._flush),
            "embeddings damaged before they were loaded": lambda: self._lose_unread(self._damage),
            "store slow for 10 s": self._slow_store,
            "store connections half-closed": lambda: self._on_relay(self._store_relay.half_close),
            "store connections cut": lambda: self._on_relay(self._store_relay.cut),
            "PD worker's connections cut": lambda: self._on_relay(self._pd_relay.cut),
            "PD worker's connections half-closed": lambda: self._on_relay(self._pd_relay.half_close),
            "client connections half-closed": self._leaving_clients,
        }

    async def run(self, seconds: float, pause: float, seed: int) -> None:
        """One fault every `pause` seconds for `seconds`, all kinds in turns of random order."""
        order = random.Random(seed)
        end = time.monotonic() + seconds
        turn: list[str] = []
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(pause, left))
            if time.monotonic() >= end:
                return
            if not turn:
                turn = order.sample(sorted(self.kinds), len(self.kinds))
            name = turn.pop()
            self.done[name] += 1
            await self.kinds[name]()

    async def _signal(self, name: str, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            await asyncio.to_thread(self._cluster.kill, name, number)

    async def _stopped(self, name: str) -> None:
        pid = await asyncio.to_thread(self._cluster.pid, name)
        _signal_all([pid], signal.SIGSTOP)
        await asyncio.sleep(5)
        _signal_all([pid], signal.SIGCONT)

    async def _flush(self) -> None:
        def flush() -> None:
            with redis.Redis.from_url(self._store, socket_timeout=PATIENCE) as client:
                client.flushall()

        await asyncio.to_thread(flush)

    async def _damage(self) -> None:
        """Flips a byte in the middle of every stored embedding."""

        def damage() -> None:
            with redis.Redis.from_url(self._store, socket_timeout=PATIENCE) as client:
                for key in client.scan_iter(match=f"{EMBEDDING}*", count=1000):
                    client.eval(_FLIP, 1, key)

        await asyncio.to_thread(damage)

    async def _lose_unread(self, lose: Callable[[], Awaitable[None]]) -> None:
        """Loses what is stored while the PD workers stand still and have embeddings to load."""
        pids = [await asyncio.to_thread(self._cluster.pid, "pd-0"), self._cluster.extra[0].pid]
        for _ in range(MOST_CATCHES):
            _signal_all(pids, signal.SIGSTOP)
            try:
                if await asyncio.to_thread(self._published):
                    await asyncio.sleep(1)  # the towers end, and what they have made is saved
                    await lose()
                    return
            finally:
                _signal_all(pids, signal.SIGCONT)
            await asyncio.sleep(0.05)
        raise AssertionError("no embedding waited to be loaded")

    def _published(self) -> float:
        return self._cluster.total("proxy", "triptych_published_bytes")

    async def _slow_store(self) -> None:
        self._store_relay.delay = 0.25
        await asyncio.sleep(10)
        self._store_relay.delay = 0.0

    async def _on_relay(self, act: Callable[[], int]) -> None:
        assert await asyncio.to_thread(act), "no connection went through the relay"

    async def _leaving_clients(self) -> None:
        """Streams whose clients close their side in the middle."""
        case = self._clients._cases[1]
        body = json.dumps(
            {"messages": case.client_messages(), "max_tokens": 400, "stream": True, "ignore_eos": True}
        ).encode()
        where = urlsplit(self._clients._url)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        for _ in range(3):
            opening = asyncio.open_connection(where.hostname, where.port)
            reader, writer = await within("a connection to the proxy", opening)
            writer.write(head.encode() + body)
            await within("the first line of a reply", reader.readline())
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            self._clients.tally.abandoned += 1
            with contextlib.suppress(OSError):
                await within("the end of a connection that its client has half closed", reader.read())
            writer.close()


class Memory:
    """Resident memory of processes over time, in MiB; and their open files at the two ends."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self.samples: dict[str, list[tuple[float, float]]] = {name: [] for name in pids}
        self.files: dict[str, list[int]] = {name: [] for name in pids}

    async def run(self) -> None:
        while True:
            self.poll()
            await asyncio.sleep(2)

    def poll(self) -> None:
        for name, pid in self._pids.items():
            with contextlib.suppress(OSError):
                self.samples[name].append((time.monotonic(), resident(pid)))
                self.files[name].append(len(os.listdir(f"/proc/{pid}/fd")))

    def settled(self, name: str) -> list[tuple[float, float]]:
        """Samples of the last three quarters: the first one warms up."""
        samples = self.samples[name]
        return samples[len(samples) // 4 :]

    def growth(self, name: str) -> float:
        """MiB that a straight line through the settled samples grows from their first to their last."""
        samples = self.settled(name)
        times = [at - samples[0][0] for at, _ in samples]
        sizes = [size for _, size in samples]
        mean_t, mean_s = sum(times) / len(times), sum(sizes) / len(sizes)
        spread = sum((t - mean_t) ** 2 for t in times)
        slope = sum((t - mean_t) * (s - mean_s) for t, s in zip(times, sizes, strict=True)) / (spread or 1.0)
        return slope * times[-1]


def resident(pid: int) -> float:
    """MiB of a process that are in memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(pid)


def table(
    tally: Tally, faults: Faults, memory: Memory, counters: dict[str, float], seconds: float
) -> list[str]:
    """Lines of a Markdown report."""
    slow = sorted(tally.seconds)
    rows: list[tuple[str, Any]] = [
        ("seconds", f"{seconds:.0f}"),
        ("faults", sum(faults.done.values())),
        ("requests answered", tally.answered),
        ("lost", len(tally.lost)),
        ("wrong", len(tally.wrong)),
        ("first difference at a tie of the reference", tally.ties),
        ("429 and 503 with Retry-After, tried again", f"{tally.refused[429]} and {tally.refused[503]}"),
        ("streams that their clients left", tally.abandoned),
        *counters.items(),
        ("latency, median / P99 / worst, s", _latencies(slow)),
    ]
    lines = ["| figure | value |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)]
    lines += ["", "| fault | times |", "| --- | --- |"]
    lines += [f"| {name} | {count} |" for name, count in sorted(faults.done.items())]
    lines += [
        "",
        "| process | RSS first | settled | last, MiB | growth after settling | files first, last |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, samples in memory.samples.items():
        sizes = [size for _, size in samples]
        files = memory.files[name]
        lines.append(
            f"| {name} | {sizes[0]:.1f} | {memory.settled(name)[0][1]:.1f} | {sizes[-1]:.1f} "
            f"| {memory.growth(name):+.1f} MiB | {files[0]}, {files[-1]} |"
        )
    return lines


def _latencies(ordered: Sequence[float]) -> str:
    return " / ".join(
        f"{ordered[min(int(len(ordered) * share), len(ordered) - 1)]:.2f}" for share in (0.5, 0.99, 1.0)
    )
