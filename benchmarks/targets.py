"""What Triptych is to reach, and how far it has come: targets and the figures last committed for them.

    python -m benchmarks            # all of them

Targets are in `targets.toml`, figures in `results/targets.json`, where benchmarks put them with `--write`;
those of other benchmarks are written there by hand.
"""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.result_page import RESULTS
from triptych.base.errors import ConfigError
from triptych.base.machine.resources import cpu_name
from triptych_bench.goodput.report.machine import commit

FILE = RESULTS / "targets.json"


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


def _read(name: str, fields: dict[str, Any]) -> Target:
    """A target of the file: bounds are written "TTFT ≤ 1", or without a limit "decode"."""
    split = [bound.rsplit(" ", 2) for bound in fields["bounds"]]
    bounds = (Bound(figure, *sign[:1], *map(float, sign[1:])) for figure, *sign in split)
    return Target(name, tuple(bounds), fields["command"])


TARGETS = tuple(
    _read(name, fields)
    for name, fields in tomllib.loads((RESULTS.parent / "targets.toml").read_text("utf-8")).items()
)
_NAMED = {target.name: target for target in TARGETS}


def read() -> dict[str, Reached]:
    return msgspec.json.decode(FILE.read_bytes(), type=dict[str, Reached])


def record(
    name: str,
    figures: Mapping[str, float],
    page: Path,
    *,
    made_at: str = "",
    date: str = "",
) -> None:
    """Puts the figures of a target in the place of those before; a name that is no target is left out.

    They were measured here at commit `made_at`, on `date`, written 2026-11-23: now and today where nothing is
    said. ConfigError for a figure that the target does not have.
    """
    target = _NAMED.get(name)
    if target is None:
        return
    unknown = set(figures) - {bound.figure for bound in target.bounds}
    if unknown:
        raise ConfigError(f"target {name!r} has no figure {', '.join(sorted(unknown))}")
    date = date or datetime.datetime.now(datetime.UTC).date().isoformat()
    kept = {key: float(f"{value:.4g}") for key, value in figures.items()}
    result = read() | {name: Reached(kept, date, made_at or commit(), cpu_name(), page.name)}
    ordered = {target.name: result[target.name] for target in TARGETS if target.name in result}
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n")


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
        result = reached.get(target.name)
        figures = result.figures if result else {}
        measured = ", ".join(
            f"{figures[b.figure]:.3g}" if b.figure in figures else "–" for b in target.bounds
        )
        wanted = ", ".join(map(str, target.bounds))
        made = (result.date, result.commit[:12]) if result else ("–", "–")
        rows.append((target.name, wanted, measured, verdict(target, result), *made, target.command))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    verdicts = [row[3] for row in rows[1:]]
    count = ", ".join(f"{verdicts.count(word)} {word}" for word in ("met", "missed", "not measured"))
    return "\n".join([*lines, f"{count}; pages and figures: benchmarks/results", ""])
