"""Failures: in the middle of a run an encoder, a decoding server or all embeddings are lost.

Half of the requests are text, half show a photograph. Nobody restarts vLLM's processes meanwhile, Triptych's
supervisor restarts its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import redis

from benchmarks.against_peer.loads import turn
from benchmarks.against_peer.rounds import keep, kept
from benchmarks.against_peer.trials import CONTENT, RIGHT, Clients, Run, Trial, body, totals
from benchmarks.baselines.servers import Server, serving
from benchmarks.result_page import table
from triptych_bench.goodput.load.workload import Picture

REQUESTS, AT_ONCE = 64, 8
#: Answers before something fails.
BEFORE_FAULT = 16
#: Multiples of the model's 32 pixels: nobody has to resize.
SIZE = (448, 320)


@dataclass(frozen=True, slots=True)
class Fault:
    """`act` breaks it in a running server. `deadly`: of a system that has to be started again after it."""

    name: str
    act: Callable[[Server], None] = lambda _server: None
    deadly: bool = True


def _kill(index: int) -> Callable[[Server], None]:
    """The process group of a system's command."""
    return lambda server: os.killpg(server.pids[index], signal.SIGKILL)


def _cluster(server: Server) -> dict[str, object]:
    assert server.scratch is not None
    return dict(json.loads((server.scratch / "run" / "cluster.json").read_text()))


def _kill_worker(name: str) -> Callable[[Server], None]:
    def act(server: Server) -> None:
        processes = _cluster(server)["processes"]
        assert isinstance(processes, dict)
        os.kill(int(processes[name]), signal.SIGKILL)

    return act


def _flush(server: Server) -> None:
    with redis.Redis.from_url(str(_cluster(server)["store"]), socket_timeout=10.0) as store:
        store.flushall()


NOTHING = Fault("nothing", deadly=False)
ENCODER, DECODER, CACHE = "encoder killed", "server that decodes killed", "embeddings lost"
FAULTS: dict[str, tuple[Fault, ...]] = {
    "triptych": (
        NOTHING,
        Fault(CACHE, _flush, deadly=False),
        Fault(ENCODER, _kill_worker("encoder-0"), deadly=False),
        Fault(DECODER, _kill_worker("pd-0"), deadly=False),
    ),
    "replicas": (NOTHING, Fault(DECODER, _kill(0))),
    "vllm-epd": (NOTHING, Fault(CACHE, Server.empty_scratch), Fault(ENCODER, _kill(0))),
    RIGHT: tuple(Fault(name, deadly=False) for name in (NOTHING.name, CACHE, ENCODER, DECODER)),
}
_NAMES = tuple(fault.name for fault in FAULTS[RIGHT])


def _bodies(model: str, seed: int, salt: str) -> list[bytes]:
    """The requests of a run; those of another seed share nothing with them."""
    seeds = range(seed * REQUESTS, (seed + 1) * REQUESTS)
    pictures = [Picture(own, *SIZE, CONTENT) if own % 2 else None for own in seeds]
    return [body(own, shown, model=model, salt=salt) for own, shown in zip(seeds, pictures, strict=True)]


def measure(run: Run) -> None:
    """What is not kept yet; a server serves until a fault ends it. The right answers come from Triptych."""
    file = run.folder / "failures.jsonl"
    there = {(trial.system, trial.case, trial.number) for trial in kept([file], Trial)}
    for number in range(run.rounds):
        for name in [*turn(run.names, number), RIGHT]:
            system = run.systems["triptych" if name == RIGHT else name]
            with contextlib.ExitStack() as stack:
                server: Server | None = None
                for fault in FAULTS[name]:
                    if (name, fault.name, number) in there:
                        continue
                    if server is None:
                        server = stack.enter_context(serving(system, run.matrix.model))
                        # Its first requests are slow.
                        _trial(run, server, name, NOTHING, number, 900)
                    keep(file, _trial(run, server, name, fault, number, _NAMES.index(fault.name)))
                    if fault.deadly:
                        server = None
                        stack.close()


def _trial(run: Run, server: Server, name: str, fault: Fault, number: int, index: int) -> Trial:
    model = "" if name in ("triptych", RIGHT) else run.matrix.model
    requests = _bodies(model, 10 * number + index, RIGHT if name == RIGHT else "")
    clients = Clients(server, requests, AT_ONCE, at=BEFORE_FAULT, act=fault.act)
    return clients.trial(name, fault.name, number, run.display)


def section(trials: Sequence[Trial]) -> list[str]:
    """The table of all trials, and what the failures were."""
    rows = []
    for fault in _NAMES:
        for system in FAULTS:
            of = [trial for trial in trials if (trial.system, trial.case) == (system, fault)]
            if of and system != RIGHT:
                middle = statistics.median(statistics.median(trial.latencies) for trial in of)
                worst = max(max(trial.latencies) for trial in of)
                rows.append([fault, system, *totals(of, trials), f"{middle:.2f}, {worst:.2f}"])
    head = ["what failed", "system", "requests", "failed", "other tokens", "answers/s"]
    reasons = {f"{trial.system}, {trial.case}: {error}" for trial in trials for error in trial.errors[:1]}
    lines = table([*head, "latency, s: median, worst"], rows, (0, 1))
    lines += ["", "The first error of each run, without repeats:", ""]
    return lines + [f"- `{reason}`" for reason in sorted(reasons)]
