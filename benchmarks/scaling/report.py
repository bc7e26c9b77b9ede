"""The page of the scaling benchmark: first what holds on any machine, then seconds as measured."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.scaling.bursts import BurstRun
from benchmarks.scaling.first_start import FirstStarts
from triptych.goodput.report.machine import commit

_OPTIONS = {
    "bursts": ("tower_seconds", "bursts", "requests", "images", "side", "tokens", "slo", "window"),
    "starts": ("runs", "side", "slo"),
}


@dataclass(frozen=True, slots=True)
class ScalingRun:
    """One cluster's bursts. `name` is part of the picture's."""

    name: str
    title: str
    bursts: BurstRun

    @property
    def picture(self) -> str:
        return f"scale_local-{self.name}.png"


def bursts_page(runs: Sequence[ScalingRun], options: argparse.Namespace) -> str:
    """The page of the bursts."""
    text = (
        f"`triptych serve --encoders {options.encoders}`; a burst is {options.requests} requests of "
        f"{options.images} pictures at once, all new. The next one comes when the pool is as small as it may "
        "be. Where the tower sleeps, more encoders are faster though there are no more cores."
    )
    head = _head("Encoders that follow their work, on one machine", options)
    return "\n".join([*head, text, "", *_counts(runs), "", *_times(runs), *_pictures(runs)])


def starts_page(starts: FirstStarts, options: argparse.Namespace) -> str:
    """The page of the starts from zero."""
    rows = [
        (title, [f"{pick(values):.2f}" for pick in (statistics.median, min, max)])
        for title, values in (
            ("no encoder, forked (goal: 1.5)", starts.forked),
            ("no encoder, without the fork server (goal: 6)", starts.alone),
            ("an encoder", starts.warm),
        )
    ]
    head = _head("From no encoder to the first token", options)
    text = (
        "Seconds from a request with one picture to its only token, a prefill after the embedding. A load "
        "above the number of cores makes all of them longer."
    )
    return "\n".join([*head, text, "", *_table(["the pool has", "median", "best", "worst"], rows), ""])


def _head(title: str, options: argparse.Namespace) -> list[str]:
    names = _OPTIONS[options.part]
    words = [f"--{name.replace('_', '-')} {getattr(options, name):g}" for name in names]
    command = " ".join(["python -m benchmarks scaling", options.part, "--encoders", options.encoders, *words])
    return [
        f"# {title}",
        "",
        f"Command: `{command} --write`",
        f"Date: {datetime.date.today()}. Commit: {commit()}. {os.cpu_count()} cores ({platform.machine()}). "
        f"Load at the end: {os.getloadavg()[0]:.1f}.",
        "",
    ]


def _counts(runs: Sequence[ScalingRun]) -> list[str]:
    rows: list[tuple[str, list[str]]] = [
        ("requests sent", [str(run.bursts.statuses.total()) for run in runs]),
        ("answered with 200", [str(run.bursts.statuses[200]) for run in runs]),
        ("lost or refused", [str(_lost(run)) for run in runs]),
        ("most encoder processes at once", [str(run.bursts.timeline.most()) for run in runs]),
        ("changes of direction, by burst", [_list(run.bursts.timeline.turns()) for run in runs]),
        ("encoders above the least at the end", [str(run.bursts.left) for run in runs]),
    ]
    return _table(["counts", *(run.name for run in runs)], rows)


def _times(runs: Sequence[ScalingRun]) -> list[str]:
    rows: list[tuple[str, list[str]]] = [
        ("burst, first request to last answer, s", [_list(run.bursts.lengths) for run in runs]),
        ("request, median, s", [f"{statistics.median(run.bursts.seconds):.1f}" for run in runs]),
        ("request, longest, s", [f"{max(run.bursts.seconds):.1f}" for run in runs]),
    ]
    return _table(["seconds on this machine", *(run.name for run in runs)], rows)


def _pictures(runs: Sequence[ScalingRun]) -> list[str]:
    lines = [
        "",
        "Dotted lines: a burst begins. `running` are processes, also those that start or drain; `ready` are",
        "those that proxies may send work to; `desired` is the proxies' decision.",
        "",
    ]
    return [*lines, *(f"![{run.title}]({run.picture})\n" for run in runs)]


def _lost(run: ScalingRun) -> int:
    return run.bursts.statuses.total() - run.bursts.statuses[200]


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)


def _table(head: Sequence[str], rows: Sequence[tuple[str, list[str]]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        "| " + " | ".join("---" for _ in head) + " |",
        *(f"| {title} | {' | '.join(cells)} |" for title, cells in rows),
    ]
