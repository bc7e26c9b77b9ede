"""How a machine shares its cores: what a wake-up waits for where all compute, and what niceness weighs."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from triptych.simulator.costs.costs import CoreCosts

NICE = 10
#: Cores that are measured: more are not shared otherwise.
_CORES = 2
_PAUSE = 0.003
_WAIT = 20.0

#: Seconds of work between two waits, as an event loop does for a message: who does none is woken faster.
_WORK = 0.0005
_SPIN = "while True: pass"
#: Answers every byte.
_ECHO = f"""
import os, time
while os.read(0, 1):
    begun = time.thread_time()
    while time.thread_time() - begun < {_WORK}: pass
    os.write(1, b"x")
"""


def core_costs(seconds: float) -> CoreCosts:
    """Takes about `seconds`. ConfigError is never raised: a machine that cannot tell has costs of 0 and 1."""
    cores = sorted(os.sched_getaffinity(0))[:_CORES]
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        with _processes([_ECHO]) as (echo,):
            free = _trip(echo, seconds / 4)
        with _processes([_ECHO, *[_SPIN] * (len(cores) + 1)]) as (echo, *_):
            taken = _trip(echo, seconds / 2)
        os.sched_setaffinity(0, cores[:1])
        weight = _nice_weight(seconds / 4)
    finally:
        os.sched_setaffinity(0, before)
    # There and back: two threads are woken.
    return CoreCosts(wake=max(0.0, taken - free) / 2, nice_weight=weight)


def _trip(echo: subprocess.Popen[bytes], seconds: float) -> float:
    """Mean seconds until a byte has come back."""
    assert echo.stdin is not None and echo.stdout is not None
    found: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(found) < 5:
        time.sleep(_PAUSE)
        begun = time.thread_time()
        while time.thread_time() - begun < _WORK:
            pass
        began = time.perf_counter()
        os.write(echo.stdin.fileno(), b"x")
        os.read(echo.stdout.fileno(), 1)
        found.append(time.perf_counter() - began)
    return statistics.fmean(found)


def _nice_weight(seconds: float) -> float:
    """CPU time of a nice process as a share of another's on the same core; at most 1."""
    with _processes([_SPIN, _SPIN]) as (plain, nice):
        os.setpriority(os.PRIO_PROCESS, nice.pid, NICE)
        before = _cpu(plain.pid), _cpu(nice.pid)
        time.sleep(seconds)
        used = [_cpu(p.pid) - then for p, then in zip((plain, nice), before, strict=True)]
    return min(1.0, used[1] / used[0]) if used[0] > 0 else 1.0


def _cpu(pid: int) -> float:
    """CPU seconds of a process of one thread so far."""
    with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
        return int(file.read().split()[0]) / 1e9


@contextlib.contextmanager
def _processes(programs: Sequence[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Python processes, each in a session of its own as workers are."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for program in programs:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-S", "-c", program],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,
                )
            )
        yield started
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait(_WAIT)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
