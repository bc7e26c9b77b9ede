"""The checks of a store: every server is asked, measured and judged; then the workers registered in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
import uuid
from collections.abc import Awaitable, Sequence

from triptych.apps.doctor import store_judgements as judge
from triptych.apps.doctor.finding import CheckResult, Group, fail, ok
from triptych.base.config import MIB
from triptych.base.errors import ConfigError
from triptych.base.types import WorkerInfo
from triptych.registry.registry import Registry
from triptych.store import keys
from triptych.store.address import StoreAddress
from triptych.store.bulk import BulkError, BulkRefused
from triptych.store.control import StoreRefused, StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore
from triptych.store.remedies import is_denied
from triptych.store.topology.location import parse_store
from triptych.store.topology.server import Server
from triptych.store.topology.topology import Topology

_PINGS = 30
_ROUNDS = 3
#: Milliseconds after which a value of the measurement is gone at the latest.
_TTL = 60_000


async def latency(server: Server) -> list[float]:
    """Seconds of small commands, one after the other; the first one, which connects, does not count."""
    await server.control.execute("PING")
    times = []
    for _ in range(_PINGS):
        begin = time.perf_counter()
        await server.control.execute("PING")
        times.append(time.perf_counter() - begin)
    return times


async def bandwidth(topology: Topology, nbytes: int) -> tuple[float | None, float | None]:
    """Bytes per second written and read, the best of some; None for what the user may not do.

    One value is written, under a key that no item has, and deleted; it is gone after a minute anyway.
    """
    key = f"{keys.EMBEDDING}{{check-{uuid.uuid4().hex}}}"
    value, memory = os.urandom(nbytes), memoryview(bytearray(nbytes))
    rates: dict[str, float] = {}

    async def write() -> None:
        await topology.write(
            key, nbytes, lambda writer: writer.set(key, [value], milliseconds=_TTL, only_new=False)
        )

    async def read() -> None:
        await topology.read(key, nbytes, lambda reader: reader.get(key, lambda size: memory[:size]))

    try:
        for name, transfer in (("written", write), ("read", read)):
            for _ in range(_ROUNDS):
                begin = time.perf_counter()
                try:
                    await transfer()
                except BulkRefused as error:
                    if not is_denied(error):
                        raise
                    break
                rate = nbytes / (time.perf_counter() - begin)
                rates[name] = max(rates.get(name, 0.0), rate)
            # A value that could not be written is not read either.
            if name not in rates:
                break
    finally:
        if "written" in rates:
            with contextlib.suppress(StoreRefused):
                await topology.control.execute("UNLINK", key)
    return rates.get("written"), rates.get("read")


async def days_left(address: StoreAddress) -> float:
    """Days until the server's certificate ends. OSError when it does not let us in."""
    assert address.tls is not None
    context = address.tls.context()

    def ask() -> float:
        with (
            socket.create_connection((address.host, address.port), timeout=5) as sock,
            context.wrap_socket(sock, server_hostname=address.host) as wrapped,
        ):
            found = wrapped.getpeercert() or {}
            return (ssl.cert_time_to_seconds(str(found["notAfter"])) - time.time()) / 86400

    return await asyncio.to_thread(ask)


async def is_open(address: StoreAddress) -> bool:
    """Whether the server answers without a password."""
    plain = StoreAddress(path=address.path, host=address.host, port=address.port, tls=address.tls)
    server = Server(plain, 5.0)
    try:
        await server.control.execute("PING")
    except StoreUnavailable:
        return False
    finally:
        await server.close()
    return True


_SECONDS = 5.0


async def check_store(url: str, nbytes: int = 0) -> list[Group]:
    """The results of the store of --store, those of each server under a heading of its own.

    Bandwidth is measured with one value of up to `nbytes`; with 0 nothing is written, and neither bandwidth
    nor epoch is checked. ConfigError for what is not an address.
    """
    store = EmbeddingStore(parse_store(url), _SECONDS)
    try:
        try:
            await store.topology.connect()
        except (StoreUnavailable, OSError, TimeoutError) as error:
            # The message of the first says what helps.
            return [(f"store {store.label}", [fail("reach", str(error) or "no answer in time", "")])]
        parts = store.topology.servers()
        groups: list[Group] = [
            (f"store {each.server.address.label}", await _server(each.server)) for each in parts
        ]
        whole = await _whole(store, nbytes)
        if len(parts) != 1 or parts[0].part < 1:
            whole.insert(0, judge.judge_parts([each.part for each in parts]))
        # One server is the whole store.
        heading, own = groups.pop() if len(groups) == 1 else (f"store {store.label}", [])
        return [*groups, (heading, [*own, *whole])]
    finally:
        await store.close()


