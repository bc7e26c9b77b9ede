"""Plots of results, from the documents that `result.py` writes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from triptych.base.types import JsonObject
from triptych.goodput.load.client import STAGES
from triptych.goodput.report.comparison import by_label

#: Told apart by colour-blind people, and in grey.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2E"}
Document = JsonObject


def _named(found: Document, index: int) -> str:
    return str(found["name"] or f"{found['target']['model']} {index + 1 if index else ''}").strip()


def _sheet(title: str, columns: int, width: float = 4.6) -> tuple[Figure, list[Axes]]:
    figure, axes = plt.subplots(1, columns, figsize=(width * columns, 3.8), layout="constrained")
    figure.suptitle(title)
    found = [axes] if columns == 1 else list(axes)
    for one in found:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(axis="y", alpha=0.3)
    return figure, found


def _head(found: Document) -> str:
    loaded = " – LOADED MACHINE" if found["machine"]["loaded"] else ""
    return f"{found['workload']['name']}, {found['target']['model']}{loaded}"


def latency_against_rate(runs: Sequence[Document]) -> Figure | None:
    """P99 over the offered rate with the SLO's lines; the knee is the highest rate inside all of them."""
    figure, axes = _sheet(f"P99 latency against rate: {_head(runs[0])}", 2)
    drawn = False
    for index, found in enumerate(runs):
        rates = _rates(found)
        drawn = drawn or len(rates) > 1
        for axis, metric in zip(axes, ("ttft", "tpot"), strict=True):
            middle = [_middle(windows, f"p99_{metric}_ms") for windows in rates.values()]
            axis.plot(list(rates), middle, marker="o", color=COLOURS[index % 7], label=_named(found, index))
            for rate, windows in rates.items():
                values = [w[f"p99_{metric}_ms"] for w in windows if w[f"p99_{metric}_ms"] is not None]
                if len(values) > 1:
                    axis.vlines(rate, min(values), max(values), color=COLOURS[index % 7], alpha=0.4)
            _knee(axis, found, index)
    for axis, metric in zip(axes, ("ttft", "tpot"), strict=True):
        if metric in runs[0]["slo"]:
            limit = runs[0]["slo"][metric]
            axis.axhline(limit, color="#555555", linestyle="--", label=f"SLO {limit:g} ms")
        axis.set(xlabel="offered rate, requests/s", ylabel=f"P99 {NAMES[metric]}, ms", ylim=(0, None))
        axis.legend(fontsize=8)
    if drawn:
        return figure
    plt.close(figure)
    return None


def _knee(axis: Axes, found: Document, index: int) -> None:
    knee = knee_of(found)
    if knee is not None:
        axis.axvline(
            knee, color=COLOURS[index % 7], linestyle=":", label=f"knee {_named(found, index)}: {knee:.3g}/s"
        )


def knee_of(found: Document) -> float | None:
    """The rate that the search found; else the last rate before the first that was not sustained."""
    if found["search"] is not None:
        return float(found["search"]["max_request_goodput"]) or None
    knee = None
    for rate, windows in _rates(found).items():
        if 2 * sum(window["sustained"] for window in windows) <= len(windows):
            break
        knee = rate
    return knee


def _rates(found: Document) -> dict[float, list[JsonObject]]:
    rates: dict[float, list[JsonObject]] = {}
    for window in found["windows"]:
        if window["request_rate"] is not None:
            rates.setdefault(window["request_rate"], []).append(window)
    return dict(sorted(rates.items()))


def _middle(windows: Sequence[JsonObject], field: str) -> float:
    values = [window[field] for window in windows if window[field] is not None]
    return statistics.median(values) if values else float("nan")


