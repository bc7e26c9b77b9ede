"""The systems' servers: started, watched, ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.baselines.matrix import System, expand_system
from triptych.base.errors import ConfigError, TriptychError
from triptych_bench.goodput.launch import answers, free_ports, launched, parse_shape

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
    result, left = [], list(roots)
    while left:
        pid = left.pop()
        if pid not in result:
            result.append(pid)
            left += children.get(pid, [])
    return result


def usages(roots: Iterable[int], memory: bool = False) -> dict[int, ProcessUsage]:
    """By process id; a process that ends meanwhile is left out."""
    result = {}
    for pid in tree(roots):
        fields = _stat(pid)
        if fields is not None:
            cpu = (int(fields[1][11]) + int(fields[1][12])) / _TICKS
            result[pid] = ProcessUsage(fields[0], cpu, _memory_mb(pid) if memory else 0.0)
    return result


def cpu_shares(
    before: Mapping[int, ProcessUsage], after: Mapping[int, ProcessUsage], wall: float
) -> dict[str, float]:
    """CPU seconds per second by process name, equal names apart by a number; a new process counts whole."""
    result: dict[str, float] = {}
    for pid, usage in after.items():
        spent = usage.cpu - (before[pid].cpu if pid in before else 0.0)
        name, number = usage.name, 1
        while name in result:
            number += 1
            name = f"{usage.name} {number}"
        result[name] = spent / max(wall, 1e-9)
    return result


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


_END_SECONDS = 20.0
_TAIL = 2000
_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Server:
    """A system that answers. `seconds_to_ready` from exec on; `command` as it was started."""

    url: str
    pids: tuple[int, ...]
    logs: tuple[Path, ...]
    command: str
    seconds_to_ready: float
    scratch: Path | None = None

    def alive(self) -> bool:
        return all(alive(pid) for pid in self.pids)

    def pause(self) -> None:
        """Stops all processes where they are; `resume` continues them. For servers started by commands."""
        for pid in self.pids:
            _signal(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in self.pids:
            _signal(pid, signal.SIGCONT)

    def log_tail(self) -> str:
        return _tail(self.logs)

    def empty_scratch(self) -> None:
        """What it has left between two cells in the folder that is lent to it."""
        for entry in self.scratch.iterdir() if self.scratch else ():
            shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)


@contextlib.contextmanager
def serving(system: System, model: str) -> Iterator[Server]:
    """ConfigError with the log's tail when it does not answer in time."""
    with _launched(system, model) if system.launch else _commanded(system, model) as server:
        yield server


@contextlib.contextmanager
def _launched(system: System, model: str) -> Iterator[Server]:
    with launched(parse_shape(system.launch), model, system.words, system.timeout) as cluster:
        command = " ".join(["triptych serve", f"({system.launch})", *system.words])
        seconds = cluster.startup["seconds_to_ready"]
        yield Server(cluster.url, (cluster.pid,), (cluster.log,), command, seconds)


@contextlib.contextmanager
def _commanded(system: System, model: str) -> Iterator[Server]:
    """Every command in a process group of its own, which is what is ended."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="triptych-baselines-")))
        memory = _MEMORY if _MEMORY.is_dir() else None
        scratch = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="triptych-scratch-", dir=memory))
        )
        ports = zip(system.ports, map(str, free_ports(len(system.ports))), strict=True)
        values = {"MODEL": model, "SCRATCH": str(scratch), **dict(ports)}
        expanded = expand_system(system, values)
        environment = os.environ | expanded.env
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, processes)
        begun, logs = time.monotonic(), []
        for index, command in enumerate(expanded.commands):
            logs.append(folder / f"log-{index}")
            processes.append(_start(command, environment, logs[-1]))
        _wait_ready(expanded, processes, logs, begun + expanded.timeout)
        yield Server(
            expanded.url,
            tuple(process.pid for process in processes),
            tuple(logs),
            "; ".join(" ".join(command) for command in system.commands),
            time.monotonic() - begun,
            scratch,
        )


def _start(command: tuple[str, ...], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"cannot start {command[0]}: {error.strerror}") from error


def _wait_ready(
    system: System, processes: list[subprocess.Popen[bytes]], logs: list[Path], deadline: float
) -> None:
    pages = [page if "://" in page else f"{system.url.rstrip('/')}{page}" for page in system.ready]
    while time.monotonic() < deadline:
        ended = [process for process in processes if process.poll() is not None]
        if ended:
            raise ConfigError(
                f"system {system.name!r} ended with {ended[0].returncode} before it was ready:\n{_tail(logs)}"
            )
        pages = [page for page in pages if not answers(page)]
        if not pages:
            return
        time.sleep(0.1)
    raise ConfigError(
        f"system {system.name!r}: {pages[0]} does not answer within {system.timeout:g} s:\n{_tail(logs)}"
    )


def _tail(logs: tuple[Path, ...] | list[Path]) -> str:
    texts = [path.read_text(errors="replace").strip()[-_TAIL:] for path in logs if path.exists()]
    return "\n---\n".join(text for text in texts if text)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Last started, first ended; what a group leaves behind is killed by its number."""
    for process in reversed(processes):
        _signal(process.pid, signal.SIGTERM)
        # A stopped process gets SIGTERM only once it continues.
        _signal(process.pid, signal.SIGCONT)
    deadline = time.monotonic() + _END_SECONDS
    for process in reversed(processes):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline - time.monotonic(), 0.1))
        _signal(process.pid, signal.SIGKILL)
        process.wait()


def _signal(group: int, number: signal.Signals) -> None:
    # The group outlives its leader as long as one of its processes does.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


class ServerPool:
    """Servers that stay up between cells. `after_start` is called with every server that has been started."""

    def __init__(self, model: str, after_start: Callable[[System, Server], None]) -> None:
        self._model = model
        self._after_start = after_start
        self._running: dict[str, tuple[Server, contextlib.ExitStack]] = {}

    def get(self, system: System) -> Server:
        """Running and ready; a dead one is started again, a paused one goes on."""
        if system.name in self._running and not self._running[system.name][0].alive():
            self.end(system.name)
        if system.name not in self._running:
            with contextlib.ExitStack() as stack:
                server = stack.enter_context(serving(system, self._model))
                try:
                    self._after_start(system, server)
                except TriptychError as error:
                    raise ConfigError(f"system {system.name!r}: {error}\n{server.log_tail()}") from error
                self._running[system.name] = (server, stack.pop_all())
        server = self._running[system.name][0]
        if system.pause:
            server.resume()
        return server

    def pause(self, system: System) -> None:
        """After a cell: one that is to be paused is."""
        if system.pause and system.name in self._running:
            self._running[system.name][0].pause()

    def end(self, name: str) -> None:
        if name in self._running:
            self._running.pop(name)[1].close()

    def close(self) -> None:
        for name in list(self._running):
            self.end(name)


def cpu_seconds(server: Server) -> float:
    """Of all its processes so far."""
    return sum(usage.cpu for usage in usages(server.pids).values())