async def _server(server: Server) -> list[CheckResult]:
    checks = [check for check in _OF_SERVER if check != "TLS" or not server.address.path]
    return [await _attempt(check, _judged(server, check)) for check in checks]


async def _whole(store: EmbeddingStore, nbytes: int) -> list[CheckResult]:
    results = []
    if nbytes:
        results.append(await _attempt("bandwidth", _bandwidth(store, nbytes)))
        results.append(await _attempt("epoch", _epoch(store)))
    try:
        workers = await Registry(store).workers()
    except (StoreRefused, StoreUnavailable, OSError, TimeoutError) as error:
        return [*results, _refused("workers", error)]
    return results + await check_workers(workers)


async def _attempt(check: str, work: Awaitable[CheckResult]) -> CheckResult:
    """The result; one, too, where the check cannot be made."""
    try:
        async with asyncio.timeout(10 * _SECONDS):
            return await work
    except (StoreRefused, StoreUnavailable, BulkError, OSError, TimeoutError, ConfigError) as error:
        return _refused(check, error)


def _refused(check: str, error: Exception) -> CheckResult:
    if isinstance(error, StoreRefused):
        return judge.denied(check)
    return fail(check, str(error) or "no answer in time", "see the server's log and its load")


_OF_SERVER = ("version", "role", "policy", "memory", "disk", "latency", "TLS", "login", "clock")


async def _judged(server: Server, check: str) -> CheckResult:
    """One of these checks."""
    match check:
        case "version":
            return judge.judge_version(await server.info("server"))
        case "role":
            return judge.judge_role(await server.info("replication"))
        case "policy":
            return judge.judge_policy(await server.memory())
        case "memory":
            return judge.judge_memory(await server.memory(), await server.info("memory"))
        case "disk":
            return judge.judge_persistence(await server.info("persistence"))
        case "latency":
            return judge.judge_latency(await latency(server))
        case "login":
            return judge.judge_login(await is_open(server.address))
        case "clock":
            return judge.judge_clock(await _clock_ahead(server))
    if server.address.tls is None:
        return judge.judge_plain(server.address.host)
    return judge.judge_expiry(await days_left(server.address))


async def _clock_ahead(server: Server) -> float:
    """Seconds that the server's clock is ahead of ours. By INFO: TIME may be forbidden."""
    before = time.time()
    info = await server.info("server")
    middle = (before + time.time()) / 2
    return int(info["server_time_usec"]) / 1e6 - middle if "server_time_usec" in info else 0.0


async def _bandwidth(store: EmbeddingStore, nbytes: int) -> CheckResult:
    """With at most a hundredth of the store's memory, so that little is evicted for it."""
    memory = await store.memory()
    cap = max(MIB, memory.max_bytes // 100) if memory.max_bytes else nbytes
    return judge.judge_bandwidth(*await bandwidth(store.topology, max(1, min(nbytes, cap))))


async def _epoch(store: EmbeddingStore) -> CheckResult:
    return ok("epoch", await store.epoch())


async def check_workers(workers: Sequence[WorkerInfo], seconds: float = 3.0) -> list[CheckResult]:
    """Whether each registered worker's address can be reached from here."""
    return list(await asyncio.gather(*(_reached(info, seconds) for info in workers)))


async def _reached(info: WorkerInfo, seconds: float) -> CheckResult:
    host, _, port = info.address.rpartition(":")
    name = f"{info.pool} {info.address} ({info.model})"
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
    except (OSError, ValueError, OverflowError, TimeoutError) as error:
        why = str(error) or f"no answer within {seconds:g} s"
        return fail("worker", f"{name}: {why}", "see its log, --advertise, and firewalls between")
    return ok("worker", f"{name} is reached")