def goodput_bars(runs: Sequence[Document]) -> Figure:
    """Good requests per second within completed ones, by load; whiskers are the range of repeats."""
    windows = sorted((w for found in runs for w in found["windows"]), key=lambda w: w["request_rate"] or 0.0)
    labels = list(dict.fromkeys(window["label"] for window in windows))
    figure, (axis,) = _sheet(f"Goodput (a): {_head(runs[0])}", 1, max(4.8, 1.1 * len(labels) * len(runs)))
    width = 0.8 / len(runs)
    for index, found in enumerate(runs):
        grouped = by_label(found)
        for place, label in enumerate(labels):
            windows = grouped.get(label, [])
            if not windows:
                continue
            at = place + (index - (len(runs) - 1) / 2) * width
            done, good = (_middle(windows, f"request_{name}") for name in ("throughput", "goodput"))
            colour = COLOURS[index % 7]
            axis.bar(at, done, width * 0.9, color=colour, alpha=0.25)
            axis.bar(at, good, width * 0.9, color=colour, label=_named(found, index) if not place else None)
            values = [window["request_goodput"] for window in windows]
            axis.vlines(at, min(values), max(values), color="black")
            share = _middle(windows, "slo_attainment")
            axis.annotate(f"{share:.0%}", (at, max(done, *values)), ha="center", va="bottom", fontsize=8)
    axis.set_xticks(range(len(labels)), labels)
    axis.set(xlabel="load", ylabel="requests/s: good (dark), completed (pale)")
    axis.margins(y=0.15)
    axis.legend(fontsize=8)
    return figure


def cdfs(runs: Sequence[Document]) -> Figure:
    """Share of all sent requests that were at least as fast; failures never arrive at 1."""
    lines = [
        (f"{_named(found, index)} {label}" if len(runs) > 1 else label, windows)
        for index, found in enumerate(runs)
        for label, windows in by_label(found).items()
    ]
    figure, axes = _sheet(f"Latency distributions: {_head(runs[0])}", 3)
    for axis, metric in zip(axes, NAMES, strict=True):
        for index, (label, windows) in enumerate(lines):
            values, sent = _values(windows, metric)
            shares = [(place + 1) / sent for place in range(len(values))]
            axis.step(values, shares, where="post", color=COLOURS[index % 7], label=label)
        limit = runs[0]["slo"].get(metric)
        if limit is not None:
            axis.axvline(limit, color="#555555", linestyle="--", label=f"SLO {limit:g} ms")
        axis.set(xlabel=f"{NAMES[metric]}, ms", ylim=(0, 1.02), xlim=(0, None))
        axis.legend(fontsize=8, loc="lower right")
    axes[0].set_ylabel("share of sent requests")
    return figure


def _values(windows: Sequence[JsonObject], metric: str) -> tuple[list[float], int]:
    """Sorted milliseconds of completed requests, and how many were sent."""
    found, sent = [], 0
    for window in windows:
        rows = zip(window["ttfts"], window["latencies"], window["output_lens"], window["errors"], strict=True)
        for ttft, latency, tokens, error in rows:
            sent += 1
            if not error:
                tpot = (latency - ttft) / (tokens - 1) if tokens > 1 else 0.0
                found.append({"ttft": ttft, "tpot": tpot, "e2el": latency}[metric] * 1000)
    return sorted(found), sent


def waterfall(runs: Sequence[Document]) -> Figure | None:
    """Stages of the request whose end-to-end latency is the median of those with the most pictures."""
    chosen = _typical(runs[-1])
    if chosen is None:
        return None
    window, index = chosen
    stages, total = window["stages"][index], window["latencies"][index]
    figure, (axis,) = _sheet(f"One request, pictures: {window['images'][index]}, {_head(runs[-1])}", 1, 8.0)
    rows = [("client: to first token", 0.0, window["ttfts"][index]), ("client: to the end", 0.0, total)]
    rows += place_stages(stages, total)
    for place, (_, begin, seconds) in enumerate(rows):
        axis.barh(place, seconds * 1000, left=begin * 1000, color=COLOURS[6 if place < 2 else place % 6])
        axis.annotate(f" {seconds * 1000:.1f}", ((begin + seconds) * 1000, place), va="center", fontsize=8)
    axis.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axis.invert_yaxis()
    axis.grid(axis="x", alpha=0.3)
    axis.set(xlabel="ms since it was sent; lengths are the server's, laid back from the end of the reply")
    axis.margins(x=0.1)
    return figure


