"""Result files, comparisons, tables and plots of windows whose figures are known."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace

import pytest
from PIL import Image
from rich.console import Console

from triptych.base.errors import ConfigError
from triptych.goodput.load.job import RequestRecord, Target, WindowReport
from triptych.goodput.measure.figures import drift_of, judge, summarise
from triptych.goodput.measure.search import SearchLimits, Verdict, search
from triptych.goodput.measure.slo import parse_slo, preset
from triptych.goodput.measure.window import MeasuredWindow, QueueSample, RunSettings, depths_of, make_job
from triptych.goodput.report.comparison import (
    compare_results,
    compare_searches,
    compare_windows,
    differences,
    ratio,
)
from triptych.goodput.report.display import Display
from triptych.goodput.report.machine import Machine, describe
from triptych.goodput.report.plots import knee_of, place_stages, save_plots
from triptych.goodput.report.result import document, read_result, write_csv, write_json

SLO = parse_slo(["ttft:200 tpot:50"])
SETTINGS = RunSettings(
    Target("http://x", "m", api_key="secret"), preset("mix").workload, "mix", SLO, requests=40
)
MACHINE = Machine("abc", {"python": "3.11"}, "chip", 2, 8.0, "Linux", "triptych bench", 0.1, 1.9)

#: What `vllm bench serve --save-result` calls its numbers and lists.
_FIELDS = (
    "duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput "
    "output_throughput total_token_throughput input_lens output_lens ttfts itls start_times errors "
    "mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms median_tpot_ms std_tpot_ms "
    "p99_tpot_ms mean_itl_ms median_itl_ms std_itl_ms p99_itl_ms mean_e2el_ms median_e2el_ms std_e2el_ms "
    "p99_e2el_ms backend model_id num_prompts request_rate burstiness max_concurrency "
)


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


def test_a_window_has_vllms_field_names_and_our_own():
    found = run(window(4.0, failures=10))["windows"][0]
    assert set(_FIELDS.split()) <= found.keys()
    assert (found["num_prompts"], found["completed"], found["failed"]) == (40, 30, 10)
    assert found["slo_attainment"] == 0.75
    assert found["request_goodput"] == pytest.approx(30 / found["duration"])
    assert found["errors"].count("HTTP 503: full") == 10
    assert found["queue_times"][20] == 0.02
    assert found["queue_depths"][1] == {"at": 1.0, "waiting": 1.0}
    assert len(found["ttfts"]) == len(found["itls"]) == 40


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


def test_infinite_tails_are_null_in_json(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, run(window(4.0, failures=40)))
    assert json.loads(path.read_text())["windows"][0]["p99_ttft_ms_with_failures"] is None


def test_the_table_file_has_a_row_per_window_and_no_lists(tmp_path):
    path = tmp_path / "a.csv"
    write_csv(path, run(window(2.0), window(4.0)))
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    assert [row["request_rate"] for row in rows] == ["2.0", "4.0"]
    assert "ttfts" not in rows[0]


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "other"}'])
def test_what_is_no_result_is_refused_by_name(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"a\.json"):
        read_result(path)


def test_this_machine_is_described():
    found = describe(0.0)
    assert found.cores > 0 and found.chip and found.versions["triptych"]


def test_ratios_are_of_medians_with_the_range_of_all_pairs():
    found = ratio("request_goodput", [1.0, 2.0, 4.0], [2.0, 6.0, 8.0], paired=False)
    assert (found.ratio, found.low, found.high) == (3.0, 0.5, 8.0)
    assert not found.certain


def test_windows_in_turns_are_compared_pair_by_pair():
    found = ratio("request_goodput", [1.0, 2.0, 4.0], [2.0, 3.0, 8.0], paired=True)
    assert (found.ratio, found.low, found.high) == (1.5, 1.5, 2.0)
    assert found.certain


def test_one_window_each_is_never_certain():
    assert not ratio("request_goodput", [1.0], [2.0], paired=True).certain


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


def test_a_search_that_found_nothing_has_no_ratio():
    assert compare_searches(searched(5.0), searched(0.0)) is None
    assert compare_searches(searched(5.0), run(window(4.0))) is None


def test_metrics_that_a_window_lacks_are_left_out():
    assert [
        one.metric for one in compare_windows([{"request_goodput": 1.0}], [{"request_goodput": 2.0}])
    ] == ["request_goodput"]


def test_other_differences_between_results_are_reported():
    other = replace(MACHINE, chip="another", load_before=5.0)
    told = differences(run(window(4.0)), run(window(4.0), machine=other))
    assert any("another chip" in line for line in told)
    assert any("B was made on a loaded machine" in line for line in told)
    assert differences(run(window(4.0)), run(window(4.0))) == []


def text_of(show) -> str:
    out = io.StringIO()
    console = Console(file=out, width=160)
    show(Display(console))
    return out.getvalue()


def test_the_table_shows_all_three_goodputs_and_every_doubt():
    text = text_of(lambda display: display.windows([window(4.0), window(8.0, failures=10, late=0.01)]))
    assert "75.0%" in text and "100.0%" in text
    assert "10 failed: HTTP 503: full" in text
    assert "sent 10.0 ms late at P99" in text
    assert "P99 of 40 requests is the slowest of them" in text
    assert "not sustained: P99 ttft inf ms over 200" in text


def test_a_loaded_machine_is_marked():
    assert "no figure here is a performance claim" in text_of(
        lambda display: display.machine(replace(MACHINE, load_before=3.0))
    )


@pytest.mark.parametrize(
    ("capacity", "words"),
    [
        (5.0, "(c): 4.97 requests/s (4 of 4 windows; 5.19 is too much)"),
        (0.0, "(c): none"),
        (1e9, "at least 1e+03 requests/s"),
    ],
)
def test_the_search_is_summarised_in_a_sentence(capacity, words):
    found = search(lambda rate: Verdict(rate <= capacity, 0.1), SearchLimits(4.0))
    assert words in text_of(lambda display: display.search(found))


def test_a_comparison_is_better_worse_or_undecided():
    ratios = [
        ratio("request_goodput", [1.0, 1.0], [2.0, 2.0], paired=True),
        ratio("p99_ttft_ms", [1.0, 1.0], [2.0, 2.0], paired=True),
        ratio("p99_tpot_ms", [1.0, 1.0], [0.5, 2.0], paired=True),
    ]
    text = text_of(lambda display: display.ratios("title", ratios, ("A", "B")))
    assert all(word in text for word in ("better", "worse", "open"))


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_every_plot_of_a_sweep_is_drawn(tmp_path, kind):
    found = run(window(2.0), window(4.0), window(8.0, ttft=0.3), name="one")
    paths = save_plots([found], tmp_path / "p", kind)
    assert [path.name for path in paths] == [
        f"p-{name}.{kind}" for name in ("latency", "goodput", "cdf", "waterfall", "queues")
    ]
    if kind == "png":
        for path in paths:
            with Image.open(path) as image:
                assert image.convert("L").getextrema()[0] < 128


def test_two_runs_are_drawn_together_and_one_without_rates_or_stages_too(tmp_path):
    silent = run(window(4.0, failures=40), name="b")
    assert len(save_plots([run(window(2.0), name="a"), silent], tmp_path / "p", "svg")) == 3


def test_the_knee_is_the_searched_rate_or_the_last_sustained_one():
    sweep = [window(2.0), window(4.0), window(8.0, ttft=0.3), window(16.0)]
    assert knee_of(run(*sweep)) == 4.0
    assert knee_of(run(window(2.0, ttft=0.3))) is None
    found = search(lambda rate: Verdict(rate <= 5.0, 0.1), SearchLimits(4.0))
    assert knee_of(run(*sweep, search=found)) == found.rate


def test_stages_lead_up_to_prefill_and_decode_ends_the_request():
    stages = {
        "fetch": 0.01,
        "queue": 0.3,
        "encode": 0.1,
        "save": 0.05,
        "load": 0.1,
        "prefill": 0.2,
        "decode": 0.4,
    }
    placed = {name: (round(begin, 6), length) for name, begin, length in place_stages(stages, 1.0)}
    assert placed["decode"] == (0.6, 0.4)
    assert placed["prefill"] == (0.4, 0.2)
    assert placed["queue"] == (0.1, 0.3)
    assert placed["load"] == (0.3, 0.1)
    assert placed["save"] == (0.25, 0.05)
    assert placed["encode"] == (0.15, 0.1)
    assert placed["fetch"] == (0.0, 0.01)
    assert place_stages({}, 1.0) == []


def test_queue_depths_are_sums_over_pages_of_known_gauges():
    page = "# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting 2\n# TYPE x gauge\nx 9\n"
    assert depths_of([page, page]) == {"waiting": 4.0}


def test_a_window_offers_its_rate_after_its_warm_up():
    job = make_job(replace(SETTINGS, requests=0, seconds=10.0, warm_up=2.0).at(4.0), 7)
    assert (job.warm_up, len(job.schedule)) == (8, 48)
    times = [time for time, _ in job.schedule]
    assert times == sorted(times)
    assert (times[7], times[-1]) == (pytest.approx(2.0), pytest.approx(12.0))
    assert job == make_job(replace(SETTINGS, requests=0, seconds=10.0, warm_up=2.0).at(4.0), 7)
    closed = make_job(replace(SETTINGS, concurrency=4, requests=0), 7)
    assert (closed.warm_up, len(closed.schedule), closed.concurrency) == (4, 44, 4)


def test_a_trace_that_is_all_warm_up_is_refused(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"time": 0, "text_tokens": 1, "output_tokens": 1}\n')
    with pytest.raises(ConfigError, match="--warm-up"):
        make_job(replace(SETTINGS, trace=str(path)), 0)


def test_a_ramp_keeps_its_steepness_at_another_rate():
    arrivals = replace(SETTINGS.arrivals, kind="ramp", rate=2.0, ramp_to=6.0)
    assert replace(SETTINGS, arrivals=arrivals).at(4.0).arrivals.ramp_to == pytest.approx(12.0)
    assert math.isfinite(SETTINGS.at(4.0).arrivals.rate)


def test_requests_with_and_without_pictures_are_reported_apart():
    mixed = window(2.0)
    fields = document([mixed], MACHINE)["windows"][0]["by_kind"]
    assert (fields["text"]["num_prompts"], fields["images"]["num_prompts"]) == (14, 26)
    assert fields["text"]["p99_tpot_ms"] == pytest.approx(10.0)
    text = [record for record in mixed.report.records if not record.images]
    alone = replace(mixed, report=replace(mixed.report, records=tuple(text)))
    assert document([alone], MACHINE)["windows"][0]["by_kind"] == {}


def test_an_unknown_metric_of_a_ratio_needs_the_better_direction():
    assert not ratio("p90_tpot_ms", [2.0, 2.0], [1.0, 1.1], paired=True, more_is_better=False).more_is_better
