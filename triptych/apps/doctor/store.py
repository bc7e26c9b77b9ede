"""The checks of a store: every server is asked, measured and judged; then the workers registered in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
import uuid
from collections.abc import Awaitable, Mapping, Sequence

from triptych.apps.doctor.finding import CheckResult, Group, fail, note, ok
from triptych.apps.doctor.machine import SOON_DAYS
from triptych.base.config import MIB, format_size, is_loopback
from triptych.base.errors import ConfigError
from triptych.base.types import WorkerInfo
from triptych.registry.registry import Registry
from triptych.store import keys
from triptych.store.address import StoreAddress
from triptych.store.bulk import POLICY, BulkError, BulkRefused, StoreMemory
from triptych.store.control import StoreRefused, StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore
from triptych.store.remedies import is_denied
from triptych.store.topology.location import parse_store
from triptych.store.topology.topology import Server, Topology

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
            certificate = wrapped.getpeercert() or {}
            return (ssl.cert_time_to_seconds(str(certificate["notAfter"])) - time.time()) / 86400

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
            whole.insert(0, judge_parts([each.part for each in parts]))
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
        return denied(check)
    return fail(check, str(error) or "no answer in time", "see the server's log and its load")


_OF_SERVER = ("version", "role", "policy", "memory", "disk", "latency", "TLS", "login", "clock")


async def _judged(server: Server, check: str) -> CheckResult:
    """One of these checks."""
    match check:
        case "version":
            return judge_version(await server.info("server"))
        case "role":
            return judge_role(await server.info("replication"))
        case "policy":
            return judge_policy(await server.memory())
        case "memory":
            return judge_memory(await server.memory(), await server.info("memory"))
        case "disk":
            return judge_persistence(await server.info("persistence"))
        case "latency":
            return judge_latency(await latency(server))
        case "login":
            return judge_login(await is_open(server.address))
        case "clock":
            return judge_clock(await _clock_ahead(server))
    if server.address.tls is None:
        return judge_plain(server.address.host)
    return judge_expiry(await days_left(server.address))


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
    return judge_bandwidth(*await bandwidth(store.topology, max(1, min(nbytes, cap))))


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


#: The oldest Redis whose ACL has selectors, which the users of `triptych store acl` need.
_SELECTORS = (7, 0)
#: Seconds for a small command above which requests are held up.
_SLOW = 0.005
#: Bytes per second below which embeddings take longer to move than most are worth.
_NARROW = 100e6
#: Certificates, logs and metrics of machines are compared by their clocks.
MAX_SKEW_SECONDS = 2.0


def judge_version(info: Mapping[str, str]) -> CheckResult:
    """From the section "server" of INFO."""
    name = "Valkey" if "valkey_version" in info else "Redis"
    text = info.get("valkey_version") or info.get("redis_version", "")
    number = tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())
    if not number:
        return note("version", "the server does not name its version", "Redis 7 or Valkey is tested")
    if number < _SELECTORS:
        return note("version", f"{name} {text}", "Redis 7 or Valkey, for users of their own for each role")
    return ok("version", f"{name} {text}")


def judge_policy(memory: StoreMemory) -> CheckResult:
    """Whether the server evicts embeddings and only those."""
    remedy = f"set maxmemory-policy {POLICY}"
    if memory.policy == POLICY:
        return ok("policy", memory.policy)
    if memory.policy.startswith("allkeys"):
        return fail("policy", f"{memory.policy}: registrations and leases may be evicted", remedy)
    if memory.policy == "noeviction":
        return fail("policy", "noeviction: a full store refuses embeddings", remedy)
    return note("policy", f"{memory.policy or 'unknown'}: embeddings in use may be evicted first", remedy)


def judge_memory(memory: StoreMemory, info: Mapping[str, str]) -> CheckResult:
    """From the section "memory" of INFO."""
    used = format_size(memory.used_bytes // MIB * MIB)
    if not memory.max_bytes:
        unlimited = f"no maxmemory, {used} used: the server grows until it is killed"
        return fail("memory", unlimited, "set maxmemory")
    shown = f"{used} of {format_size(memory.max_bytes)} used"
    machine = int(info.get("total_system_memory", 0) or 0)
    if machine and memory.max_bytes > 0.9 * machine:
        fitting = format_size(int(0.75 * machine) // MIB * MIB)
        return note(
            "memory",
            f"{shown}; its machine has {format_size(machine // MIB * MIB)}",
            f"set maxmemory below {fitting}, or give it more memory",
        )
    return ok("memory", shown)


def judge_persistence(info: Mapping[str, str]) -> CheckResult:
    """From the section "persistence" of INFO."""
    if info.get("aof_enabled") == "1":
        remedy = "set appendonly no: what is lost is encoded again"
        return note("disk", "every value is written to disk, too", remedy)
    return ok("disk", "values are not logged to disk")


def judge_role(info: Mapping[str, str]) -> CheckResult:
    """From the section "replication" of INFO."""
    if info.get("role") == "slave":
        primary = info.get("master_host", "?")
        return fail("role", f"a replica of {primary}", "name the primary, or redis+sentinel://")
    return ok("role", f"primary with {info.get('connected_slaves', '0')} replicas")


def judge_latency(seconds: Sequence[float]) -> CheckResult:
    """From the times of small commands."""
    middle = sorted(seconds)[len(seconds) // 2]
    shown = f"{middle * 1000:.2f} ms, at most {max(seconds) * 1000:.2f} ms"
    if middle > _SLOW:
        return note("latency", shown, "run it in the same zone as workers and proxies, and check its load")
    return ok("latency", shown)


def judge_bandwidth(written: float | None, read: float | None) -> CheckResult:
    """From bytes per second; None for what the user may not do."""
    rates = {"written": written, "read": read}
    known = {name: rate for name, rate in rates.items() if rate is not None}
    if not known:
        return denied("bandwidth")
    shown = ", ".join(f"{rate / 1e9:.2f} GB/s {name}" for name, rate in known.items())
    if min(known.values()) < _NARROW:
        return note("bandwidth", shown, "give it more network and CPU, or spread it over a Redis Cluster")
    return ok("bandwidth", shown)


def judge_expiry(days: float) -> CheckResult:
    """From the days that the server's certificate is still valid."""
    shown = f"the server's certificate is valid for {days:.0f} days"
    return note("TLS", shown, "renew it") if days < SOON_DAYS else ok("TLS", shown)