def place_stages(stages: Mapping[str, float], total: float) -> list[tuple[str, float, float]]:
    """(stage, begin, length) in seconds: servers report lengths only.

    Decode ends the request and prefill leads to it; the wait in the PD worker's queue ends where prefill
    begins, and so do load, and save and encode before it: they are what the request waits for.
    """
    prefill = total - stages.get("decode", 0.0) - stages.get("prefill", 0.0)
    ends = {"decode": total, "prefill": total - stages.get("decode", 0.0), "queue": prefill, "load": prefill}
    ends["save"] = ends["load"] - stages.get("load", 0.0)
    ends["encode"] = ends["save"] - stages.get("save", 0.0)
    ends["fetch"] = stages.get("fetch", 0.0)
    known = [(name, stages[name]) for name in STAGES if stages.get(name, 0.0) > 0]
    return [(name, max(ends[name] - seconds, 0.0), seconds) for name, seconds in known]


def _typical(found: Document) -> tuple[JsonObject, int] | None:
    rows = [
        (window["images"][index], window["latencies"][index], window, index)
        for window in found["windows"]
        for index, error in enumerate(window["errors"])
        if not error and window["stages"][index]
    ]
    if not rows:
        return None
    most = max(row[0] for row in rows)
    rows = sorted((row for row in rows if row[0] == most), key=lambda row: row[1])
    return rows[len(rows) // 2][2:]


def queue_depths(runs: Sequence[Document]) -> Figure:
    """Requests in flight as the client saw them, and the server's own gauges, over the longest window."""
    found = runs[-1]
    window = max(found["windows"], key=lambda one: one["duration"])
    figure, (axis,) = _sheet(f"Queues at {window['label']}: {_head(found)}", 1, 8.0)
    begins = window["start_times"]
    ends = [begin + length for begin, length in zip(begins, window["latencies"], strict=True)]
    changes = sorted([(at, 1) for at in begins] + [(at, -1) for at in ends])
    times, depth, depths = [], 0, []
    for at, change in changes:
        depth += change
        times.append(at)
        depths.append(depth)
    axis.step(
        times, depths, where="post", color=COLOURS[0], label="measured requests in flight, seen by the client"
    )
    samples = [sample for sample in window["queue_depths"] if sample["at"] >= 0]
    names = list(dict.fromkeys(name for sample in samples for name in sample if name != "at"))
    for index, name in enumerate(names):
        points = [
            (sample["at"], sample[name])
            for sample in window["queue_depths"]
            if name in sample and sample["at"] >= 0
        ]
        axis.plot(
            *zip(*points, strict=True), color=COLOURS[(index + 1) % 7], marker=".", label=f"server: {name}"
        )
    axis.set(xlabel="seconds since the window began", ylabel="requests or items", ylim=(0, None))
    axis.legend(fontsize=8)
    return figure


PLOTS: dict[str, Callable[[Sequence[Document]], Figure | None]] = {
    "latency": latency_against_rate,
    "goodput": goodput_bars,
    "cdf": cdfs,
    "waterfall": waterfall,
    "queues": queue_depths,
}


def save_plots(runs: Sequence[Document], stem: Path, kind: str) -> list[Path]:
    """Every plot that the runs have data for, as STEM-name.png or .svg."""
    paths = []
    for name, draw in PLOTS.items():
        figure = draw(runs)
        if figure is not None:
            paths.append(stem.with_name(f"{stem.name}-{name}.{kind}"))
            figure.savefig(paths[-1], dpi=130)
            plt.close(figure)
    return paths
