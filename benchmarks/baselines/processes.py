"""CPU and memory of processes and their descendants, read from /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """`cpu`: seconds so far; `memory_mb`: proportional set size, so that pages forks share count once."""

    name: str
    cpu: float
    memory_mb: float = 0.0


def alive(pid: int) -> bool:
    """A process that has ended and was not waited for does not live."""
    fields = _stat(pid)
    return fields is not None and fields[1][0] not in ("Z", "X")


def tree(roots: Iterable[int]) -> list[int]:
    """The roots and all that descends from them."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) is not None:
            children.setdefault(int(fields[1][1]), []).append(int(entry.name))
    found, left = [], list(roots)
    while left:
        pid = left.pop()
        if pid not in found:
            found.append(pid)
            left += children.get(pid, [])
    return found


def usages(roots: Iterable[int], memory: bool = False) -> dict[int, ProcessUsage]:
    """By process id; a process that ends meanwhile is left out."""
    found = {}
    for pid in tree(roots):
        fields = _stat(pid)
        if fields is not None:
            cpu = (int(fields[1][11]) + int(fields[1][12])) / _TICKS
            found[pid] = ProcessUsage(fields[0], cpu, _memory_mb(pid) if memory else 0.0)
    return found


def cpu_shares(
    before: Mapping[int, ProcessUsage], after: Mapping[int, ProcessUsage], wall: float
) -> dict[str, float]:
    """CPU seconds per second by process name, equal names apart by a number; a new process counts whole."""
    found: dict[str, float] = {}
    for pid, usage in after.items():
        spent = usage.cpu - (before[pid].cpu if pid in before else 0.0)
        name, number = usage.name, 1
        while name in found:
            number += 1
            name = f"{usage.name} {number}"
        found[name] = spent / max(wall, 1e-9)
    return found


def others_share(before: MachineTime, after: MachineTime) -> float:
    """Cores that processes outside of this run used, time stolen by the host included; never below 0."""
    wall = after.wall - before.wall
    return max(after.busy - before.busy - (after.own - before.own), 0.0) / max(wall, 1e-9)


@dataclass(frozen=True, slots=True)
class MachineTime:
    """Seconds: clock, CPU of all processes, CPU of this process and its descendants, ended ones too."""

    wall: float
    busy: float
    own: float


def machine_time() -> MachineTime:
    """Now. What a descendant's own ended children took is missing in `own`."""
    words = (_PROC / "stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _, _, irq, softirq, steal = (int(word) / _TICKS for word in words[:8])
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    own += sum(usage.cpu for pid, usage in usages([os.getpid()]).items() if pid != os.getpid())
    return MachineTime(times.elapsed, user + nice + system + irq + softirq + steal, own)


def _stat(pid: int) -> tuple[str, list[str]] | None:
    """The name, and the fields of /proc/PID/stat from the state on."""
    with contextlib.suppress(OSError, IndexError):
        head, _, rest = (_PROC / str(pid) / "stat").read_text().rpartition(")")
        return head.partition("(")[2], rest.split()
    return None


def _memory_mb(pid: int) -> float:
    with contextlib.suppress(OSError):
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
        return round(sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024, 1)
    return 0.0
