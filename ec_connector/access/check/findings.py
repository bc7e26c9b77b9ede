"""The findings of a check, and the judgements that make them. Pure: from what servers say of themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from triptych.config import MIB, format_size, is_loopback
from triptych.ec_connector.store.results import POLICY, StoreMemory

#: The oldest Redis whose ACL has selectors, which the users of `triptych store acl` need.
_SELECTORS = (7, 0)
#: Seconds for a small command above which requests are held up.
_SLOW = 0.005
#: Bytes per second below which embeddings take longer to move than most are worth.
_NARROW = 100e6
_DAYS = 14.0


class Verdict(Enum):
    """How bad a finding is."""

    FINE = "ok"
    UNKNOWN = "?"
    WARNING = "warning"
    FAILURE = "FAILED"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the check: of which server, what was looked at and found, and what to do about it."""

    server: str
    subject: str
    verdict: Verdict
    found: str
    remedy: str = ""


Judgement = tuple[Verdict, str, str]
#: A judgement of a section of INFO.
OfSection = Callable[[Mapping[str, str]], Judgement]


def judge_version(info: Mapping[str, str]) -> Judgement:
    """From the section "server" of INFO."""
    name = "Valkey" if "valkey_version" in info else "Redis"
    text = info.get("valkey_version") or info.get("redis_version", "")
    number = tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())
    if not number:
        return Verdict.UNKNOWN, "the server does not name its version", ""
    if number < _SELECTORS:
        return (
            Verdict.WARNING,
            f"{name} {text}",
            "Redis 7 or Valkey, for users of their own for each role",
        )
    return Verdict.FINE, f"{name} {text}", ""


def judge_policy(memory: StoreMemory) -> Judgement:
    """Whether the server evicts embeddings and only those."""
    remedy = f"set maxmemory-policy {POLICY}"
    if memory.policy == POLICY:
        return Verdict.FINE, memory.policy, ""
    if memory.policy.startswith("allkeys"):
        return Verdict.FAILURE, f"{memory.policy}: registrations and leases may be evicted", remedy
    if memory.policy == "noeviction":
        return Verdict.FAILURE, "noeviction: a full store refuses embeddings", remedy
    return Verdict.WARNING, f"{memory.policy or 'unknown'}: embeddings in use may be evicted first", remedy


def judge_memory(memory: StoreMemory, info: Mapping[str, str]) -> Judgement:
    """From the section "memory" of INFO."""
    used = format_size(memory.used_bytes // MIB * MIB)
    if not memory.max_bytes:
        return (
            Verdict.FAILURE,
            f"no maxmemory, {used} used: the server grows until it is killed",
            "set maxmemory",
        )
    found = f"{used} of {format_size(memory.max_bytes)} used"
    machine = int(info.get("total_system_memory", 0) or 0)
    if machine and memory.max_bytes > 0.9 * machine:
        remedy = (
            f"set maxmemory below {format_size(int(0.75 * machine) // MIB * MIB)}, or give it more memory"
        )
        return Verdict.WARNING, f"{found}; its machine has {format_size(machine // MIB * MIB)}", remedy
    return Verdict.FINE, found, ""


def judge_persistence(info: Mapping[str, str]) -> Judgement:
    """From the section "persistence" of INFO."""
    if info.get("aof_enabled") == "1":
        return (
            Verdict.WARNING,
            "every value is written to disk, too",
            "set appendonly no: what is lost is encoded again",
        )
    return Verdict.FINE, "values are not logged to disk", ""


def judge_role(info: Mapping[str, str]) -> Judgement:
    """From the section "replication" of INFO."""
    if info.get("role") == "slave":
        return (
            Verdict.FAILURE,
            f"a replica of {info.get('master_host', '?')}",
            "name the primary, or redis+sentinel://",
        )
    return Verdict.FINE, f"primary with {info.get('connected_slaves', '0')} replicas", ""


def judge_latency(seconds: Sequence[float]) -> Judgement:
    """From the times of small commands."""
    middle = sorted(seconds)[len(seconds) // 2]
    found = f"{middle * 1000:.2f} ms, at most {max(seconds) * 1000:.2f} ms"
    if middle > _SLOW:
        return Verdict.WARNING, found, "run it in the same zone as workers and proxies, and look at its load"
    return Verdict.FINE, found, ""


def judge_bandwidth(written: float | None, read: float | None) -> Judgement:
    """From bytes per second; None for what the user may not do."""
    rates = {"written": written, "read": read}
    known = {name: rate for name, rate in rates.items() if rate is not None}
    if not known:
        return Verdict.UNKNOWN, "this user may neither write nor read embeddings", ""
    found = ", ".join(f"{rate / 1e9:.2f} GB/s {name}" for name, rate in known.items())
    if min(known.values()) < _NARROW:
        return Verdict.WARNING, found, "give it more network and CPU, or spread it over a Redis Cluster"
    return Verdict.FINE, found, ""


def judge_expiry(days: float) -> Judgement:
    """From the days that the server's certificate is still valid."""
    found = f"the server's certificate is valid for {days:.0f} days"
    if days < _DAYS:
        return Verdict.WARNING, found, "renew it"
    return Verdict.FINE, found, ""


def judge_plain(host: str) -> Judgement:
    """Of a connection without TLS."""
    if is_loopback(host):
        return Verdict.FINE, "none, on this machine", ""
    return (
        Verdict.WARNING,
        "none: who is on the way reads and changes embeddings and passwords",
        "switch TLS on there and write rediss://",
    )


def judge_login(is_open: bool) -> Judgement:
    """Whether a client needs a password."""
    if is_open:
        return (
            Verdict.WARNING,
            "anybody who reaches it may do everything",
            "give it the users of `triptych store acl`, or a password",
        )
    return Verdict.FINE, "a password is needed", ""


def judge_parts(parts: Sequence[float]) -> Judgement:
    """From the part of all keys that each server has."""
    if sum(parts) < 0.9999:
        return (
            Verdict.FAILURE,
            f"{100 * (1 - sum(parts)):.1f} % of all slots have no server",
            "see CLUSTER INFO; `redis-cli --cluster fix` repairs it",
        )
    return Verdict.FINE, f"{len(parts)} servers have all keys", ""


def exit_code(findings: Sequence[Finding]) -> int:
    """1 where something failed."""
    return int(any(finding.verdict is Verdict.FAILURE for finding in findings))


def table(findings: Sequence[Finding]) -> str:
    """The findings as lines of columns, by server; below each that is not fine its remedy."""
    lines: list[str] = []
    width = max(len(finding.subject) for finding in findings)
    server = None
    for finding in findings:
        if finding.server != server:
            lines.append(finding.server)
            server = finding.server
        lines.append(f"  {finding.verdict.value:<8} {finding.subject:<{width}}  {finding.found}")
        if finding.remedy:
            lines.append(f"  {'':<8} {'':<{width}}  -> {finding.remedy}")
    return "\n".join(lines)