def judge_plain(host: str) -> CheckResult:
    """Of a connection without TLS."""
    if is_loopback(host):
        return ok("TLS", "none, on this machine")
    risk = "none: who is on the way reads and changes embeddings and passwords"
    return note("TLS", risk, "switch TLS on there and write rediss://")


def judge_login(is_open: bool) -> CheckResult:
    """Whether a client needs a password."""
    if is_open:
        remedy = "give it the users of `triptych store acl`, or a password"
        return note("login", "anybody who reaches it may do everything", remedy)
    return ok("login", "a password is needed")


def judge_parts(parts: Sequence[float]) -> CheckResult:
    """From the part of all keys that each server has."""
    if sum(parts) < 0.9999:
        missing = f"{100 * (1 - sum(parts)):.1f} % of all slots have no server"
        return fail("slots", missing, "see CLUSTER INFO; `redis-cli --cluster fix` repairs it")
    return ok("slots", f"{len(parts)} servers have all keys")


def judge_clock(skew: float) -> CheckResult:
    """Whether a server's clock, `skew` seconds ahead of this machine's, is near enough."""
    shown = f"{skew:+.3f} s against this machine"
    if abs(skew) <= MAX_SKEW_SECONDS:
        return ok("clock", shown)
    return fail("clock", shown, "synchronise both machines' clocks by NTP (chrony, systemd-timesyncd)")


def denied(check: str) -> CheckResult:
    """What this login may not ask for."""
    return note(check, "this user may not ask", "log in as an administrator to have it checked")
