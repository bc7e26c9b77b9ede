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
from triptych_bench.goodput.report.comparison import by_label

#: Told apart by colour-blind people, and in grey.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2E"}
_COLUMNS = ("start_times", "ttfts", "latencies", "output_lens", "errors")
Document = JsonObject
plt.rcParams["axes.spines.top"] = plt.rcParams["axes.spines.right"] = False


def _named(run: Document, index: int) -> str:
    return str(run["name"] or f"{run['target']['model']} {index + 1 if index else ''}").strip()


def sheet(title: str, columns: int, width: float = 4.6) -> tuple[Figure, list[Axes]]:
    figure, axes = plt.subplots(1, columns, figsize=(width * columns, 3.8), layout="constrained")
    figure.suptitle(title)
    row = [axes] if columns == 1 else list(axes)
    for axis in row:
        axis.grid(axis="y", alpha=0.3)
    return figure, row


def _head(run: Document) -> str:
    loaded = " – LOADED MACHINE" if run["machine"]["loaded"] else ""
    return f"{run['workload']['name']}, {run['target']['model']}{loaded}"


def latency(runs: Sequence[Document]) -> Figure:
    """P99 over the offered rate, where there are several; else every request over the time of its window."""
    if any(len(_rates(run)) > 1 for run in runs):
        return latency_against_rate(runs)
    return latency_over_time(runs)


def latency_against_rate(runs: Sequence[Document]) -> Figure:
    """P99 over the offered rate; the knee is the highest rate inside the whole SLO."""
    figure, axes = sheet(f"P99 latency against rate: {_head(runs[0])}", 2)
    for index, run in enumerate(runs):
        rates = _rates(run)
        for axis, metric in zip(axes, ("ttft", "tpot"), strict=True):
            middle = [_middle(windows, f"p99_{metric}_ms") for windows in rates.values()]
            axis.plot(list(rates), middle, marker="o", color=COLOURS[index % 7], label=_named(run, index))
            for rate, windows in rates.items():
                values = [w[f"p99_{metric}_ms"] for w in windows if w[f"p99_{metric}_ms"] is not None]
                if len(values) > 1:
                    axis.vlines(rate, min(values), max(values), color=COLOURS[index % 7], alpha=0.4)
            _knee(axis, run, index)
    _finish_latency(runs, axes, "offered rate, requests/s", "P99 ")
    return figure


def latency_over_time(runs: Sequence[Document]) -> Figure:
    """Latency of every completed request over the moment it was sent, and its P99."""
    figure, axes = sheet(f"Latency of each request: {_head(runs[0])}", 2, 6.0)
    for index, run in enumerate(runs):
        colour = COLOURS[index % 7]
        for axis, metric in zip(axes, ("ttft", "tpot"), strict=True):
            points = [point for window in run["windows"] for point in _points(window, metric)]
            axis.plot(*zip(*points, strict=True), ".", color=colour) if points else None
            p99 = _middle(run["windows"], f"p99_{metric}_ms")
            axis.axhline(p99, color=colour, label=f"{_named(run, index)}: P99 {p99:.3g} ms")
    _finish_latency(runs, axes, "seconds since the window began")
    return figure


def _finish_latency(runs: Sequence[Document], axes: Sequence[Axes], xlabel: str, rank: str = "") -> None:
    for axis, metric in zip(axes, ("ttft", "tpot"), strict=True):
        _objective(axis, runs[0]["slo"].get(metric), axis.get_ylim()[1], axis.axhline)
        axis.set(xlabel=xlabel, ylabel=f"{rank}{NAMES[metric]}, ms", ylim=(0, None))
        axis.legend(fontsize=8)


def _objective(axis: Axes, limit: float | None, reach: float, line: Callable[..., object]) -> None:
    """The SLO's line where it is near the data, which end at `reach`; else a note: axes follow the data."""
    if limit is None:
        return
    if limit <= 1.5 * reach:
        line(limit, color="#555555", linestyle="--", label=f"SLO {limit:g} ms")
    else:
        axis.plot([], [], " ", label=f"SLO {limit:g} ms: beyond this axis")


