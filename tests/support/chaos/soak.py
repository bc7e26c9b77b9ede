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
MAX_RETRIES = 200
#: Looks for embeddings that are published and not loaded, before a loss is given up.
MAX_CATCHES = 200


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
        for _ in range(MAX_RETRIES):
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
        self.tally.lost.append(f"case {number}: refused {MAX_RETRIES} times")

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
        #: Losses that found nothing to lose.
        self.unmet = 0
        #: When faults began (monotonic seconds), and which.
        self.log: list[tuple[float, list[str]]] = []
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
            "encoder restarted (SIGTERM)": lambda: self._signal("encoder-1", signal.SIGTERM),
            "PD worker restarted (SIGTERM)": lambda: self._signal("pd-0", signal.SIGTERM),
            "store partitioned for 5 s": lambda: self._partitioned(self._store_relay),
            "PD worker partitioned for 5 s": lambda: self._partitioned(self._pd_relay),
        }

    async def run(self, seconds: float, pause: float, seed: int, at_once: int = 1) -> None:
        """`at_once` faults begin every `pause` seconds for `seconds`, all kinds in turns of random order."""
        order = random.Random(seed)
        end = time.monotonic() + seconds
        turn: list[str] = []
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(pause, left))
            if time.monotonic() >= end:
                return
            names = []
            for _ in range(at_once):
                if not turn:
                    turn = order.sample(sorted(self.kinds), len(self.kinds))
                names.append(turn.pop())
            self.done.update(names)
            self.log.append((time.monotonic(), names))
            await asyncio.gather(*(self.kinds[name]() for name in names))

    async def _signal(self, name: str, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            await asyncio.to_thread(self._cluster.kill, name, number)

    async def _partitioned(self, relay: Relay) -> None:
        relay.silent = True
        await asyncio.sleep(5)
        relay.silent = False

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
        for _ in range(MAX_CATCHES):
            _signal_all(pids, signal.SIGSTOP)
            try:
                if await asyncio.to_thread(self._published):
                    await asyncio.sleep(1)  # the towers end, and what they have made is saved
                    await lose()
                    return
            finally:
                _signal_all(pids, signal.SIGCONT)
            await asyncio.sleep(0.05)
        # Another fault of the same moment may keep encoders from making one.
        self.unmet += 1

    def _published(self) -> float:
        return self._cluster.total("proxy", "triptych_published_bytes")

    async def _slow_store(self) -> None:
        self._store_relay.delay = 0.25
        await asyncio.sleep(10)
        self._store_relay.delay = 0.0

    async def _on_relay(self, act: Callable[[], int]) -> None:
        # At the moment of another fault there may be none.
        for _ in range(MAX_CATCHES):
            if await asyncio.to_thread(act):
                return
            await asyncio.sleep(0.05)
        raise AssertionError("no connection went through the relay")

    async def _leaving_clients(self) -> None:
        """Streams whose clients close their side in the middle."""
        case = self._clients._cases[1]
        body = json.dumps(
            {"messages": case.client_messages(), "max_tokens": 400, "stream": True, "ignore_eos": True}
        ).encode()
        where = urlsplit(self._clients._url)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
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
