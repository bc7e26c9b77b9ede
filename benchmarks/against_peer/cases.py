"""Triptych and vLLM where the encoder apart is to pay: failures, pictures shown again, text beside pictures.

    python -m benchmarks.against_peer.cases PEER --results DIR [--rounds 3] [--parts again,mixed]
    python -m benchmarks.against_peer.cases --results DIR --write

PEER is the kit of `against_peer`. A part appends to its file in DIR and measures what is not in it yet;
without PEER the page is made of DIR. Needs scikit-image, for photographs.
"""

from __future__ import annotations

import argparse
import statistics
import time
import urllib.request
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.against_peer import failures
from benchmarks.against_peer.loads import turn
from benchmarks.against_peer.rounds import SAME_MEMORY, keep, kept, matrix_of, peer_parser
from benchmarks.against_peer.trials import (
    CONTENT,
    ONE_THREAD,
    RIGHT,
    Clients,
    Run,
    Trial,
    body,
    systems,
    totals,
)
from benchmarks.baselines.cell import CellFiles, plan_cells, read_folder
from benchmarks.baselines.cell_results import CellResults
from benchmarks.baselines.matrix import Cells, Fixed, System
from benchmarks.baselines.runner import MatrixRun, run_cells, run_command, started_pool
from benchmarks.baselines.servers import Server
from benchmarks.result_page import RESULTS, fill, publish, spread, table
from triptych.base.errors import ConfigError
from triptych_bench.goodput.load.workload import Picture
from triptych_bench.goodput.report.display import Display

PAGE = RESULTS / "peer_cases.md"
SYSTEMS = ("triptych", "replicas", "vllm-epd")

#: Pictures of a round that are shown again; how many are asked of at once, and their pixels.
PICTURES, AT_ONCE, SIZE = 32, 4, (1024, 768)
SHOWINGS = ("first", "again")
REPLICATED = ("triptych", "replicas")

#: Requests per second.
RATES = (4, 8, 12)
LOAD = "mix-photos"
_RATIOS = (("triptych", "replicas"), ("triptych", "vllm-epd"))
_FIGURES = ("good", "attainment", "ttft", "text_tpot")


def measure_again(run: Run) -> None:
    """Every picture twice, with another question before it, so that only embeddings can be found again."""
    file = run.folder / "again.jsonl"
    there = {(trial.system, trial.number) for trial in kept([file], Trial) if trial.case == SHOWINGS[1]}
    names = [name for name in REPLICATED if name in run.names]
    left = [
        (name, number)
        for number in range(run.rounds)
        for name in [*turn(names, number), RIGHT]
        if (name, number) not in there
    ]
    pool = started_pool(run.matrix, run.display)

    def system_of(cell: tuple[str, int]) -> System:
        return run.systems["triptych" if cell[0] == RIGHT else cell[0]]

    def measure(cell: tuple[str, int]) -> None:
        for result in _showings(run, pool.get(system_of(cell)), *cell):
            keep(file, result)

    run_cells(pool, left, measure, system_of, run.display)


def _showings(run: Run, server: Server, name: str, number: int) -> list[Trial]:
    result = []
    model = run.matrix.model if name == "replicas" else ""
    for second, case in enumerate(SHOWINGS):
        salt = f"{RIGHT}-{case}" if name == RIGHT else ""
        requests = []
        for index in range(PICTURES):
            shown = Picture(500_000 + number * PICTURES + index, *SIZE, CONTENT)
            question = (2 * number + second) * PICTURES + index
            requests.append(body(question, shown, model=model, salt=salt, question_first=True))
        before = _embeddings(server)
        trial = Clients(server, requests, AT_ONCE, first=second).trial(name, case, number, run.display)
        reused, all_ = (after - earlier for after, earlier in zip(_embeddings(server), before, strict=True))
        result.append(structs.replace(trial, reused=reused, shown=all_))
    return result


def _embeddings(server: Server) -> tuple[float, float]:
    """Pictures that were found in a cache so far, and all, as the system's own metrics count them.

    vLLM counts what its cache of processed pictures knows: at least those that it does not encode again.
    """
    reused = shown = 0.0
    for url in server.url.split(","):
        with urllib.request.urlopen(f"{url}/metrics", timeout=10.0) as reply:
            page = reply.read().decode()
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name in ("triptych_items_total", "vllm:mm_cache_queries_total"):
                    shown += sample.value
                ours = sample.name == "triptych_items_total" and sample.labels["result"] in ("pd", "store")
                if ours or sample.name == "vllm:mm_cache_hits_total":
                    reused += sample.value
    return reused, shown


