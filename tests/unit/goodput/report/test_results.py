"""Result files, comparisons, tables and plots of windows whose figures are known."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from PIL import Image
from rich.console import Console

from triptych.base.errors import ConfigError
from triptych_bench.goodput.load.job import RequestRecord, Target, WindowReport
from triptych_bench.goodput.measure.figures import drift_of, judge, summarise
from triptych_bench.goodput.measure.search import SearchLimits, Verdict, search
from triptych_bench.goodput.measure.slo import parse_slo, preset
from triptych_bench.goodput.measure.window import MeasuredWindow, QueueSample, RunSettings, make_job
from triptych_bench.goodput.report.comparison import compare_results, compare_searches, ratio
from triptych_bench.goodput.report.display import Display
from triptych_bench.goodput.report.machine import Machine
from triptych_bench.goodput.report.plots import (
    knee_of,
    latency_against_rate,
    latency_over_time,
    place_stages,
    plt,
    save_plots,
)
from triptych_bench.goodput.report.result import document, read_result, write_json

SLO = parse_slo(["ttft:200 tpot:50"])
SETTINGS = RunSettings(
    Target("http://x", "m", api_key="secret"), preset("mix").workload, "mix", SLO, requests=40
)
MACHINE = Machine("abc", {"python": "3.11"}, "chip", 2, 8.0, "Linux", "triptych bench", 0.1, 1.9)


def window(
    rate: float, ttft: float = 0.1, failures: int = 0, late: float = 0.0, seed: int = 0
) -> MeasuredWindow:
    stages = {"queue": 0.02, "encode": 0.01, "save": 0.002, "load": 0.005, "prefill": 0.03, "decode": 0.1}
    records = tuple(
        RequestRecord(
            index=i,
            planned=i / rate,
            sent=i / rate + late,
            images=i % 3,
            ttft=ttft + i * 1e-4,
            e2e=ttft + i * 1e-4 + 0.1,
            itls=(0.01,) * 10,
            prompt_tokens=50,
            output_tokens=11,
            asked_tokens=11,
            error="HTTP 503: full" if i < failures else "",
            stages={} if i < failures else stages,
            caches=("store",) * (i % 3),
        )
        for i in range(40)
    )
    report = WindowReport(records, cpu_share=0.1, wall=40 / rate, started=1000.0)
    queues = tuple(QueueSample(1000.0 + i, {"waiting": float(i % 4)}) for i in range(5))
    return MeasuredWindow(
        SETTINGS.at(rate),
        seed,
        report,
        summarise(records, SLO),
        drift_of(records, SLO),
        judge(records, SLO),
        queues,
    )


def run(*windows: MeasuredWindow, **more) -> dict:
    return document(windows, more.pop("machine", MACHINE), **more)


def test_a_result_names_its_machine_and_contains_no_api_key(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, run(window(4.0)))
    text = path.read_text()
    assert "secret" not in text
    machine = read_result(path)["machine"]
    assert machine.keys() >= {"commit", "versions", "chip", "command", "load_before", "load_after", "loaded"}
    assert machine["loaded"] is False
    loaded = run(window(4.0), machine=replace(MACHINE, load_before=1.0))
    assert loaded["machine"]["loaded"] is True


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "other"}'])
def test_what_is_no_result_is_refused_by_name(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"a\.json"):
        read_result(path)


def test_windows_in_turns_are_compared_pair_by_pair():
    found = ratio("request_goodput", [1.0, 2.0, 4.0], [2.0, 3.0, 8.0], paired=True)
    assert (found.ratio, found.low, found.high) == (1.5, 1.5, 2.0)
    assert found.certain


def test_results_are_compared_load_by_load():
    a, b = run(window(2.0), window(4.0), window(4.0)), run(window(4.0, ttft=0.15), window(8.0))
    found = compare_results(a, b)
    assert list(found) == ["4/s"]
    by_name = {one.metric: one for one in found["4/s"]}
    assert by_name["median_ttft_ms"].ratio == pytest.approx(0.15195 / 0.10195)
    assert by_name["median_ttft_ms"].windows == (2, 1)


def searched(capacity: float) -> dict:
    found = search(lambda rate: Verdict(rate <= capacity, 0.1), SearchLimits(4.0, highest=64.0))
    return run(window(4.0), search=found)


def test_searched_rates_are_compared_with_the_range_of_their_brackets():
    found = compare_searches(searched(5.0), searched(10.0))
    assert found.ratio == pytest.approx(2.0, rel=0.05)
    assert found.low < found.ratio < found.high
    assert found.certain
    assert compare_searches(searched(5.0), searched(100.0)).high == math.inf


def text_of(show) -> str:
    out = io.StringIO()
    console = Console(file=out, width=160)
    show(Display(console))
    return out.getvalue()


def test_a_comparison_is_better_worse_or_undecided():
    ratios = [
        ratio("request_goodput", [1.0, 1.0], [2.0, 2.0], paired=True),
        ratio("p99_ttft_ms", [1.0, 1.0], [2.0, 2.0], paired=True),
        ratio("p99_tpot_ms", [1.0, 1.0], [0.5, 2.0], paired=True),
    ]
    text = text_of(lambda display: display.ratios("title", ratios, ("A", "B")))
    assert all(word in text for word in ("better", "worse", "open"))


def test_every_plot_of_a_sweep_is_drawn(tmp_path):
    found = run(window(2.0), window(4.0), window(8.0, ttft=0.3), name="one")
    paths = save_plots([found], tmp_path / "p", "png")
    assert [path.name for path in paths] == PLOT_NAMES
    for path in paths:
        with Image.open(path) as image:
            assert image.convert("L").getextrema()[0] < 128


PLOT_NAMES = [f"p-{name}.png" for name in ("latency", "goodput", "cdf", "waterfall", "queues")]


@pytest.mark.parametrize("failures", [0, 40])
def test_every_plot_of_one_rate_is_drawn(tmp_path, failures):
    paths = save_plots([run(window(4.0, failures=failures))], tmp_path / "p", "png")
    assert [path.name for path in paths] == [
        name for name in PLOT_NAMES if not failures or "fall" not in name
    ]


@pytest.mark.parametrize("draw", [latency_against_rate, latency_over_time])
def test_axes_end_with_the_data_and_the_slo_is_a_line_or_a_note(draw):
    found = run(window(2.0, ttft=0.15))
    figure = draw([found])
    ttft, tpot = figure.axes
    # TTFT is up to 154 ms of 200, TPOT is 10 ms of 50.
    assert [text.get_text() for text in ttft.get_legend().get_texts()][-1] == "SLO 200 ms"
    assert [text.get_text() for text in tpot.get_legend().get_texts()][-1] == "SLO 50 ms: beyond this axis"
    assert ttft.get_ylim()[1] > 200 and tpot.get_ylim()[1] < 20
    plt.close(figure)


@pytest.mark.parametrize(
    ("queue", "encode", "total", "rows"),
    [
        # Encode and save are in the queue's time; the proxy has the rest.
        (50, 20, 200, [("proxy, network", 18), ("encode", 20), ("save", 2), ("load, wait for a step", 28)]),
        # The encoder began before the PD worker had the request.
        (10, 40, 200, [("proxy, network", 26), ("encode", 40), ("save", 2)]),
        # Of text.
        (50, 0, 200, [("proxy, network", 18), ("save", 2), ("load, wait for a step", 48)]),
        # Lengths of a busy server that exceed what the client saw.
        (50, 20, 140, [("encode", 8), ("save", 2)]),
    ],
)
def test_rows_of_a_waterfall_follow_one_another_and_add_up(queue, encode, total, rows):
    stages = {
        "fetch": 2,
        "queue": queue,
        "encode": encode,
        "save": 2,
        "load": 4,
        "prefill": 30,
        "decode": 100,
    }
    placed = place_stages(stages, total)
    fetch = [("fetch", 2)] if total > 140 else []
    assert [(name, length) for name, _, length in placed] == [*fetch, *rows, ("prefill", 30), ("decode", 100)]
    ends = [begin + length for _, begin, length in placed]
    assert [begin for _, begin, _ in placed] == [0, *ends[:-1]] and ends[-1] == total


def test_the_three_goodputs_are_explained_under_their_table():
    text = text_of(lambda display: display.windows([window(4.0)]))
    assert (
        text.index("P99 in SLO (c)") < text.index("(a) requests per second that met") < text.index("TTFT ┃")
    )
    assert "(b) their share of the requests sent" in text and "--search" in text


def test_the_knee_is_the_searched_rate_or_the_last_sustained_one():
    sweep = [window(2.0), window(4.0), window(8.0, ttft=0.3), window(16.0)]
    assert knee_of(run(*sweep)) == 4.0
    assert knee_of(run(window(2.0, ttft=0.3))) is None
    found = search(lambda rate: Verdict(rate <= 5.0, 0.1), SearchLimits(4.0))
    assert knee_of(run(*sweep, search=found)) == found.rate


def test_a_window_offers_its_rate_after_its_warm_up():
    job = make_job(replace(SETTINGS, requests=0, seconds=10.0, warm_up=2.0).at(4.0), 7)
    assert (job.warm_up, len(job.schedule)) == (8, 48)
    times = [time for time, _ in job.schedule]
    assert times == sorted(times)
    assert (times[7], times[-1]) == (pytest.approx(2.0), pytest.approx(12.0))
    assert job == make_job(replace(SETTINGS, requests=0, seconds=10.0, warm_up=2.0).at(4.0), 7)
    closed = make_job(replace(SETTINGS, concurrency=4, requests=0), 7)
    assert (closed.warm_up, len(closed.schedule), closed.concurrency) == (4, 44, 4)
