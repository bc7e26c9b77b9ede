"""Tables of turns in Markdown: figures of every system, ratios of two of them. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.against_peer.figures import FIGURES, OTHERS_LIMIT, Turn, ratios
from benchmarks.against_peer.loads import Load
from benchmarks.against_peer.systems import MODELS
from benchmarks.baselines.tables import number, spread, table

_HEADS = ("requests/s", "TTFT", "TPOT", "step", "CPU")


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
    found = [value for turn in turns if (value := turn.figure(figure)) is not None]
    return number(statistics.median(found)) if found else "–"


def ratio_table(turns: Sequence[Turn], loads: Sequence[Load], ours: str, theirs: str) -> list[str]:
    """Ours by theirs for every load that both have; nothing where there is none."""
    rows = []
    for load in loads_of(turns, loads):
        mine, other = of(turns, ours, load), of(turns, theirs, load)
        cells = [spread(ratios(mine, other, figure)) for figure in FIGURES]
        if cells[0] != "–":
            rows.append([load, *cells, str(len(ratios(mine, other, FIGURES[0])))])
    return ["", f"**{ours} / {theirs}**", "", *table(["load", *_HEADS, "rounds"], rows)] if rows else []


def loads_of(turns: Sequence[Turn], loads: Sequence[Load]) -> list[str]:
    """The names of the loads that the turns are of."""
    there = {turn.load for turn in turns}
    return [load.name for load in loads if load.name in there]


def of(turns: Sequence[Turn], system: str, load: str) -> list[Turn]:
    """One system's turns of one load."""
    return [turn for turn in turns if turn.system == system and turn.load == load]
