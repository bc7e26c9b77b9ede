"""The store: version, eviction policy, memory, latency and clock of each of its servers."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass

from triptych.config import MIB, format_size
from triptych.doctor.finding import CheckResult, fail, note, ok
from triptych.ec_connector.registry.registry import Registry
from triptych.ec_connector.store.control import StoreRefused, StoreUnavailable
from triptych.ec_connector.store.embedding_store import EmbeddingStore
from triptych.ec_connector.store.results import POLICY
from triptych.ec_connector.store.topology.location import parse_store
from triptych.ec_connector.store.topology.server import Server
from triptych.types import WorkerInfo

#: Least versions of Redis and Valkey.
LEAST_REDIS = 6
#: A look-up is one round trip, and each item of a request waits for one.
SLOW_SECONDS = 0.005
BAD_SECONDS = 0.05
#: Certificates, logs and metrics of machines are compared by their clocks.
MOST_SKEW_SECONDS = 2.0
LEAST_STORE = 64 * MIB
_PINGS = 20
_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class StoreState:
    """One server. `skew`: seconds that its clock is ahead of this machine's; `latency`: median of a PING."""

    label: str
    version: str
    policy: str
    max_bytes: int
    used_bytes: int
    evicted: int
    latency: float
    skew: float
    persistent: bool = False


def check_server(state: StoreState) -> list[CheckResult]:
    """The findings on one server of the store."""
    return [_version(state), _policy(state), _memory(state), _disk(state), _latency(state), _clock(state)]


def _version(state: StoreState) -> CheckResult:
    name, check = f"{state.label}: {state.version or 'unknown'}", "version"
    first = state.version.partition(".")[0]
    if first.isdecimal() and int(first) < LEAST_REDIS:
        return fail(check, name, f"run Redis {LEAST_REDIS} or newer, or Valkey")
    return ok(check, name)


def _policy(state: StoreState) -> CheckResult:
    if state.policy == POLICY:
        return ok("policy", state.policy)
    why = f"CONFIG SET maxmemory-policy {POLICY}, and in the server's file: leases and registrations, which "
    return fail("policy", state.policy or "unknown", why + "have no TTL, must never be evicted")


def _memory(state: StoreState) -> CheckResult:
    used, most = format_size(state.used_bytes), format_size(state.max_bytes)
    if not state.max_bytes:
        return fail("maxmemory", f"none; {used} in use", "CONFIG SET maxmemory, 0.7 of the server's memory")
    shown = f"{used} of {most} in use, {state.evicted} keys evicted"
    if state.max_bytes < LEAST_STORE:
        return fail("maxmemory", shown, f"CONFIG SET maxmemory: {format_size(LEAST_STORE)} or more")
    return ok("maxmemory", shown)


def _disk(state: StoreState) -> CheckResult:
    if not state.persistent:
        return ok("persistence", "off")
    return note("persistence", "on", "CONFIG SET save '' appendonly no: embeddings are made again when lost")


def _latency(state: StoreState) -> CheckResult:
    shown = f"{state.latency * 1000:.2f} ms for a PING"
    if state.latency < SLOW_SECONDS:
        return ok("latency", shown)
    remedy = "put the store into the workers' zone; `SLOWLOG GET` and its CPU say whether it is busy"
    return note("latency", shown, remedy) if state.latency < BAD_SECONDS else fail("latency", shown, remedy)


def _clock(state: StoreState) -> CheckResult:
    shown = f"{state.skew:+.3f} s against this machine"
    if abs(state.skew) <= MOST_SKEW_SECONDS:
        return ok("clock", shown)
    return fail("clock", shown, "synchronise both machines' clocks by NTP (chrony, systemd-timesyncd)")


async def look_at_store(url: str) -> list[CheckResult]:
    """The findings on the store at this address, and on the workers that are registered in it."""
    # Not by `connect`, which tells other processes which shards there are.
    store = EmbeddingStore(parse_store(url), _SECONDS)
    try:
        async with asyncio.timeout(_SECONDS):
            for shard in store.shards:
                await shard.topology.connect()
            return await _findings(store)
    except (StoreUnavailable, TimeoutError, OSError) as error:
        remedy = "start it, or correct --store, its password and TLS files; a firewall may be between"
        return [fail("store", str(error) or "no answer in time", remedy)]
    finally:
        await store.close()


async def _findings(store: EmbeddingStore) -> list[CheckResult]:
    findings: list[CheckResult] = []
    for shard in store.shards:
        for part in shard.topology.servers():
            try:
                findings += check_server(await _state(part.server))
            except StoreRefused as error:
                findings.append(
                    note("store", str(error), "its user may not ask for INFO: use the administrator's")
                )
    return findings + await _workers(store)


async def _workers(store: EmbeddingStore) -> list[CheckResult]:
    try:
        workers = await Registry(store).workers()
    except StoreRefused as error:
        return [note("workers", str(error), "its user may not read the registry: use the administrator's")]
    return await check_workers(workers)


async def _state(server: Server) -> StoreState:
    before = time.time()
    info = await server.info("server")
    middle = (before + time.time()) / 2
    memory, stats, persistence = [
        await server.info(section) for section in ("memory", "stats", "persistence")
    ]
    took = []
    for _ in range(_PINGS):
        began = time.monotonic()
        await server.control.execute("PING")
        took.append(time.monotonic() - began)
    return StoreState(
        label=server.address.label,
        version=info.get("valkey_version") or info.get("redis_version", ""),
        policy=memory.get("maxmemory_policy", ""),
        max_bytes=int(memory.get("maxmemory", 0)),
        used_bytes=int(memory.get("used_memory", 0)),
        evicted=int(stats.get("evicted_keys", 0)),
        latency=statistics.median(took),
        # No TIME: a service's user may ask for INFO alone.
        skew=int(info["server_time_usec"]) / 1e6 - middle if "server_time_usec" in info else 0.0,
        persistent=persistence.get("aof_enabled") == "1" or int(persistence.get("rdb_saves", 0) or 0) > 0,
    )


async def check_workers(workers: list[WorkerInfo], seconds: float = 3.0) -> list[CheckResult]:
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
