"""The page and the figures of the targets, made of turns. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.against_peer.figures import FIGURES, Turn, quiet, ratios
from benchmarks.against_peer.loads import LOADS
from benchmarks.against_peer.systems import MODELS
from benchmarks.against_peer.turn_tables import loads_of, machine_lines, model_tables, of
from benchmarks.targets import against_epd, against_vllm, engine_alone, long_step, request_alone

_COMMAND = "python -m benchmarks against_peer PEER --results DIR"
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
    lines = ["# Against vLLM on the same cores", "", *machine_lines(_COMMAND, kept, len(turns)), "", _ABOUT]
    return "\n".join([*lines, *model_tables(kept, LOADS, _PAIRS), ""])


def reached(turns: Sequence[Turn]) -> dict[str, dict[str, float]]:
    """The figures of the targets that these turns answer, by the target's name."""
    kept = quiet(turns)
    found: dict[str, dict[str, float]] = {}
    for model in MODELS:
        of_model = [turn for turn in kept if turn.model == model]
        for load in loads_of(of_model, LOADS):
            ours = of(of_model, "triptych", load)
            vllm = _medians(ours, of(of_model, "vllm", load))
            epd = _medians(ours, of(of_model, "vllm-epd", load))
            found[against_vllm(model, load)] = _named(vllm, ("req/s", "TTFT", "TPOT"))
            found[against_epd(model, load)] = _named(epd, ("req/s",))
            if model == "small":
                if load == "image@1":
                    alone = _medians(ours, of(of_model, "colocated", load))
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
