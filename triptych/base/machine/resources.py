"""CPUs and memory that this process may use, by affinity, cgroups and NUMA nodes. Linux only.

All functions read files below `root`, by default the machine's own. A missing file means no limit.
"""

from __future__ import annotations

import os
import platform
import re
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from triptych.base.errors import ConfigError

_ROOT = Path("/")
#: Variable with the CPUs that a container requests, set by the Helm chart: no file of the machine has them.
_REQUEST = "TRIPTYCH_CPU_REQUEST"
#: Inode numbers of the initial namespaces, constants of the kernel (include/linux/proc_ns.h).
_INITIAL_NAMESPACES = {"pid": 0xEFFFFFFC, "cgroup": 0xEFFFFFFB}


def usable_cpus(affinity: Collection[int] | None = None, root: Path = _ROOT) -> int:
    """Number of CPUs for this process: no more than its quota, rounded down, or its request; at least one."""
    limits = (len(allowed_cpus(affinity, root)), cpu_quota(root), requested_cpus())
    return max(1, int(min(limit for limit in limits if limit is not None)))


def requested_cpus() -> int | None:
    """The CPUs that this container requests of its node; None: it has no request, or is none.

    Without a quota it may use every CPU that is idle, but those of other containers' requests are not for it.
    """
    text = os.environ.get(_REQUEST, "")
    # A container without a request is given 0.
    return int(text) or None if text.isdecimal() else None


def allowed_cpus(affinity: Collection[int] | None = None, root: Path = _ROOT) -> frozenset[int]:
    """The CPUs that this process may run on: its affinity within its cpuset."""
    allowed = frozenset(os.sched_getaffinity(0) if affinity is None else affinity)
    for folder in folders("cpuset", root):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            # A cpuset without any of these CPUs is not this process's: the affinity is authoritative.
            allowed = allowed & _cpu_list(folder / name) or allowed
    return allowed