def _knee(axis: Axes, run: Document, index: int) -> None:
    knee = knee_of(run)
    if knee is not None:
        axis.axvline(
            knee, color=COLOURS[index % 7], linestyle=":", label=f"knee {_named(run, index)}: {knee:.3g}/s"
        )


def knee_of(run: Document) -> float | None:
    """The rate that the search found; else the last rate before the first that was not sustained."""
    if run["search"] is not None:
        return float(run["search"]["max_request_goodput"]) or None
    knee = None
    for rate, windows in _rates(run).items():
        if 2 * sum(window["sustained"] for window in windows) <= len(windows):
            break
        knee = rate
    return knee


def _rates(run: Document) -> dict[float, list[JsonObject]]:
    rates: dict[float, list[JsonObject]] = {}
    for window in run["windows"]:
        if window["request_rate"] is not None:
            rates.setdefault(window["request_rate"], []).append(window)
    return dict(sorted(rates.items()))


def _middle(windows: Sequence[JsonObject], field: str) -> float:
    values = [window[field] for window in windows if window[field] is not None]
    return statistics.median(values) if values else float("nan")


def goodput_bars(runs: Sequence[Document]) -> Figure:
    """Good requests per second within completed ones, by load; whiskers are the range of repeats."""
    windows = sorted((w for run in runs for w in run["windows"]), key=lambda w: w["request_rate"] or 0.0)
    labels = list(dict.fromkeys(window["label"] for window in windows))
    figure, (axis,) = sheet(f"Goodput (a): {_head(runs[0])}", 1, max(4.8, 1.1 * len(labels) * len(runs)))
    width = 0.8 / len(runs)
    for index, run in enumerate(runs):
        grouped = by_label(run)
        for place, label in enumerate(labels):
            windows = grouped.get(label, [])
            if not windows:
                continue
            at = place + (index - (len(runs) - 1) / 2) * width
            done, good = (_middle(windows, f"request_{name}") for name in ("throughput", "goodput"))
            colour = COLOURS[index % 7]
            axis.bar(at, done, width * 0.9, color=colour, alpha=0.25)
            axis.bar(at, good, width * 0.9, color=colour, label=_named(run, index) if not place else None)
            values = [window["request_goodput"] for window in windows]
            axis.vlines(at, min(values), max(values), color="black")
            share = _middle(windows, "slo_attainment")
            axis.annotate(f"{share:.0%}", (at, max(done, *values)), ha="center", va="bottom", fontsize=8)
    axis.set_xticks(range(len(labels)), labels)
    # Bars of one or two loads are as narrow as those of three.
    side = max(0.5, 2 - len(labels) / 2)
    axis.set_xlim(-side, len(labels) - 1 + side)
    axis.set(xlabel="load", ylabel="requests/s: good (dark), completed (pale)")
    axis.margins(y=0.15)
    axis.legend(fontsize=8)
    return figure


def cdfs(runs: Sequence[Document]) -> Figure:
    """Share of all sent requests that were at least as fast; failures never arrive at 1."""
    lines = [
        (f"{_named(run, index)} {label}" if len(runs) > 1 else label, windows)
        for index, run in enumerate(runs)
        for label, windows in by_label(run).items()
    ]
    figure, axes = sheet(f"Latency distributions: {_head(runs[0])}", 3)
    for axis, metric in zip(axes, NAMES, strict=True):
        for index, (label, windows) in enumerate(lines):
            values = sorted(value for window in windows for _, value in _points(window, metric))
            sent = sum(len(window["errors"]) for window in windows)
            shares = [(place + 1) / sent for place in range(len(values))]
            axis.step(values, shares, where="post", color=COLOURS[index % 7], label=label)
        _objective(axis, runs[0]["slo"].get(metric), axis.get_xlim()[1], axis.axvline)
        axis.set(xlabel=f"{NAMES[metric]}, ms", ylim=(0, 1.02), xlim=(0, None))
        axis.legend(fontsize=8, loc="lower right")
    axes[0].set_ylabel("share of sent requests")
    return figure


