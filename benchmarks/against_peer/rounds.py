"""Rounds of loads and systems, one of which computes at a time; and their command line."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import structs

from benchmarks.against_peer.loads import Load, Turn, decode_step, quiet, seed_of, turn
from benchmarks.baselines.cell import chosen
from benchmarks.baselines.matrix import Matrix, System, read_matrix
from benchmarks.baselines.measure import target_of
from benchmarks.baselines.runner import run_cells, started_pool
from benchmarks.baselines.servers import cpu_seconds, machine_time, others_share
from benchmarks.result_page import page_parser, publish
from benchmarks.targets import record
from triptych.base.errors import ConfigError
from triptych.base.machine.resources import cpu_name
from triptych_bench.goodput.load.workload import Workload
from triptych_bench.goodput.measure.slo import Slo
from triptych_bench.goodput.measure.window import MeasuredWindow, RunSettings
from triptych_bench.goodput.report.display import Display
from triptych_bench.goodput.report.machine import commit
from triptych_bench.goodput.run import Bench, ready

MODELS = ("tiny", "small")
PEER_SYSTEMS = ("vllm", "vllm-epd")
REPLICA_PORTS = ("FIRST", "SECOND")
ROOT = Path(__file__).parents[2]
_BASELINES = ROOT / "benchmarks" / "baselines"
#: Many times what a start takes on a quiet machine: what is started is not what is measured.
_START_SECONDS = 1800.0
#: As much as vLLM is given.
SAME_MEMORY = ("--kv-memory", "2GiB")
_DTYPES = {"tiny": (), "small": ("--dtype", "bfloat16")}
_COLOCATED = {
    "tiny": ("--topology", "colocated", "--replicas", "2", "--threads", "1"),
    "small": ("--topology", "colocated"),
}


def peer_environment(peer: Path) -> dict[str, str]:
    """What the baselines' TOML files need to know of the peer kit's folder."""
    preload = [
        peer / "deb/x/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4",
        peer / "venv/lib/libiomp5.so",
    ]
    return dict(os.environ) | {
        "PEER": str(peer),
        "PEER_PRELOAD": ":".join(str(path) for path in preload if path.exists()),
        "EPD_PROXY": str(peer / "epd_proxy.py"),
    }


def matrix_of(model: str, peer: Path) -> Matrix:
    """The baselines' matrix of the model, whose vLLM systems are used here; ConfigError without a kit."""
    if not (peer / "models" / model / "config.json").exists():
        raise ConfigError(f"{peer} has no models/{model}: give the folder of the peer kit")
    return read_matrix(_BASELINES / f"{model}.toml", peer_environment(peer))


def systems_of(matrix: Matrix, before: Path | None) -> dict[str, System]:
    """All systems by name, those of vLLM that the matrix has; `before` only with a checkout of it."""
    result = {
        system.name: structs.replace(system, timeout=_START_SECONDS)
        for system in matrix.system
        if system.name in PEER_SYSTEMS
    }
    result["triptych"] = triptych(matrix.name, "triptych", ROOT)
    result["colocated"] = triptych(matrix.name, "colocated", ROOT, _COLOCATED[matrix.name])
    if before is not None:
        if not (before / "triptych").is_dir():
            raise ConfigError(f"--before {before} is no checkout of Triptych")
        result["before"] = triptych(matrix.name, "before", before.resolve())
    return result


def triptych(model: str, name: str, tree: Path, words: tuple[str, ...] = ()) -> System:
    """`triptych serve` of the code in `tree`, with its defaults besides dtype, KV memory and `words`."""
    command = [sys.executable, "-m", "triptych.apps.cli", "serve", "${MODEL}", "--port", "${PORT}"]
    command += ["--grpc-port", "${GRPC_PORT}", "--run-dir", "${SCRATCH}/run", "--log-level", "warning"]
    return System(
        name=name,
        commands=((*command, *SAME_MEMORY, *_DTYPES[model], *words),),
        url="http://127.0.0.1:${PORT}",
        ports=("PORT", "GRPC_PORT"),
        ready=("/ready",),
        # Without the second one the folder that this runs in would come before the first.
        env={"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"},
        timeout=_START_SECONDS,
    )


def vllm_server(
    vllm: System, port: str, cores: str, words: Sequence[str] = (), **environment: str
) -> tuple[str, ...]:
    """The command of `vllm` at the port with this name, on `cores`, with memory for several at a time."""
    values = vllm.env | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores} | environment
    own = [word.replace("${PORT}", f"${{{port}}}") for word in vllm.commands[0]]
    return ("env", *(f"{name}={value}" for name, value in values.items()), *own, *words)


def vllm_replicas(vllm: System) -> System:
    """Two servers like `vllm` on a core each, which take requests in turn."""
    urls = [f"http://127.0.0.1:${{{port}}}" for port in REPLICA_PORTS]
    return System(
        name="replicas",
        commands=tuple(vllm_server(vllm, port, str(core)) for core, port in enumerate(REPLICA_PORTS)),
        url=",".join(urls),
        ports=REPLICA_PORTS,
        ready=tuple(f"{url}/health" for url in urls),
        timeout=_START_SECONDS,
        pause=True,
    )


def commit_of(system: System) -> str:
    """The commit of the tree that the system runs from; empty for vLLM."""
    tree = system.env.get("PYTHONPATH", "")
    return commit(Path(tree)) if tree else ""


