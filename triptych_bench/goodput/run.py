"""The three things the harness does: measure one target, compare two results, measure two in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from triptych.base.errors import ConfigError
from triptych.base.progress import Progress
from triptych.base.types import JsonObject
from triptych_bench.goodput.launch import calibrate, find_model
from triptych_bench.goodput.load.job import Target
from triptych_bench.goodput.measure.search import SearchLimits, SearchResult, Verdict, search
from triptych_bench.goodput.measure.window import MeasuredWindow, RunSettings, measure
from triptych_bench.goodput.report.comparison import (
    compare_results,
    compare_searches,
    compare_windows,
    differences,
)
from triptych_bench.goodput.report.display import Display, summary_of
from triptych_bench.goodput.report.machine import describe, load_average
from triptych_bench.goodput.report.plots import save_plots
from triptych_bench.goodput.report.result import document, read_result, window_fields, write_csv, write_json

#: Windows of one run never share a seed: no cache may answer for an earlier window's requests.
_SEED_STEP = 1000


@dataclass(frozen=True, slots=True)
class Output:
    """Where results go: STEM.json, STEM.csv and STEM-*.png or .svg."""

    stem: Path
    plots: str = "png"
    name: str = ""


@dataclass(frozen=True, slots=True)
class Course:
    """The windows to run: every rate `repeats` times, then the search, if there is one."""

    rates: tuple[float, ...] = ()
    repeats: int = 1
    search: SearchLimits | None = None


def ready(settings: RunSettings, words_per_token: float = 0.0) -> RunSettings:
    """The settings with the target's model and its tokenizer's words per token."""
    target = find_model(settings.target)
    return replace(settings, target=target, words_per_token=words_per_token or calibrate(target))


class Bench:
    """Runs windows of one target."""

    def __init__(
        self,
        settings: RunSettings,
        display: Display,
        metrics_urls: Sequence[str] = (),
        load_before: float | None = None,
    ) -> None:
        self.settings = settings
        self.windows: list[MeasuredWindow] = []
        self._display = display
        self._metrics_urls = metrics_urls
        self._load_before = load_average() if load_before is None else load_before

    def window(self, settings: RunSettings, seed: int | None = None) -> MeasuredWindow:
        if seed is None:
            seed = settings.seed * _SEED_STEP + len(self.windows)
        with self._display.progress(settings.label) as show:
            result = measure(settings, seed, self._metrics_urls, show)
        self.windows.append(result)
        return result

    def sweep(self, course: Course) -> None:
        """Every rate once, then every rate again: what changes over time then touches all of them."""
        rounds = course.repeats * ([self.settings.at(rate) for rate in course.rates] or [self.settings])
        with Progress("all windows", len(rounds), "windows") as windows:
            for settings in rounds:
                self.window(settings)
                windows.advance()

    def search(self, limits: SearchLimits) -> SearchResult:
        if not self.settings.slo.limits:
            raise ConfigError("--search needs --slo: say what a sustained rate has to keep to")

        def window(rate: float) -> Verdict:
            verdict = self.window(self.settings.at(rate)).verdict
            windows.advance()
            self._display.say(f"{rate:.4g}/s: {'sustained' if verdict.sustained else verdict.why}")
            return verdict

        with Progress("search", unit="windows") as windows:
            return search(window, limits)

    def document(self, **more: Any) -> JsonObject:
        return document(self.windows, describe(self._load_before), **more)

    def machine(self) -> None:
        self._display.machine(describe(self._load_before))


def run_goodput(
    bench: Bench, course: Course, output: Output, display: Display, startup: dict[str, float] | None = None
) -> None:
    """Measures, shows and writes."""
    if course.rates or course.search is None:
        bench.sweep(course)
    results = bench.search(course.search) if course.search is not None else None
    result = bench.document(name=output.name, search=results, startup=startup)
    display.windows(bench.windows)
    if results is not None:
        display.search(results)
    bench.machine()
    for path in write_all(result, output):
        display.say(f"wrote {path}")


def write_all(result: JsonObject, output: Output) -> list[Path]:
    """The paths of what was written."""
    output.stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [output.stem.with_name(output.stem.name + ending) for ending in (".json", ".csv")]
    write_json(paths[0], result)
    write_csv(paths[1], result)
    if output.plots != "none":
        paths += save_plots([read_result(paths[0])], output.stem, output.plots)
    return paths


def run_compare(paths: tuple[Path, Path], output: Output | None, display: Display) -> None:
    """Ratios of two results by load, and plots of both if asked."""
    a, b = (read_result(path) for path in paths)
    display.say(f"A  {summary_of(a)}\nB  {summary_of(b)}")
    result = compare_results(a, b)
    rates = compare_searches(a, b)
    if rates is not None:
        display.ratios("highest sustained rate (c); the range is that of the brackets", [rates], ("A", "B"))
    if not result and rates is None:
        raise ConfigError(f"{paths[0]} and {paths[1]} have no load in common: nothing to compare")
    for label, ratios in result.items():
        display.ratios(label, ratios, ("A", "B"))
    for difference in differences(a, b):
        display.warn(difference)
    if output is not None and output.plots != "none":
        named = [result | {"name": result["name"] or side} for result, side in ((a, "A"), (b, "B"))]
        for path in save_plots(named, output.stem, output.plots):
            display.say(f"wrote {path}")


def beside_each_other(a: Target, b: Target) -> str:
    """What to know of two servers of one machine; empty for one server, or two machines."""
    one, other = urlsplit(a.url), urlsplit(b.url)
    if one.hostname != other.hostname or one.netloc == other.netloc:
        return ""
    return (
        f"A and B are both on {one.hostname}: of two clusters on one machine the one that started first may "
        "keep a core to itself (--keep-core), so measure each alone with `bench goodput`, and `bench compare`"
    )


def run_ab(a: Bench, b: Bench, repeats: int, output: Output, display: Display) -> None:
    """Windows in turns, A B, B A, …, of the same requests; ratios window by window."""
    if warning := beside_each_other(a.settings.target, b.settings.target):
        display.warn(warning)
    with Progress("all windows", 2 * repeats, "windows") as windows:
        for repeat in range(repeats):
            seed = a.settings.seed * _SEED_STEP + repeat
            for bench in (a, b) if repeat % 2 == 0 else (b, a):
                bench.window(bench.settings, seed)
                windows.advance()
    for side, bench in (("a", a), ("b", b)):
        display.windows(bench.windows)
        stem = output.stem.with_name(f"{output.stem.name}-{side}")
        for path in write_all(bench.document(name=side.upper()), replace(output, stem=stem)):
            display.say(f"wrote {path}")
    first, second = ([window_fields(window) for window in bench.windows] for bench in (a, b))
    ratios = compare_windows(first, second, paired=True)
    display.ratios(f"B against A in turns, {repeats} repeats", ratios, ("A", "B"))
    a.machine()