def _points(window: JsonObject, metric: str) -> list[tuple[float, float]]:
    """(seconds, milliseconds) of completed requests: when each was sent, and its latency."""
    rows = zip(*(window[name] for name in _COLUMNS), strict=True)
    return [
        (sent, 1000 * {"ttft": ttft, "tpot": (end - ttft) / max(tokens - 1, 1), "e2el": end}[metric])
        for sent, ttft, end, tokens, error in rows
        if not error
    ]


def waterfall(runs: Sequence[Document]) -> Figure | None:
    """The request whose end-to-end latency is the median of those with the most pictures, stage by stage."""
    chosen = _typical(runs[-1])
    if chosen is None:
        return None
    window, index = chosen
    stages, total = window["stages"][index], window["latencies"][index]
    figure, (axis,) = sheet(f"One request, pictures: {window['images'][index]}, {_head(runs[-1])}", 1, 8.0)
    rows = [("client: to first token", 0.0, window["ttfts"][index]), ("client: to the end", 0.0, total)]
    rows += place_stages(stages, total)
    for place, (_, begin, seconds) in enumerate(rows):
        axis.barh(place, seconds * 1000, left=begin * 1000, color=COLOURS[6 if place < 2 else place % 6])
        axis.annotate(f" {seconds * 1000:.1f}", ((begin + seconds) * 1000, place), va="center", fontsize=8)
    axis.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axis.invert_yaxis()
    axis.grid(axis="x", alpha=0.3)
    axis.set(xlabel="ms since it was sent; the server's stages, one after another, add up to the whole")
    axis.margins(x=0.1)
    return figure


def place_stages(stages: Mapping[str, float], total: float) -> list[tuple[str, float, float]]:
    """(row, begin, length) in seconds, each from the end of the one before, together `total`.

    Servers report lengths only. The PD worker queues a request while its pictures are encoded and saved:
    what is left of that is the load of the embeddings and the wait for a step. The rest is the proxy's.
    """
    fetch, queue, encode, save, prefill, decode = (
        stages.get(name, 0.0) for name in ("fetch", "queue", "encode", "save", "prefill", "decode")
    )
    left = total
    taken = {}
    # Later stages first: where rounded lengths exceed the whole, the earlier ones are cut.
    for name, seconds in (
        ("decode", decode),
        ("prefill", prefill),
        ("save", save),
        ("encode", encode),
        ("fetch", fetch),
        ("load, wait for a step", max(queue - encode - save, 0.0)),
    ):
        taken[name] = min(seconds, left)
        left -= taken[name]
    taken["proxy, network"] = left
    rows, begin = [], 0.0
    for name in ("fetch", "proxy, network", "encode", "save", "load, wait for a step", "prefill", "decode"):
        if taken[name] > 0:
            rows.append((name, begin, taken[name]))
            begin += taken[name]
    return rows


def _typical(run: Document) -> tuple[JsonObject, int] | None:
    rows = [
        (window["images"][index], window["latencies"][index], window, index)
        for window in run["windows"]
        for index, error in enumerate(window["errors"])
        if not error and window["stages"][index]
    ]
    if not rows:
        return None
    pictures = max(row[0] for row in rows)
    rows = sorted((row for row in rows if row[0] == pictures), key=lambda row: row[1])
    return rows[len(rows) // 2][2:]


def queue_depths(runs: Sequence[Document]) -> Figure:
    """Requests in flight as the client saw them, and the server's own gauges, over the longest window."""
    run = runs[-1]
    window = max(run["windows"], key=lambda one: one["duration"])
    figure, (axis,) = sheet(f"Queues at {window['label']}: {_head(run)}", 1, 8.0)
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
        points = [(sample["at"], sample[name]) for sample in samples if name in sample]
        axis.plot(
            *zip(*points, strict=True), color=COLOURS[(index + 1) % 7], marker=".", label=f"server: {name}"
        )
    axis.set(xlabel="seconds since the window began", ylabel="requests or items", ylim=(0, None))
    axis.legend(fontsize=8)
    return figure


PLOTS: dict[str, Callable[[Sequence[Document]], Figure | None]] = {
    "latency": latency,
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