def keep(file: Path, record: msgspec.Struct) -> None:
    """Appends it to the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as out:
        out.write(msgspec.json.encode(record) + b"\n")


_Record = TypeVar("_Record", bound=msgspec.Struct)


def kept(files: Iterable[Path], kind: type[_Record]) -> list[_Record]:
    """All records that runs have appended; ConfigError for a line that is not a record."""
    lines = [line for file in files if file.exists() for line in file.read_bytes().splitlines()]
    try:
        return [msgspec.json.decode(line, type=kind) for line in lines]
    except msgspec.DecodeError as error:
        raise ConfigError(f"--results holds something else than {kind.__name__}: {error}") from error


class Rounds:
    """Measures loads in turns and appends every turn to the results as soon as it is done.

    `known` are all systems by name, `workloads` those that loads name, `options` those of `turns_parser`.
    ConfigError for a system that is not known.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        display: Display,
        matrix: Matrix,
        known: Mapping[str, System],
        workloads: Mapping[str, Workload],
    ) -> None:
        names = options.systems.split(",")
        for name in names:
            if name not in known:
                raise ConfigError(f"--systems {name!r} is not known: use some of {', '.join(known)}")
        self._matrix = matrix
        self._systems = {name: known[name] for name in names}
        self._commits = {name: commit_of(system) for name, system in self._systems.items()}
        self._workloads = workloads
        self._options = options
        self._display = display
        self._file = options.results / f"{matrix.name}.jsonl"
        self._known: dict[str, RunSettings] = {}
        self._pool = started_pool(matrix, display)

    def run(self, loads: Sequence[Load]) -> bool:
        """Those of the loads that `--only` chooses: whether everything was measured.

        Round by round: cut off anywhere, all loads are equally far.
        """
        asked = chosen({load.name: load for load in loads}, self._options.only)
        first = self._options.first
        cells = [
            (load, name, number)
            for number in range(first, first + self._options.rounds)
            for load in asked
            for name in turn(list(self._systems), number)
        ]
        with contextlib.closing(self._pool):
            for system in self._systems.values():
                self._pool.get(system)
                self._pool.pause(system)
            return run_cells(
                self._pool,
                cells,
                lambda cell: self._measure(*cell),
                lambda cell: self._systems[cell[1]],
                self._display,
                minutes=self._options.minutes,
            )

    def _measure(self, load: Load, name: str, number: int) -> None:
        result = self._turn(load, name, number)
        keep(self._file, result)
        self._tell(result)

    def _turn(self, load: Load, name: str, number: int) -> Turn:
        server = self._pool.get(self._systems[name])
        if name == "vllm-epd":
            server.empty_scratch()
        seed = seed_of(self._matrix.name, load, number)
        settings = self._ready(load, name, server.url, seed)
        before, cpu = machine_time(), cpu_seconds(server)
        window = Bench(settings, self._display).window(settings, seed)
        if not server.alive():
            raise ConfigError(f"{name} died on {load.name}:\n{server.log_tail()}")
        others = others_share(before, machine_time())
        cpu_each = (cpu_seconds(server) - cpu) / len(window.report.records)
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
            chip=cpu_name(),
            requests=figures.sent,
            failed=figures.failed,
            others=round(others, 3),
            req_s=figures.throughput,
            ttft_ms=figures.spreads["ttft"].mean * 1e3,
            tpot_ms=figures.spreads["tpot"].mean * 1e3,
            cpu_s=cpu,
            step_ms=None if step is None else step * 1e3,
        )

    def _tell(self, result: Turn) -> None:
        step = "" if result.step_ms is None else f", step {result.step_ms:.1f}"
        self._display.say(
            f"{result.model} {result.load} {result.number} {result.system}: {result.req_s:.3g} req/s, "
            f"TTFT {result.ttft_ms:.0f} ms, TPOT {result.tpot_ms:.1f} ms{step}, CPU {result.cpu_s:.2f} s, "
            f"{result.failed} failed, others {result.others:.2f}"
        )


def peer_parser(doc: str | None, page: Path, systems: str) -> argparse.ArgumentParser:
    """A parser with these default `systems`."""
    result = page_parser(doc, page, rounds=3)
    result.add_argument("peer", type=Path, nargs="?", help="folder of the peer kit; none: only the page")
    result.add_argument("--results", type=Path, required=True, help="folder of what is measured")
    result.add_argument("--systems", default=systems, help="names; one that is not known shows all")
    return result


def turns_parser(doc: str | None, page: Path, *, model: str, systems: str) -> argparse.ArgumentParser:
    """A parser for rounds of loads with this default `model`."""
    result = peer_parser(doc, page, systems)
    result.add_argument("--model", choices=MODELS, default=model)
    result.add_argument("--only", action="append", default=[], help="pattern of loads; again for more")
    result.add_argument("--first", type=int, default=0, help="number of the first round")
    result.add_argument("--waves", type=int, default=2, help="measured requests by concurrency")
    result.add_argument("--minutes", type=float, default=0.0, help="begin nothing after these")
    return result


def publish_turns(
    options: argparse.Namespace,
    page: Callable[[Sequence[Turn]], str],
    reached: Callable[[Sequence[Turn]], Mapping[str, Mapping[str, float]]],
    result: Path,
) -> bool:
    """The page of all turns that are kept, and with --write the targets they answer."""
    turns = kept(sorted(options.results.glob("*.jsonl")), Turn)
    publish(page(turns), result, write=options.write)
    if options.write:
        ours = [turn for turn in quiet(turns) if turn.commit and turn.system != "before"]
        commits = ", ".join(sorted({turn.commit for turn in ours}))
        for name, figures in reached(turns).items():
            record(name, figures, result, made_at=commits, date=max(turn.date for turn in ours)[:10])
    return True
