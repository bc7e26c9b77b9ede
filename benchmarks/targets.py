"""What Triptych is to reach, and how far it has come: targets and the figures last committed for them.

    python -m benchmarks            # all of them
    python -m benchmarks targets --set NAME FIGURE=VALUE ... --page PAGE

Figures are in `results/targets.json`, where benchmarks put them with `--write`.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.result_page import RESULTS
from triptych.errors import ConfigError
from triptych.goodput.report.machine import chip, commit

FILE = RESULTS / "targets.json"
_PEER = "benchmarks against_peer PEER --results DIR"
_FLEET = "benchmarks vllm_fleet PEER --packages PACKAGES --results DIR"
_BASELINES = "benchmarks baselines benchmarks/baselines/tiny.toml --results DIR"


@dataclass(frozen=True, slots=True)
class Bound:
    """At least, or at most, `limit`; without a limit the figure is only shown."""

    figure: str
    sign: str = ""
    limit: float = 0.0

    def __str__(self) -> str:
        return f"{self.figure} {self.sign} {self.limit:g}" if self.sign else self.figure

    def met(self, value: float) -> bool:
        return {"≥": value >= self.limit, "≤": value <= self.limit, "": True}[self.sign]


@dataclass(frozen=True, slots=True)
class Target:
    """`command` measures it anew: the words after `python -m`."""

    name: str
    bounds: tuple[Bound, ...]
    command: str


class Reached(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Figures of one target, and where they are from: a page in `results`."""

    figures: dict[str, float]
    date: str
    commit: str
    machine: str
    page: str


def against_vllm(model: str, load: str) -> str:
    return f"vLLM, {model}, {load}"


def against_epd(model: str, load: str) -> str:
    return f"vLLM's EPD, {model}, {load}"


def engine_alone(load: str) -> str:
    return f"engine alone, small, {load}"


def fleet_by_epd(model: str, load: str) -> str:
    return f"our encoders before vLLM by vLLM's EPD, {model}, {load}"


def replicas_by_replicas(model: str, load: str) -> str:
    return f"two vLLM on our store by the two alone, {model}, {load}"


def long_step() -> str:
    return "decode step of 16 at context 480, by vLLM's"


def request_alone() -> str:
    return "EPD by one replica, a request alone"


def _from_the_peer() -> Iterable[Target]:
    faster = (Bound("req/s", "≥", 1.1), Bound("TTFT", "≤", 1.0), Bound("TPOT", "≤", 1.0))
    alone = (Bound("req/s", "≥", 1.0), Bound("TPOT", "≤", 1.0))
    for load in ("text@1", "text@16", "text-450@16"):
        yield Target(engine_alone(load), alone, f"{_PEER} --model small --only {load}")
    for model in ("small", "tiny"):
        for load in ("text", "image", "images-4"):
            for at_once in (1, 4, 16):
                name = f"{load}@{at_once}"
                yield Target(against_vllm(model, name), faster, f"{_PEER} --model {model} --only {name}")
    for model in ("small", "tiny"):
        for load in ("image@1", "image@16", "images-4@16"):
            words = f"{_PEER} --model {model} --only {load} --systems vllm-epd,triptych"
            yield Target(against_epd(model, load), (Bound("req/s", "≥", 2.0),), words)
    yield Target(long_step(), (Bound("step", "≤", 1.0),), f"{_PEER} --model small --only text-450@16")
    yield Target(
        "goodput, half of the pictures seen before, by vLLM's", (Bound("goodput", "≥", 2.0),), _BASELINES
    )


def _before_vllm() -> Iterable[Target]:
    for pictures in ("image", "images-4"):
        for reuse in (0, 50, 90):
            load = f"{pictures}-{reuse}@8"
            bound = Bound("req/s", "≥", 1.5)
            yield Target(fleet_by_epd("tiny", load), (bound,), f"{_FLEET} --only {load}")
    for pictures in ("image", "images-4"):
        load, systems = f"{pictures}-50@8", "replicas-triptych,replicas"
        bound = Bound("req/s", "≥", 1.2)
        yield Target(
            replicas_by_replicas("tiny", load), (bound,), f"{_FLEET} --only {load} --systems {systems}"
        )


