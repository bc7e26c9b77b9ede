"""Triptych and vLLM on the same cores, in turns: the same requests, ratios round by round.

    python -m benchmarks against_peer PEER --model small --results DIR [--only 'text*@16'] [--rounds 3]
    python -m benchmarks against_peer --results DIR --write

PEER is a folder with models/tiny and models/small, a virtual environment venv/ that has vLLM's CPU build, and
epd_proxy.py, which joins vLLM's encoder and PD instances. Every run appends to DIR; without PEER the page is
made of it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

from benchmarks.against_peer.loads import FIGURES, LOADS, OTHERS_LIMIT, WORKLOADS, Load, Turn, quiet, ratios
from benchmarks.against_peer.rounds import (
    MODELS,
    Rounds,
    matrix_of,
    publish_turns,
    systems_of,
    turns_parser,
)
from benchmarks.baselines.runner import run_command
from benchmarks.result_page import RESULTS, fill, number, spread, table
from triptych_bench.goodput.report.display import Display

_COMMAND = "python -m benchmarks against_peer PEER --results DIR"
_PAIRS = (
    ("triptych", "vllm"),
    ("triptych", "vllm-epd"),
    ("triptych", "colocated"),
    ("triptych", "before"),
    ("before", "vllm"),
    ("vllm-epd", "vllm"),
)


def page(turns: Sequence[Turn]) -> str:
    kept = quiet(turns)
    lines = ["# Against vLLM on the same cores", "", *machine_lines(_COMMAND, kept, len(turns))]
    lines += ["", fill("against_peer")]
    return "\n".join([*lines, *model_tables(kept, LOADS, _PAIRS), ""])


def reached(turns: Sequence[Turn]) -> dict[str, dict[str, float]]:
    """The figures of the targets that these turns answer, by the target's name."""
    result: dict[str, dict[str, float]] = {}
    for model, load in product(MODELS, LOADS):
        targets = (
            (f"vLLM, {model}, {load.name}", "vllm", ("req/s", "TTFT", "TPOT")),
            (f"vLLM's EPD, {model}, {load.name}", "vllm-epd", ("req/s",)),
            (f"engine alone, {model}, {load.name}", "vllm", ("req/s", "TPOT")),
            *_OF_ONE_LOAD.get((model, load.name), ()),
        )
        for name, theirs, figures in targets:
            result[name] = medians(quiet(turns), model, load, ("triptych", theirs), figures)
    return {name: figures for name, figures in result.items() if figures}


#: Targets whose names do not say model and load: name, what ours is compared with, figures.
_OF_ONE_LOAD = {
    ("small", "image@1"): [("EPD by one replica, a request alone", "colocated", ("TTFT",))],
    ("small", "text-450@16"): [("decode step of 16 at context 480, by vLLM's", "vllm", ("step",))],
}
_COLUMNS = dict(zip(("req/s", "TTFT", "TPOT", "step", "CPU"), FIGURES, strict=True))


def medians(
    turns: Iterable[Turn], model: str, load: Load, systems: tuple[str, str], figures: Iterable[str]
) -> dict[str, float]:
    """The first system by the second, in those of the figures that both have."""
    of_model = [turn for turn in turns if turn.model == model]
    ours, theirs = (of(of_model, system, load.name) for system in systems)
    result = {figure: ratios(ours, theirs, _COLUMNS[figure]) for figure in figures}
    return {figure: statistics.median(values) for figure, values in result.items() if values}


def machine_lines(command: str, turns: Sequence[Turn], total: int) -> list[str]:
    """How the turns were made, where and when; `total` with those that count for nothing."""
    if not turns:
        return [f"None of {total} turns was measured on a quiet machine."]
    dates, chips = sorted(turn.date for turn in turns), sorted({turn.chip for turn in turns})
    commits = {
        name: ", ".join(sorted({turn.commit for turn in turns if turn.system == name}))
        for name in sorted({turn.system for turn in turns if turn.commit})
    }
    return [
        f"Command: `{command}`; the page: without PEER, `--write`.",
        f"{', '.join(chips)}, {dates[0]} to {dates[-1]} UTC. Commits: "
        + "; ".join(f"{name} {commit}" for name, commit in commits.items())
        + ".",
        f"{len(turns)} of {total} turns; where others used more than {OTHERS_LIMIT:g} cores, "
        "they are left out.",
    ]


def model_tables(turns: Sequence[Turn], loads: Sequence[Load], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """A section for each model that was measured: its figures, and the ratios of every pair of systems."""
    lines: list[str] = []
    for model in MODELS:
        of_model = [turn for turn in turns if turn.model == model]
        if of_model:
            lines += ["", f"## {model}", "", *figure_table(of_model, loads)]
            for ours, theirs in pairs:
                lines += ratio_table(of_model, loads, ours, theirs)
    return lines


def figure_table(turns: Sequence[Turn], loads: Sequence[Load]) -> list[str]:
    """Medians of every system: requests/s, TTFT, TPOT and step in ms, CPU seconds of a request."""
    systems = list(dict.fromkeys(turn.system for turn in turns))
    rows = []
    for load in loads_of(turns, loads):
        row = [load]
        for system in systems:
            mine = of(turns, system, load)
            row.append(", ".join(_middle(mine, figure) for figure in FIGURES) if mine else "–")
        rows.append(row)
    heads = [f"{system}: req/s, TTFT, TPOT, step, CPU s" for system in systems]
    return table(["load", *heads], rows)


def _middle(turns: Sequence[Turn], figure: str) -> str:
    result = [value for turn in turns if (value := turn.figure(figure)) is not None]
    return number(statistics.median(result)) if result else "–"


def ratio_table(turns: Sequence[Turn], loads: Sequence[Load], ours: str, theirs: str) -> list[str]:
    """Ours by theirs for every load that both have; nothing where there is none."""
    rows = []
    for load in loads_of(turns, loads):
        mine, other = of(turns, ours, load), of(turns, theirs, load)
        cells = [spread(ratios(mine, other, figure)) for figure in FIGURES]
        if cells[0] != "–":
            rows.append([load, *cells, str(len(ratios(mine, other, FIGURES[0])))])
    heads = ["load", "requests/s", *list(_COLUMNS)[1:], "rounds"]
    return ["", f"**{ours} / {theirs}**", "", *table(heads, rows)] if rows else []


def loads_of(turns: Sequence[Turn], loads: Sequence[Load]) -> list[str]:
    """The names of the loads that the turns are of."""
    there = {turn.load for turn in turns}
    return [load.name for load in loads if load.name in there]


def of(turns: Sequence[Turn], system: str, load: str) -> list[Turn]:
    """One system's turns of one load."""
    return [turn for turn in turns if turn.system == system and turn.load == load]


RESULT = RESULTS / "against_peer.md"


def main(arguments: list[str] | None = None) -> int:
    parser = turns_parser(__doc__, RESULT, model="small", systems="vllm,triptych")
    parser.add_argument("--before", type=Path, help="a checkout of Triptych to measure as `before`")
    return run_command(partial(_measure, parser.parse_args(arguments)))


def _measure(options: argparse.Namespace, display: Display) -> bool:
    if options.peer is None:
        return publish_turns(options, page, reached, RESULT)
    matrix = matrix_of(options.model, options.peer.resolve())
    return Rounds(options, display, matrix, systems_of(matrix, options.before), WORKLOADS).run(LOADS)
