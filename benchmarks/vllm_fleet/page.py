"""Loads, with none, half or most pictures seen before; their page and the figures of the targets. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.against_peer.loads import Load, Turn, quiet, ratios
from benchmarks.against_peer.page import machine_lines, model_tables, of
from benchmarks.against_peer.systems import MODELS
from benchmarks.baselines.tables import spread, table
from benchmarks.result_page import fill
from triptych.goodput.load.workload import Workload
from triptych.goodput.measure.slo import preset

COMMAND = "python -m benchmarks vllm_fleet PEER --packages PACKAGES --results DIR"
_PAIRS = (
    ("triptych", "vllm-epd"),
    ("triptych", "vllm"),
    ("triptych-pinned", "vllm-epd"),
    ("vllm-epd", "vllm"),
    ("replicas-triptych", "replicas"),
    ("replicas-store", "replicas"),
)
#: Ours and theirs of the two targets, and what is wanted in requests/s.
_BY_EPD = ("triptych", "vllm-epd", 1.5)
_BY_REPLICAS = ("replicas-triptych", "replicas", 1.2)


def page(turns: Sequence[Turn], versions: Mapping[str, str], notes: str) -> str:
    """`versions` of what was measured, by name; `notes` on these figures, in Markdown."""
    kept = quiet(turns)
    lines = ["# Before a vLLM fleet", "", *machine_lines(COMMAND, kept, len(turns))]
    lines += [", ".join(f"{name} {version}" for name, version in versions.items()) + "." if versions else ""]
    lines += ["", fill("vllm_fleet"), *_targets(kept), *(["", notes.strip()] if notes.strip() else [])]
    return "\n".join([*lines, *model_tables(kept, LOADS, _PAIRS), ""])


def _targets(turns: Sequence[Turn]) -> list[str]:
    rows = []
    for model, load, (ours, theirs, wanted) in _asked(turns):
        found = _ratios(turns, model, load, ours, theirs)
        verdict = "not measured"
        if found:
            verdict = "met" if statistics.median(found) >= wanted else "missed"
        name = f"{model}, {load}: {ours} / {theirs}"
        rows.append([name, f"≥ {wanted:g}", spread(found), verdict, str(len(found))])
    return table(["requests/s", "wanted", "measured", "", "rounds"], rows, texts=(0, 3))


def _asked(turns: Sequence[Turn]) -> list[tuple[str, str, tuple[str, str, float]]]:
    """Model, load and target of everything that is asked of the models that were measured."""
    models = [model for model in MODELS if any(turn.model == model for turn in turns)]
    shared = [f"{name}@{AT_ONCE}" for name in SHARED]
    found = [(model, load.name, _BY_EPD) for model in models for load in LOADS]
    return found + [(model, load, _BY_REPLICAS) for model in models for load in shared]


def _ratios(turns: Sequence[Turn], model: str, load: str, ours: str, theirs: str) -> list[float]:
    of_model = [turn for turn in turns if turn.model == model]
    return ratios(of(of_model, ours, load), of(of_model, theirs, load), "req_s")


def reached(turns: Sequence[Turn]) -> dict[str, dict[str, float]]:
    """The figures of the targets that these turns answer, by the target's name."""
    kept = quiet(turns)
    found = {}
    for model, load, pair in _asked(kept):
        ratio = _ratios(kept, model, load, *pair[:2])
        if ratio:
            epd = "our encoders before vLLM by vLLM's EPD"
            name = epd if pair == _BY_EPD else "two vLLM on our store by the two alone"
            found[f"{name}, {model}, {load}"] = {"req/s": statistics.median(ratio)}
    return found


REUSES = (0, 50, 90)


def _workloads() -> dict[str, Workload]:
    """64 output tokens each; pictures of 320 x 320."""
    found = {}
    for name in ("image", "images-4"):
        for reuse in REUSES:
            found[f"{name}-{reuse}"] = replace(preset(name).workload, reuse=reuse / 100)
    return found


WORKLOADS = _workloads()
AT_ONCE = 8
LOADS = tuple(Load(name, AT_ONCE) for name in WORKLOADS)
#: Where replicas show each other's pictures.
SHARED = ("image-50", "images-4-50")
