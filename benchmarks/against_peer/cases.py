"""Triptych and vLLM where the encoder apart is to pay: failures, pictures shown again, text beside pictures.

    python -m benchmarks.against_peer.cases PEER --results DIR [--rounds 3] [--parts again,mixed] [--write]

PEER is the kit of `against_peer`. A part appends to its file in DIR and measures what is not in it yet;
without PEER the page is made of DIR. PYTHONPATH may name a folder with scikit-image, for photographs.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from benchmarks.against_peer import failures
from benchmarks.against_peer.loads import turn
from benchmarks.against_peer.rounds import matrix_of
from benchmarks.against_peer.trials import (
    CONTENT,
    RIGHT,
    Clients,
    Trial,
    body,
    keep,
    kept,
    medians,
    systems,
    totals,
)
from benchmarks.baselines.matrix import Matrix, System
from benchmarks.baselines.measure import target_of, warm_up
from benchmarks.baselines.servers import Server, ServerPool, machine_time, others_share
from benchmarks.baselines.tables import spread, table
from benchmarks.result_page import RESULTS, add_write_flag, fill, publish
from triptych.base.errors import ConfigError
from triptych.goodput.load.workload import Arrivals, Picture
from triptych.goodput.measure.figures import percentile
from triptych.goodput.measure.slo import preset
from triptych.goodput.measure.window import RunSettings
from triptych.goodput.report.display import Display
from triptych.goodput.run import Bench, ready

PAGE = RESULTS / "peer_cases.md"
SYSTEMS = ("triptych", "replicas", "vllm-epd")

#: Pictures of a round that are shown again; how many are asked of at once, and their pixels.
PICTURES, AT_ONCE, SIZE = 32, 4, (1024, 768)
SHOWINGS = ("first", "again")
REPLICATED = ("triptych", "replicas")

#: Requests per second, and seconds of a window.
RATES, SECONDS = (4.0, 8.0, 12.0), 30.0
LOAD = "mix"
WORKLOAD = replace(preset(LOAD).workload, content=CONTENT, sizes=((*failures.SIZE, 1.0),))
_RATIOS = (("triptych", "replicas"), ("triptych", "vllm-epd"))


class Window(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One system's window of text and pictures at a rate. Milliseconds; `others`: cores that others used."""

    system: str
    rate: float
    number: int
    sent: int
    failed: int
    goodput: float
    attained: float
    ttft_p99: float
    text_tpot_p99: float
    others: float


class Run:
    """One run: its systems' servers stay up, those that can be are stopped while they are not asked."""

    def __init__(self, options: argparse.Namespace, display: Display) -> None:
        self.matrix: Matrix = matrix_of("tiny", options.peer.resolve())
        self.systems: dict[str, System] = systems(self.matrix)
        self.names: list[str] = options.systems.split(",")
        for name in self.names:
            if name not in self.systems:
                raise ConfigError(f"--systems {name!r} is not known: use some of {', '.join(SYSTEMS)}")
        self.rounds: int = options.rounds
        self.seconds: float = options.seconds
        self.folder: Path = options.results
        self.display = display
        self._pool = ServerPool(self.matrix.model, lambda _system, server: warm_up(server, display))

    @contextlib.contextmanager
    def serving(self, name: str) -> Iterator[Server]:
        server = self._pool.get(self.systems[name])
        try:
            yield server
        finally:
            self._pool.pause(self.systems[name])

    def close(self) -> None:
        self._pool.close()


def measure_failures(run: Run) -> None:
    file = run.folder / "failures.jsonl"
    done = kept(file, Trial)
    failures.measure(
        run.matrix, run.systems, run.names, run.rounds, done, lambda found: keep(file, found), run.display
    )


def measure_again(run: Run) -> None:
    """Every picture twice, with another question before it, so that only embeddings can be found again."""
    file = run.folder / "again.jsonl"
    there = {(trial.system, trial.number) for trial in kept(file, Trial) if trial.case == SHOWINGS[1]}
    for number in range(run.rounds):
        names = [name for name in turn(REPLICATED, number) if name in run.names]
        for name in [*names, RIGHT]:
            if (name, number) not in there:
                with run.serving("triptych" if name == RIGHT else name) as server:
                    for found in _showings(run, server, name, number):
                        keep(file, found)


def _showings(run: Run, server: Server, name: str, number: int) -> list[Trial]:
    found = []
    for turn_, case in enumerate(SHOWINGS):
        requests = [
            body(
                (2 * number + turn_) * PICTURES + index,
                Picture(500_000 + number * PICTURES + index, *SIZE, CONTENT),
                model=run.matrix.model if name == "replicas" else "",
                salt=f"{RIGHT}-{case}" if name == RIGHT else "",
                question_first=True,
            )
            for index in range(PICTURES)
        ]
        before = _embeddings(server)
        trial = Clients(server, requests, AT_ONCE, first=turn_).trial(name, case, number, run.display)
        reused, shown = (after - earlier for after, earlier in zip(_embeddings(server), before, strict=True))
        found.append(msgspec.structs.replace(trial, reused=reused, shown=shown))
    return found


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
                found = (
                    sample.labels.get("result") in ("pd", "store") and sample.name == "triptych_items_total"
                )
                if found or sample.name == "vllm:mm_cache_hits_total":
                    reused += sample.value
    return reused, shown


