"""The page and the figures of the targets, made of turns. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.against_peer.loads import Load, Turn, quiet, ratios
from benchmarks.against_peer.page import machine_lines, model_tables, of
from benchmarks.against_peer.systems import MODELS
from benchmarks.baselines.tables import spread, table
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
_ABOUT = """\
All systems are up on the same two cores, one computes at a time. In every round each gets the same requests,
a closed loop of 8 with 64 output tokens; pictures of 320 x 320, of which the load's last number says how many
percent an earlier request of the round has shown. No two rounds share a picture. A ratio is the median of the
rounds' ratios with its range. Times are in ms, means over requests; `step` is the median time between tokens
while all sequences decode and none is prefilled; `CPU` is that of all of a system's processes per request.

| system | processes |
| --- | --- |
| `triptych` | our proxy, store, encoder worker (one thread, `nice -n 19`) and PD worker, before one vLLM |
| `triptych-pinned` | the same, the encoder worker and vLLM on a core each, as `vllm-epd` has them |
| `vllm-epd` | vLLM's own EPD, an encoder and a PD instance of a core each, files in memory between them |
| `vllm` | one vLLM on both cores |
| `replicas-triptych` | our proxy, store, encoder worker, and a PD worker before each of two vLLMs of a core |
| `replicas-store` | two vLLMs of a core each that share our store (`ec_both`), requests in turn |
| `replicas` | two vLLMs of a core each, requests in turn |
"""


def page(turns: Sequence[Turn], versions: Mapping[str, str], notes: str) -> str:
    """`versions` of what was measured, by name; `notes` on these figures, in Markdown."""
    kept = quiet(turns)
    lines = ["# Before a vLLM fleet", "", *machine_lines(COMMAND, kept, len(turns))]
    lines += [", ".join(f"{name} {version}" for name, version in versions.items()) + "." if versions else ""]
    lines += ["", _ABOUT, *_targets(kept), *(["", notes.strip()] if notes.strip() else [])]
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
