"""The judgements of a store, from what its servers say of themselves. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from triptych.apps.doctor.finding import CheckResult, fail, note, ok
from triptych.apps.doctor.secrets import SOON_DAYS
from triptych.base.config import MIB, format_size, is_loopback
from triptych.store.results import POLICY, StoreMemory

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