def again_section(trials: Sequence[Trial]) -> list[str]:
    rows = []
    for case in SHOWINGS:
        for system in REPLICATED:
            of = [trial for trial in trials if (trial.system, trial.case) == (system, case)]
            if of:
                share = spread([100 * trial.reused / trial.shown for trial in of if trial.shown])
                ttft = medians([[1e3 * ttft for ttft in trial.ttfts] for trial in of])
                rows.append([case, system, share, ttft, *totals(of, trials)])
    head = ["showing", "system", "not encoded, %", "median TTFT, ms", "requests", "failed", "other tokens"]
    return table([*head, "answers/s"], rows, (0, 1))


def measure_mixed(run: Run) -> None:
    file = run.folder / "mixed.jsonl"
    there = {(window.system, window.rate, window.number) for window in kept(file, Window)}
    for number in range(run.rounds):
        for rate in RATES:
            for name in turn(run.names, number):
                if (name, rate, number) not in there:
                    keep(file, _window(run, name, rate, number))


def _window(run: Run, name: str, rate: float, number: int) -> Window:
    with run.serving(name) as server:
        settings = RunSettings(
            target_of(server.url),
            WORKLOAD,
            LOAD,
            run.matrix.slo(LOAD),
            Arrivals(rate=rate),
            seconds=run.seconds,
        )
        settings = ready(settings)
        before = machine_time()
        window = Bench(settings, run.display).window(settings, 1 + 1000 * number + round(10 * rate))
        others = others_share(before, machine_time())
    figures = window.figures
    texts = [r.tpot for r in window.report.records if r.ok and not r.warm_up and not r.images]
    found = Window(
        system=name,
        rate=rate,
        number=number,
        sent=figures.sent,
        failed=figures.failed,
        goodput=figures.goodput,
        attained=figures.attainment,
        ttft_p99=1e3 * figures.spreads["ttft"].percentiles[2],
        text_tpot_p99=1e3 * percentile(texts, 99),
        others=round(others, 3),
    )
    run.display.say(f"{name} at {rate:g}/s, {number}: goodput {found.goodput:.2f}/s, others {others:.2f}")
    return found


_FIGURES = ("goodput", "ttft_p99", "text_tpot_p99")


def mixed_section(windows: Sequence[Window]) -> list[str]:
    """Figures of every system at every rate, and ratios of the rounds that both have."""
    at = {(window.system, window.rate, window.number): window for window in windows}
    rates = sorted({window.rate for window in windows})
    rows, ratios = [], []
    for rate in rates:
        for system in SYSTEMS:
            of = [window for window in windows if (window.system, window.rate) == (system, rate)]
            cells = [spread([getattr(window, figure) for window in of]) for figure in _FIGURES]
            attained = spread([100 * window.attained for window in of])
            failed = sum(window.failed for window in of)
            if of:
                rows.append([f"{rate:g}", system, cells[0], attained, *cells[1:], str(failed)])
        for ours, theirs in _RATIOS:
            pairs = [
                (at[ours, rate, n], at[theirs, rate, n])
                for s, r, n in at
                if (s, r) == (ours, rate) and (theirs, rate, n) in at
            ]
            cells = [
                spread([getattr(a, figure) / getattr(b, figure) for a, b in pairs if getattr(b, figure)])
                for figure in _FIGURES
            ]
            if pairs:
                ratios.append([f"{rate:g}", f"{ours} / {theirs}", *cells])
    head = [
        "requests/s",
        "system",
        "goodput/s",
        "within both limits, %",
        "P99 TTFT, ms",
        "P99 TPOT of text, ms",
    ]
    others = max((window.others for window in windows), default=0.0)
    return [
        *table([*head, "failed"], rows, (0, 1)),
        "",
        *table(["requests/s", "ratio", "goodput", "P99 TTFT", "P99 TPOT of text"], ratios, (0, 1)),
        "",
        f"Other programs used at most {others:.2f} cores during a window.",
    ]


PARTS: dict[str, Callable[[Run], None]] = {
    "failures": measure_failures,
    "again": measure_again,
    "mixed": measure_mixed,
}


def page(folder: Path) -> str:
    """The page of what is in the folder."""
    faults, again = (kept(folder / f"{name}.jsonl", Trial) for name in ("failures", "again"))
    windows = kept(folder / "mixed.jsonl", Window)
    content = sorted({trial.content for trial in (*faults, *again)})
    rounds = {
        name: len({found.number for found in part})
        for name, part in (("failures", faults), ("again", again), ("mixed", windows))
    }
    return fill(
        "peer_cases",
        rounds=", ".join(f"{name} {count}" for name, count in rounds.items()),
        content=" and ".join(content),
        failures="\n".join(failures.section(faults)),
        again="\n".join(again_section(again)),
        mixed="\n".join(mixed_section(windows)),
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", type=Path, nargs="?", help="folder of the peer kit; none: only the page")
    parser.add_argument("--results", type=Path, required=True, help="folder of what was measured")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="some of them")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a window of the mixed part")
    add_write_flag(parser, PAGE)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    display = Display(Console(soft_wrap=True))
    try:
        if options.peer is not None:
            _measure(options, display)
        text = page(options.results)
    except ConfigError as error:
        display.warn(str(error))
        return 2
    publish(text, PAGE, write=options.write)
    return 0


def _measure(options: argparse.Namespace, display: Display) -> None:
    parts = options.parts.split(",")
    for name in parts:
        if name not in PARTS:
            raise ConfigError(f"--parts {name!r} is not known: use some of {', '.join(PARTS)}")
    run = Run(options, display)
    try:
        for name in parts:
            began = time.monotonic()
            PARTS[name](run)
            display.say(f"part {name}: {(time.monotonic() - began) / 60:.1f} minutes")
    finally:
        run.close()


if __name__ == "__main__":
    raise SystemExit(main())
