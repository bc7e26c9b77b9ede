"""The page and the figures of the targets, made of turns. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.against_peer.figures import FIGURES, OTHERS_LIMIT, Turn, quiet, ratios
from benchmarks.against_peer.loads import LOADS
from benchmarks.against_peer.systems import MODELS
from benchmarks.baselines.tables import number, spread, table
from benchmarks.targets import against_epd, against_vllm, engine_alone, long_step, request_alone

_HEADS = ("requests/s", "TTFT", "TPOT", "step", "CPU")
_PAIRS = (
    ("triptych", "vllm"),
    ("triptych", "vllm-epd"),
    ("triptych", "colocated"),
    ("triptych", "before"),
    ("before", "vllm"),
    ("vllm-epd", "vllm"),
)
_ABOUT = """\
All systems are up on the same cores, one computes at a time. In every round each gets the same requests, a
closed loop with 64 output tokens; no request comes twice. A ratio is the median of the rounds' ratios with
its range. Times are in ms, means over requests; `step` is the median time between tokens while all sequences
decode and none is prefilled; `CPU` is that of all of a system's processes per request, what waiting
threads spin included."""


def page(turns: Sequence[Turn]) -> str:
    kept = quiet(turns)
    lines = ["# Against vLLM on the same cores", "", *_machine(kept, len(turns)), "", _ABOUT]
    for model in MODELS:
        of_model = [turn for turn in kept if turn.model == model]
        if of_model:
            lines += ["", f"## {model}", "", *_figures(of_model)]
            for ours, theirs in _PAIRS:
                lines += _ratios(of_model, ours, theirs)
    return "\n".join([*lines, ""])


def _machine(turns: Sequence[Turn], of: int) -> list[str]:
    if not turns:
        return [f"None of {of} turns was measured on a quiet machine."]
    dates, chips = sorted(turn.date for turn in turns), sorted({turn.chip for turn in turns})
    commits = {
        name: ", ".join(sorted({turn.commit for turn in turns if turn.system == name}))
        for name in sorted({turn.system for turn in turns if turn.commit})
    }
    return [
        "Command: `python -m benchmarks against_peer PEER --results DIR`; the page: without PEER, `--write`.",
        f"{', '.join(chips)}, {dates[0]} to {dates[-1]} UTC. Commits: "
        + "; ".join(f"{name} {commit}" for name, commit in commits.items())
        + ".",
        f"{len(turns)} of {of} turns; where others used more than {OTHERS_LIMIT:g} cores, they are left out.",
    ]


def _figures(turns: Sequence[Turn]) -> list[str]:
    """Medians of every system: requests/s, TTFT, TPOT and step in ms, CPU seconds of a request."""
    systems = list(dict.fromkeys(turn.system for turn in turns))
    rows = []
    for load in _loads(turns):
        row = [load]
        for system in systems:
            mine = _of(turns, system, load)
            row.append(", ".join(_middle(mine, figure) for figure in FIGURES) if mine else "–")
        rows.append(row)
    heads = [f"{system}: req/s, TTFT, TPOT, step, CPU s" for system in systems]
    return table(["load", *heads], rows)


def _middle(turns: Sequence[Turn], figure: str) -> str:
    found = [value for turn in turns if (value := turn.figure(figure)) is not None]
    return number(statistics.median(found)) if found else "–"


def _ratios(turns: Sequence[Turn], ours: str, theirs: str) -> list[str]:
    rows = []
    for load in _loads(turns):
        mine, other = _of(turns, ours, load), _of(turns, theirs, load)
        cells = [spread(ratios(mine, other, figure)) for figure in FIGURES]
        if cells[0] != "–":
            rows.append([load, *cells, str(len(ratios(mine, other, FIGURES[0])))])
    return ["", f"**{ours} / {theirs}**", "", *table(["load", *_HEADS, "rounds"], rows)] if rows else []


def _loads(turns: Sequence[Turn]) -> list[str]:
    there = {turn.load for turn in turns}
    return [load.name for load in LOADS if load.name in there]


def _of(turns: Sequence[Turn], system: str, load: str) -> list[Turn]:
    return [turn for turn in turns if turn.system == system and turn.load == load]


def reached(turns: Sequence[Turn]) -> dict[str, dict[str, float]]:
    """The figures of the targets that these turns answer, by the target's name."""
    kept = quiet(turns)
    found: dict[str, dict[str, float]] = {}
    for model in MODELS:
        of_model = [turn for turn in kept if turn.model == model]
        for load in _loads(of_model):
            ours = _of(of_model, "triptych", load)
            vllm = _medians(ours, _of(of_model, "vllm", load))
            epd = _medians(ours, _of(of_model, "vllm-epd", load))
            found[against_vllm(model, load)] = _named(vllm, ("req/s", "TTFT", "TPOT"))
            found[against_epd(model, load)] = _named(epd, ("req/s",))
            if model == "small":
                if load == "image@1":
                    alone = _medians(ours, _of(of_model, "colocated", load))
                    found[request_alone()] = _named(alone, ("TTFT",))
                found[engine_alone(load)] = _named(vllm, ("req/s", "TPOT"))
                if load == "text-450@16":
                    found[long_step()] = _named(vllm, ("step",))
    return {name: figures for name, figures in found.items() if figures}


_COLUMNS = dict(zip(("req/s", "TTFT", "TPOT", "step", "CPU"), FIGURES, strict=True))


def _medians(ours: Sequence[Turn], theirs: Sequence[Turn]) -> dict[str, float]:
    found = {name: ratios(ours, theirs, figure) for name, figure in _COLUMNS.items()}
    return {name: statistics.median(values) for name, values in found.items() if values}


def _named(figures: dict[str, float], names: Sequence[str]) -> dict[str, float]:
    return {name: figures[name] for name in names if name in figures}