def again_section(trials: Sequence[Trial]) -> list[str]:
    rows = []
    for case in SHOWINGS:
        for system in REPLICATED:
            of = [trial for trial in trials if (trial.system, trial.case) == (system, case)]
            if of:
                share = spread([100 * trial.reused / trial.shown for trial in of if trial.shown])
                ttft = spread([1e3 * statistics.median(trial.ttfts) for trial in of if trial.ttfts])
                rows.append([case, system, share, ttft, *totals(of, trials)])
    head = ["showing", "system", "not encoded, %", "median TTFT, ms", "requests", "failed", "other tokens"]
    return table([*head, "answers/s"], rows, (0, 1))


def measure_mixed(run: Run) -> None:
    # Its folder must not be emptied between cells.
    ours = System("triptych", launch="2E2PD", words=(*SAME_MEMORY, *ONE_THREAD))
    for rate in RATES:
        matrix = structs.replace(
            run.matrix,
            name=f"mixed-{rate}",
            loads={LOAD: run.matrix.loads["mix"]},
            system=tuple(ours if name == ours.name else run.systems[name] for name in run.names),
            cells=(Cells("fixed", (LOAD,), tuple(run.names)),),
            repeats=run.rounds,
            rates={LOAD: float(rate)},
            fixed=Fixed(requests=1 << 20, seconds=run.seconds, warm_up=3.0),
        )
        cells = plan_cells(matrix)
        files = CellFiles(run.folder / "mixed", matrix.name)
        MatrixRun(matrix, cells, files, run.display, retry_failed=True).run(cells)


def mixed_section(measured: Sequence[CellResults]) -> list[str]:
    """Figures of every system at every rate, and ratios of the rounds that both have."""
    rows, ratios, others = [], [], [0.0]
    for results in sorted(measured, key=lambda each: max(each.matrix["rates"].values())):
        [(load, rate)] = results.matrix["rates"].items()
        others += [result["others_share"] for result in results.cells]
        for system in results.measured_systems("fixed", load):
            cells = [spread([*results.values(name, load, system).values()]) for name in _FIGURES]
            rows.append([f"{rate:g}", system, *cells, f"{100 * results.failed_share(load, system):.1f}"])
        for ours, theirs in _RATIOS:
            result = [results.ratio(name, load, theirs, ours) for name in _FIGURES]
            ranges = ["–" if each is None else spread([each.ratio, each.low, each.high]) for each in result]
            if any(result):
                ratios.append([f"{rate:g}", f"{ours} / {theirs}", *ranges])
    head = ["goodput/s", "within both limits, %", "P99 TTFT, ms", "P99 TPOT of text, ms"]
    return [
        *table(["requests/s", "system", *head, "failed, %"], rows, (0, 1)),
        "",
        *table(["requests/s", "ratio", *head], ratios, (0, 1)),
        "",
        f"Other programs used at most {max(others):.2f} cores during a window.",
    ]


PARTS = {"failures": failures.measure, "again": measure_again, "mixed": measure_mixed}


def page(folder: Path) -> str:
    """The page of what is in the folder."""
    faults, again = (kept([folder / f"{name}.jsonl"], Trial) for name in ("failures", "again"))
    mixed = (
        [CellResults(*result) for result in read_folder(folder / "mixed")]
        if (folder / "mixed").exists()
        else []
    )
    counts = [len({trial.number for trial in part}) for part in (faults, again)]
    counts.append(max((result["cell"]["repeat"] + 1 for each in mixed for result in each.cells), default=0))
    return fill(
        "peer_cases",
        rounds=", ".join(f"{name} {count}" for name, count in zip(PARTS, counts, strict=True)),
        content=" and ".join(sorted({trial.content for trial in (*faults, *again)})) or LOAD,
        failures="\n".join(failures.section(faults)),
        again="\n".join(again_section(again)),
        mixed="\n".join(mixed_section(mixed)),
    )


def main(arguments: list[str] | None = None) -> int:
    parser = peer_parser(__doc__, PAGE, ",".join(SYSTEMS))
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them")
    parser.add_argument("--seconds", type=float, default=30.0, help="of sending in a window of mixed")
    options = parser.parse_args(arguments)
    return run_command(partial(_measure, options))


def _measure(options: argparse.Namespace, display: Display) -> bool:
    if options.peer is None:
        publish(page(options.results), PAGE, write=options.write)
        return True
    matrix = matrix_of("tiny", options.peer.resolve())
    names, parts = options.systems.split(","), options.parts.split(",")
    for flag, words, known in (("--systems", names, SYSTEMS), ("--parts", parts, tuple(PARTS))):
        if not set(words) <= set(known):
            raise ConfigError(f"{flag} {','.join(words)!r} is not known: use some of {', '.join(known)}")
    run = Run(matrix, systems(matrix), names, options.rounds, options.seconds, options.results, display)
    for name in parts:
        began = time.monotonic()
        PARTS[name](run)
        display.say(f"part {name}: {(time.monotonic() - began) / 60:.1f} minutes")
    return True


if __name__ == "__main__":
    raise SystemExit(main())
