"""Memory, cores, open files, disk and ports of this machine."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from triptych.apps.doctor.finding import CheckResult, fail, note, ok
from triptych.apps.launch.supervisor import port_error
from triptych.base.config import GIB, format_size
from triptych.base.machine.resources import allowed_cpus, available_memory, cpu_quota

#: Least memory for any worker: the interpreter and torch take a third of it.
MIN_MEMORY = GIB
#: Files for connections, workers and spooled media; see the quotas of the proxy.
MIN_FILES = 4096


@dataclass(frozen=True, slots=True)
class MachineState:
    """What the machine has for this process, within its cgroup. `quota` is in cores."""

    memory: int
    cpus: int
    quota: float | None
    files: int
    shm: int
    disk: int

    @classmethod
    def of_this(cls, spool_folder: str = "") -> MachineState:
        """The machine that this process runs on."""
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        return cls(
            memory=available_memory(),
            cpus=len(allowed_cpus()),
            quota=cpu_quota(),
            files=hard if hard != resource.RLIM_INFINITY else 1 << 20,
            shm=_free("/dev/shm"),
            disk=_free(spool_folder or tempfile.gettempdir()),
        )


def check_machine(state: MachineState, *, media_disk: int) -> list[CheckResult]:
    """`media_disk`: bytes that the proxy may spool."""
    return [_memory(state), _cores(state), _files(state), _shm(state), _disk(state, media_disk)]


def _memory(state: MachineState) -> CheckResult:
    shown = f"{format_size(state.memory)} available to this process"
    if state.memory >= MIN_MEMORY:
        return ok("memory", shown)
    remedy = (
        f"raise the container's memory limit to {format_size(MIN_MEMORY)} or more, or end other processes"
    )
    return fail("memory", shown, f"{remedy}; `triptych check MODEL` says how much a model needs")


def _cores(state: MachineState) -> CheckResult:
    if state.quota is None or state.quota >= state.cpus:
        return ok("cores", f"{state.cpus}")
    shown = f"{state.cpus}, with a quota of {state.quota:g}"
    if state.quota < 1:
        return fail("cores", shown, "give the container a CPU limit of 1 or more, or none")
    return note("cores", shown, "threads are chosen by the quota; equal requests and limits keep steps even")


def _files(state: MachineState) -> CheckResult:
    shown = f"{state.files} open files at most"
    if state.files >= MIN_FILES:
        return ok("files", shown)
    return fail("files", shown, f"`ulimit -Hn 65536`, LimitNOFILE= of systemd: at least {MIN_FILES}")


def _shm(state: MachineState) -> CheckResult:
    shown = f"{format_size(state.shm)} free in /dev/shm"
    return ok("shm", shown) if state.shm else note("shm", shown, "services on CPUs do without it")


def _disk(state: MachineState, media_disk: int) -> CheckResult:
    shown = f"{format_size(state.disk)} free for spooled media"
    if state.disk >= media_disk:
        return ok("disk", shown)
    return note(
        "disk", shown, f"--media-disk is {format_size(media_disk)}: lower it, or name another --spool-folder"
    )


def check_ports(ports: Sequence[tuple[str, str, int]]) -> list[CheckResult]:
    """Each (flag, host, port) is bound for a moment; port 0 is always free."""
    return [_port(flag, host, port) for flag, host, port in ports]


def _port(flag: str, host: str, port: int) -> CheckResult:
    shown = f"{host}:{port}"
    if not port:
        return ok(flag, "picked at the start")
    if why := port_error(host, port):
        return fail(flag, f"{shown}: {why}", f"end what listens there, or give {flag} another number")
    return ok(flag, f"{shown} is free")


def _free(folder: str) -> int:
    try:
        return shutil.disk_usage(folder).free if os.access(folder, os.W_OK) else 0
    except OSError:
        return 0


def readable_by_others(path: Path) -> tuple[bool, bool]:
    """Whether other users may read the file, and whether they may write it."""
    mode = path.stat().st_mode
    return bool(mode & 0o004), bool(mode & 0o022)


def installed_version(name: str) -> str:
    """The installed version of a library, "" where it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def needed() -> list[Requirement]:
    """What a proxy needs, and a worker beside it: those have a marker."""
    every = map(Requirement, requires("triptych") or ())
    return [one for one in every if one.marker is None or one.marker.evaluate({"extra": "worker"})]


def check_versions(
    libraries: Sequence[Requirement],
    found: Callable[[str], str] = installed_version,
    python: str = platform.python_version(),
) -> list[CheckResult]:
    """Python, the libraries that do not fit, and how many do; those that only workers need may be missing."""
    range_ = metadata("triptych")["Requires-Python"]
    remedy = f"make the environment with Python {range_}"
    results = [
        ok("python", python) if _fits(python, SpecifierSet(range_)) else fail("python", python, remedy)
    ]
    absent = [one.name for one in libraries if one.marker is not None and not found(one.name)]
    others = [one for one in libraries if one.name not in absent]
    wrong = [one for one in others if not _fits(found(one.name), one.specifier)]
    for one in wrong:
        install = f"pip install -c constraints.txt '{one.name}{one.specifier}'"
        results.append(fail(one.name, found(one.name) or "not installed", install))
    if absent:
        results.append(
            note("worker", f"{', '.join(absent)} missing: this machine can run a proxy, no worker")
        )
    return [*results, ok("libraries", f"{len(others) - len(wrong)} of {len(libraries)} fit")]


def _fits(found: str, specifier: SpecifierSet) -> bool:
    try:
        return specifier.contains(found, prereleases=True)
    except InvalidVersion:
        return False
