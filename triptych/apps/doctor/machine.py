"""Memory, cores, open files, disk and ports of this machine, and its files of secrets."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from triptych.apps.doctor.finding import CheckResult, fail, fail_of, note, ok
from triptych.base.config import (
    GIB,
    ProxyConfig,
    check_front_door,
    check_ports_differ,
    format_size,
    read_internal_token,
)
from triptych.base.config.flags import flags_of
from triptych.base.config.tls import TlsFiles, check_front_encryption, front_door_tls, internal_tls
from triptych.base.errors import ConfigError
from triptych.base.machine.resources import allowed_cpus, available_memory, cpu_quota
from triptych.base.rpc.ports import port_error
from triptych.proxy.auth.keys import KeyLimits, KeyRing

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
    version_of: Callable[[str], str] = installed_version,
    python: str = platform.python_version(),
) -> list[CheckResult]:
    """Python, the libraries that do not fit, and how many do; those that only workers need may be missing."""
    range_ = metadata("triptych")["Requires-Python"]
    remedy = f"make the environment with Python {range_}"
    results = [
        ok("python", python) if _fits(python, SpecifierSet(range_)) else fail("python", python, remedy)
    ]
    absent = [one.name for one in libraries if one.marker is not None and not version_of(one.name)]
    others = [one for one in libraries if one.name not in absent]
    wrong = [one for one in others if not _fits(version_of(one.name), one.specifier)]
    for one in wrong:
        install = f"pip install -c constraints.txt '{one.name}{one.specifier}'"
        results.append(fail(one.name, version_of(one.name) or "not installed", install))
    if absent:
        results.append(
            note("worker", f"{', '.join(absent)} missing: this machine can run a proxy, no worker")
        )
    return [*results, ok("libraries", f"{len(others) - len(wrong)} of {len(libraries)} fit")]


def _fits(version: str, specifier: SpecifierSet) -> bool:
    try:
        return specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return False


#: Days before its end from which on a certificate is worth a line of its own.
SOON_DAYS = 14
_SECRET_FILES = ("internal_token_file", "store_password_file", "api_key_file")
_KEY_FILES = ("store_key_file", "tls_key_file", "http_key_file")


def check_secrets(config: ProxyConfig) -> list[CheckResult]:
    """The files that are named by flags, what they hold, and whether the front door may be open as it is."""
    findings = [_file(option, path) for option, path in _named(config)]
    findings += _attempt("internal token", lambda: _token(config))
    findings += _attempt("API keys", lambda: _keys(config))
    findings += _attempt("front door", lambda: _front_door(config))
    findings += _attempt("ports", lambda: _ports(config))
    findings += _attempt("internal TLS", lambda: _certificate("internal TLS", internal_tls(config)))
    findings += _attempt("front TLS", lambda: _certificate("front TLS", front_door_tls(config)))
    findings += _attempt("proxy flags", lambda: _proxy_flags(config))
    return findings


def _named(config: ProxyConfig) -> list[tuple[str, str]]:
    given = {flag.name: flag.option for flag in flags_of(ProxyConfig)}
    names = [name for name in (*_SECRET_FILES, *_KEY_FILES) if name in given]
    return [(given[name], str(getattr(config, name))) for name in names if getattr(config, name)]


def _file(option: str, name: str) -> CheckResult:
    path = Path(name)
    try:
        with path.open("rb"):
            others_read, others_write = readable_by_others(path)
    except OSError as error:
        return fail(option, f"{path}: {error.strerror}", "give a file that this user may read")
    if others_write:
        return fail(option, f"{path} may be written by other users", f"chmod 600 {path}")
    if others_read:
        return note(
            option,
            f"{path} may be read by other users",
            f"chmod 600 {path}; in Kubernetes defaultMode: 0440 with fsGroup, where it is mounted",
        )
    return ok(option, str(path))


def _token(config: ProxyConfig) -> CheckResult:
    token = read_internal_token(config.internal_token, config.internal_token_file)
    if not token:
        return note("internal token", "none: `triptych serve` makes one for this machine alone")
    lines = len(token.splitlines())
    return ok("internal token", "is set" if lines == 1 else f"{lines} are in force: a rotation is under way")


def _keys(config: ProxyConfig) -> CheckResult:
    ring = KeyRing(config.api_key, config.api_key_file, KeyLimits())
    if not ring.in_use:
        return note("API keys", "none: every client is let in")
    return ok("API keys", "are asked for")


def _front_door(config: ProxyConfig) -> CheckResult:
    check_front_door(config.host, api_key=config.api_key, api_key_file=config.api_key_file, auth=config.auth)
    check_front_encryption(config)
    return ok("front door", f"--host {config.host} may be served as configured")


def _ports(config: ProxyConfig) -> CheckResult:
    check_ports_differ(config)
    return ok("ports", "no two servers are given one")


def _proxy_flags(config: ProxyConfig) -> CheckResult:
    from triptych.proxy.media.first_checks import check_proxy_flags

    check_proxy_flags(config)
    return ok("proxy flags", "names, origins, networks and the folder of media can be used")


def _certificate(name: str, files: TlsFiles | None) -> CheckResult:
    from triptych.base.rpc.tls.material import read_material

    if files is None:
        return note(name, "none")
    return certificate_finding(name, read_material(files).not_after, time.time())


def certificate_finding(name: str, not_after: float, now: float) -> CheckResult:
    """A certificate that ends at `not_after`, in seconds since 1970."""
    days = (not_after - now) / 86400
    if days <= 0:
        text = f"the certificate expired {-days:.1f} days ago"
        return fail(name, text, "replace its files: they are read again")
    if days < SOON_DAYS:
        return note(name, f"the certificate expires in {days:.1f} days", "see why it is not renewed")
    return ok(name, f"the certificate is valid for {days:.0f} days")


def _attempt(check: str, find: Callable[[], CheckResult]) -> list[CheckResult]:
    """The finding, or the failure that a ConfigError tells: it names the flag and the remedy."""
    try:
        return [find()]
    except ConfigError as error:
        return [fail_of(check, error)]