def _of_ours() -> Iterable[Target]:
    stages = "benchmarks stages PEER/models/small"
    yield Target("decode step of 1, small", (Bound("of bandwidth", "≥", 0.75),), stages)
    yield Target("512 prefill tokens at context 1536, by those at 0", (Bound("time", "≤", 1.7),), stages)
    for load in ("text", "image", "images-4", "mix"):
        yield Target(f"EPD by two replicas, {load}", (Bound("req/s", "≥", 1.0),), _BASELINES)
    yield Target("EPD by two replicas, text streams in the mix", (Bound("P99 TPOT", "≤", 0.5),), _BASELINES)
    yield Target(
        request_alone(),
        (Bound("TTFT", "≤", 1.05),),
        f"{_PEER} --model small --only image@1 --systems colocated,triptych",
    )
    yield Target("load and inject, of prefill", (Bound("share", "≤", 0.03),), stages)
    yield Target("proxy, of gRPC receive alone", (Bound("tokens/s", "≥", 0.75),), "benchmarks proxy_relay")
    yield Target(
        "proxy, text requests per core", (Bound("requests/s", "≥", 800.0),), "benchmarks proxy_relay"
    )
    yield Target(
        "CUDA: share of the roofline",
        (Bound("decode"), Bound("prefill"), Bound("tower")),
        "benchmarks.gpu.engine MODEL --write",
    )


TARGETS = (*_from_the_peer(), *_before_vllm(), *_of_ours())
_NAMED = {target.name: target for target in TARGETS}


def read(path: Path = FILE) -> dict[str, Reached]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Reached]) if path.exists() else {}


def record(
    name: str,
    figures: Mapping[str, float],
    page: Path,
    *,
    made_at: str = "",
    date: str = "",
    machine: str = "",
    path: Path = FILE,
) -> None:
    """Puts the figures of a target in the place of those before; a name that is no target is left out.

    They were measured at commit `made_at`, on `date`, written 2026-11-23, on a `machine` with this chip: here
    and today where nothing is said. ConfigError for a figure that the target does not have.
    """
    target = _NAMED.get(name)
    if target is None:
        return
    unknown = set(figures) - {bound.figure for bound in target.bounds}
    if unknown:
        raise ConfigError(f"target {name!r} has no figure {', '.join(sorted(unknown))}")
    date = date or datetime.datetime.now(datetime.UTC).date().isoformat()
    kept = {key: float(f"{value:.4g}") for key, value in figures.items()}
    found = read(path) | {name: Reached(kept, date, made_at or commit(), machine or chip(), page.name)}
    ordered = {target.name: found[target.name] for target in TARGETS if target.name in found}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n")


def verdict(target: Target, reached: Reached | None) -> str:
    """ "met", "missed" or "not measured"; "–" where no figure has a limit. One figure is enough to miss."""
    figures = reached.figures if reached else {}
    if any(bound.figure in figures and not bound.met(figures[bound.figure]) for bound in target.bounds):
        return "missed"
    if any(bound.figure not in figures for bound in target.bounds):
        return "not measured"
    return "met" if any(bound.sign for bound in target.bounds) else "–"


def table(reached: Mapping[str, Reached]) -> str:
    """A line for every target, then the count."""
    rows = [("target", "wanted", "measured", "", "date", "commit", "python -m …")]
    for target in TARGETS:
        found = reached.get(target.name)
        figures = found.figures if found else {}
        measured = ", ".join(
            f"{figures[b.figure]:.3g}" if b.figure in figures else "–" for b in target.bounds
        )
        wanted = ", ".join(map(str, target.bounds))
        made = (found.date, found.commit[:12]) if found else ("–", "–")
        rows.append((target.name, wanted, measured, verdict(target, found), *made, target.command))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    verdicts = [row[3] for row in rows[1:]]
    count = ", ".join(f"{verdicts.count(word)} {word}" for word in ("met", "missed", "not measured"))
    return "\n".join([*lines, f"{count}; pages and figures: benchmarks/results", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", metavar="NAME", choices=sorted(_NAMED), help="a target to write figures of")
    parser.add_argument("figures", nargs="*", metavar="FIGURE=VALUE")
    parser.add_argument("--commit", default="", help="where they were measured; this one by default")
    parser.add_argument("--date", default="", help="today by default")
    parser.add_argument("--machine", default="", help="its chip; this one's by default")
    parser.add_argument("--page", type=Path, default=FILE, help="the result page that has the figures")
    options = parser.parse_args(arguments)
    if options.set:
        pairs = [word.rpartition("=") for word in options.figures]
        figures = {name: float(value) for name, _, value in pairs}
        made = {"made_at": options.commit, "date": options.date, "machine": options.machine}
        record(options.set, figures, options.page, **made)
    sys.stdout.write(table(read()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
