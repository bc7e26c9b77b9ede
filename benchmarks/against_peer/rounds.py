"""The loop over loads, rounds and systems; one system computes at a time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from benchmarks.against_peer.figures import Turn, decode_step
from benchmarks.against_peer.loads import Load, seed_of, turn
from benchmarks.against_peer.systems import commit_of
from benchmarks.baselines.machine_lock import machine_lock
from benchmarks.baselines.matrix import Matrix, System
from benchmarks.baselines.measure import target_of, warm_up
from benchmarks.baselines.processes import machine_time, others_share, usages
from benchmarks.baselines.servers import Server, ServerPool
from triptych.errors import ConfigError
from triptych.goodput.load.workload import Workload
from triptych.goodput.measure.settings import RunSettings
from triptych.goodput.measure.slo import Slo
from triptych.goodput.measure.window import MeasuredWindow
from triptych.goodput.report.display import Display
from triptych.goodput.report.machine import chip
from triptych.goodput.run import Bench, ready


@dataclass(frozen=True, slots=True)
class Options:
    """`rounds` are counted from `first`, each of `waves` times the concurrency; `minutes` 0: no limit."""

    rounds: int = 3
    first: int = 0
    waves: int = 2
    minutes: float = 0.0
    lock: Path | None = None


def turns_file(results: Path, model: str) -> Path:
    return results / f"{model}.jsonl"


def read_turns(results: Path) -> list[Turn]:
    """What all runs have left in the folder; ConfigError for a line that is none."""
    lines = [line for path in sorted(results.glob("*.jsonl")) for line in path.read_text().splitlines()]
    try:
        return [msgspec.json.decode(line, type=Turn) for line in lines]
    except msgspec.DecodeError as error:
        raise ConfigError(f"--results {results} holds something else than turns: {error}") from error


class Rounds:
    """Measures loads in turns and appends every turn to the results as soon as it is done.

    `workloads` are those that loads name.
    """

    def __init__(
        self,
        matrix: Matrix,
        systems: Sequence[System],
        workloads: Mapping[str, Workload],
        results: Path,
        options: Options,
        display: Display,
    ) -> None:
        self._matrix = matrix
        self._systems = {system.name: system for system in systems}
        self._commits = {system.name: commit_of(system) for system in systems}
        self._workloads = workloads
        self._options = options
        self._display = display
        self._file = turns_file(results, matrix.name)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._known: dict[str, RunSettings] = {}
        self._pool = ServerPool(matrix.model, lambda _system, server: warm_up(server, display))
        self._began = time.monotonic()

    def run(self, loads: Sequence[Load]) -> bool:
        """Whether everything was measured. Round by round: cut off anywhere, all loads are equally far."""
        try:
            for name, system in self._systems.items():
                seconds = self._pool.get(system).seconds_to_ready
                self._pool.pause(system)
                self._display.say(f"{name}: ready after {seconds:.1f} s")
            parts = [(load, number) for number in range(self._options.rounds) for load in loads]
            with self._display.step("all rounds", len(parts), "loads") as rounds:
                for load, number in parts:
                    if not self._round(load, self._options.first + number):
                        return False
                    rounds.advance()
            return True
        finally:
            self._pool.close()

    def _round(self, load: Load, number: int) -> bool:
        limit = self._options.minutes * 60
        if limit and time.monotonic() - self._began > limit:
            self._display.warn(f"{load.name}, round {number}: no time left")
            return False
        with machine_lock(self._options.lock):
            for name in turn(list(self._systems), number):
                found = self._turn(load, name, number)
                with self._file.open("ab") as file:
                    file.write(msgspec.json.encode(found) + b"\n")
                self._tell(found)
        return True

    def _turn(self, load: Load, name: str, number: int) -> Turn:
        system = self._systems[name]
        server = self._pool.get(system)
        if name == "vllm-epd":
            server.empty_scratch()
        seed = seed_of(self._matrix.name, load, number)
        settings = self._ready(load, name, server.url, seed)
        before, cpu = machine_time(), _cpu(server)
        try:
            window = Bench(settings, self._display).window(settings, seed)
        finally:
            self._pool.pause(system)
        if not server.alive():
            raise ConfigError(f"{name} died on {load.name}:\n{server.log_tail()}")
        others = others_share(before, machine_time())
        cpu_each = (_cpu(server) - cpu) / len(window.report.records)
        return self._found(window, load, name, number, others, cpu_each)

    def _ready(self, load: Load, name: str, url: str, seed: int) -> RunSettings:
        """A system is asked once for its model and its tokenizer's words per token."""
        settings = RunSettings(
            target=target_of(url),
            workload=self._workloads[load.workload],
            workload_name=load.workload,
            slo=Slo(()),
            concurrency=load.at_once,
            requests=load.requests(self._options.waves),
            seed=seed,
        )
        if name not in self._known:
            self._known[name] = ready(settings)
        known = self._known[name]
        return replace(settings, target=known.target, words_per_token=known.words_per_token)

    def _found(
        self, window: MeasuredWindow, load: Load, name: str, number: int, others: float, cpu: float
    ) -> Turn:
        figures = window.figures
        step = decode_step(window.report.records, load.at_once)
        return Turn(
            model=self._matrix.name,
            load=load.name,
            system=name,
            number=number,
            seed=window.seed,
            date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
            commit=self._commits[name],
            chip=chip(),
            requests=figures.sent,
            failed=figures.failed,
            others=round(others, 3),
            req_s=figures.throughput,
            ttft_ms=figures.spreads["ttft"].mean * 1e3,
            tpot_ms=figures.spreads["tpot"].mean * 1e3,
            cpu_s=cpu,
            step_ms=None if step is None else step * 1e3,
        )

    def _tell(self, found: Turn) -> None:
        step = "" if found.step_ms is None else f", step {found.step_ms:.1f}"
        self._display.say(
            f"{found.model} {found.load} {found.number} {found.system}: {found.req_s:.3g} req/s, "
            f"TTFT {found.ttft_ms:.0f} ms, TPOT {found.tpot_ms:.1f} ms{step}, CPU {found.cpu_s:.2f} s, "
            f"{found.failed} failed, others {found.others:.2f}"
        )


def _cpu(server: Server) -> float:
    """CPU seconds of all its processes so far."""
    return sum(usage.cpu for usage in usages(server.pids).values())