def cpu_quota(root: Path = _ROOT) -> float | None:
    """The tightest CPU quota of the process's cgroup and its ancestors, in CPUs; None: no quota."""
    quotas = [quota for folder in folders("cpu", root) if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def threads_of_one_worker(affinity: Collection[int] | None = None, root: Path = _ROOT) -> int:
    """Threads of one worker: the usable CPUs, but at most those of one NUMA node."""
    allowed = allowed_cpus(affinity, root)
    largest = max((len(node & allowed) for node in numa_nodes(root)), default=0)
    return min(usable_cpus(affinity, root), largest or len(allowed))


def numa_nodes(root: Path = _ROOT) -> list[frozenset[int]]:
    """The CPUs of each NUMA node, in order; empty where the machine has no such files."""
    files = sorted(
        (root / "sys/devices/system/node").glob("node[0-9]*/cpulist"),
        key=lambda file: int(file.parent.name.removeprefix("node")),
    )
    return [cpus for file in files if (cpus := _cpu_list(file))]


def may_claim_cores(affinity: Collection[int] | None = None, root: Path = _ROOT) -> bool:
    """Whether a core that this process claims cannot be claimed by a process of another container.

    A claim is a name in a network namespace, which containers do not share. So it is reliable on the host,
    outside of containers, and within an exclusive cpuset. With a quota below the number of CPUs, a process on
    one fixed core would wait for unrelated processes there, so it must not claim one.
    """
    allowed, quota = allowed_cpus(affinity, root), cpu_quota(root)
    if quota is not None and quota < len(allowed):
        return False
    return _on_the_host(root) or _exclusive_cpuset(allowed, root)


def available_memory(root: Path = _ROOT) -> int:
    """Bytes that Linux reports as available, within the tightest memory limit of this process's cgroups."""
    available = _meminfo(root, "MemAvailable:")
    rooms = [room for folder in folders("memory", root) if (room := _room(folder)) is not None]
    return max(0, min([available, *rooms]))


def _quota(folder: Path) -> float | None:
    """Quota over period, of version 2 or 1; None where there is none."""
    fields = read_text(folder / "cpu.max").split()
    if not fields:
        fields = [read_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(fields) != 2 or not all(word.isdecimal() for word in fields) or not int(fields[1]):
        return None
    return int(fields[0]) / int(fields[1])


def _room(folder: Path) -> int | None:
    """Free bytes below this cgroup's limit, reclaimable cache included; None without a limit."""
    used = _number(folder / "memory.current", folder / "memory.usage_in_bytes")
    limits = [
        limit
        for names in (("memory.max", "memory.limit_in_bytes"), ("memory.high",))
        if (limit := _number(*(folder / name for name in names))) is not None
    ]
    if used is None or not limits:
        return None
    dropped = 0
    for line in read_text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        # Version 1 has the group's own value and, with "total_", one that includes its children.
        if name in ("inactive_file", "total_inactive_file") and value.isdecimal():
            dropped = max(dropped, int(value))
    return min(limits) - max(0, used - dropped)


def _number(*files: Path) -> int | None:
    """The number in the first of the files that holds one; "max" is none."""
    return next((int(text) for file in files if (text := read_text(file).strip()).isdecimal()), None)


def _meminfo(root: Path, name: str) -> int:
    for line in read_text(root / "proc/meminfo").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


def _on_the_host(root: Path) -> bool:
    """Whether the process is in the initial namespaces, so not in a container."""
    try:
        return all(
            (root / "proc/self/ns" / name).stat().st_ino == inode
            for name, inode in _INITIAL_NAMESPACES.items()
        )
    except OSError:
        return False


def _exclusive_cpuset(allowed: Collection[int], root: Path) -> bool:
    """Whether the process's own cpuset is exclusive, and smaller than the machine."""
    online = _cpu_list(root / "sys/devices/system/cpu/online")
    own = next(folders("cpuset", root), None)
    if own is None or not frozenset(allowed) < online:
        return False
    partition = read_text(own / "cpuset.cpus.partition").strip()
    return partition in ("root", "isolated") or read_text(own / "cpuset.cpu_exclusive").strip() == "1"


def _cpu_list(file: Path) -> frozenset[int]:
    """The CPUs of "0,2-3"; none where the file is missing or is malformed."""
    cpus: set[int] = set()
    for piece in read_text(file).strip().split(","):
        first, _, last = piece.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            cpus |= set(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


#: Longest kind, in characters: it is part of registrations and a label of metrics.
MAX_KIND_CHARS = 100


def worker_kind(given: str, device: str, threads: int, *, ranks: int = 1, root: Path = Path("/")) -> str:
    """--worker-kind, or what the device says: "cpu AMD EPYC 9B14 x2 threads", "cuda NVIDIA H200 x4 ranks"."""
    if given:
        if len(given) > MAX_KIND_CHARS or not given.isprintable():
            raise ConfigError(
                f"--worker-kind has {len(given)} characters: use up to {MAX_KIND_CHARS} printable ones"
            )
        return given
    shared = f" x{ranks} ranks" if ranks > 1 else ""
    if device.startswith("cuda"):
        return _short(f"cuda {_gpu_name(device)}{shared}")
    return _short(f"{device} {cpu_name(root)} x{threads} threads{shared}")


def _gpu_name(device: str) -> str:
    # Not at the top: proxies import no torch.
    import torch

    return str(torch.cuda.get_device_name(device))


def cpu_name(root: Path = _ROOT) -> str:
    """The CPU's model by /proc/cpuinfo; its architecture where that names none."""
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    fields = (line.partition(":") for line in text.splitlines())
    names = (value.strip() for field, _, value in fields if field.strip() == "model name")
    return next((name for name in names if name), platform.machine())


def cpu_flags(root: Path = _ROOT) -> frozenset[str]:
    """What an x86 CPU can do, by the names of /proc/cpuinfo; empty where it names nothing."""
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    lines = (line.partition(":") for line in text.splitlines())
    return next(
        (frozenset(value.split()) for name, _, value in lines if name.strip() == "flags"), frozenset()
    )


def _short(kind: str) -> str:
    printable = "".join(character for character in kind if character.isprintable())
    return " ".join(printable.split())[:MAX_KIND_CHARS]


def check_temporary_folder() -> None:
    """ConfigError with the remedy where no temporary file can be written: torch and the media need one."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        raise ConfigError(
            "no temporary file can be written: mount a folder at /tmp (Docker: --tmpfs /tmp, Kubernetes: an "
            "emptyDir), or name one by TMPDIR"
        ) from None


_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class _Mount:
    """One mounted cgroup hierarchy; `controllers` is empty for version 2."""

    controllers: frozenset[str]
    inside: str
    point: Path


def folders(controller: str, root: Path) -> Iterator[Path]:
    """The folders of a controller's cgroups: the process's own first, then those above it, of both versions.

    All files are read below `root`.
    """
    paths = _own_paths(root)
    for mount in _mounts(root):
        if mount.controllers and controller not in mount.controllers:
            continue
        path = next((own for names, own in paths if _same(names, mount)), "/")
        yield from _upwards(mount, path, root)


def _same(names: frozenset[str], mount: _Mount) -> bool:
    """Whether a line of /proc/self/cgroup belongs to this mount, whose options include its controllers."""
    return names <= mount.controllers if names else not mount.controllers


def _upwards(mount: _Mount, path: str, root: Path) -> Iterator[Path]:
    """From the cgroup at `path` up to where the hierarchy is mounted."""
    top = root / str(mount.point).lstrip("/")
    inside = path.removeprefix(mount.inside.rstrip("/")).strip("/")
    folder = top / inside
    if ".." in Path(inside).parts or not folder.is_dir():
        # In a container the mount's root is its own cgroup, under another path than on the host.
        folder = top
    yield folder
    while folder != top:
        folder = folder.parent
        yield folder


def _own_paths(root: Path) -> list[tuple[frozenset[str], str]]:
    """Controllers and path of the process's cgroups; no controllers for version 2."""
    lines = read_text(root / "proc/self/cgroup").splitlines()
    split = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    return [(frozenset(filter(None, names.split(","))), path) for _, names, path in split]


def _mounts(root: Path) -> list[_Mount]:
    mounts: list[_Mount] = []
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        before, dash, after = line.partition(" - ")
        fields, kinds = before.split(" "), after.split(" ")
        if not dash or len(fields) < 5 or len(kinds) < 3 or kinds[0] not in ("cgroup", "cgroup2"):
            continue
        names = frozenset(kinds[2].split(",")) if kinds[0] == "cgroup" else frozenset()
        mounts.append(_Mount(names, _unescaped(fields[3]), Path(_unescaped(fields[4]))))
    return mounts


def _unescaped(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def read_text(file: Path) -> str:
    """The content of a file; "" where it cannot be read."""
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
