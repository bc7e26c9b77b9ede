"""What the page of prefill and decode apart says of its rounds."""

from __future__ import annotations

from benchmarks.prefill_decode import BOTH, Figures, good_requests, rows, systems


def figures(ttft: float, tpot: float) -> Figures:
    return {("text", "median TTFT"): ttft, ("text", "P99 TPOT"): tpot}


def test_a_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    taken = {
        BOTH: [figures(10, 4), figures(20, 4), figures(40, 4)],
        "1 P + 1 D": [figures(20, 2), figures(20, 3), figures(20, 1)],
    }
    assert rows(taken) == [
        ["text", "median TTFT", "20", "20: 1.00"],
        ["text", "P99 TPOT", "4", "2: 0.50"],
    ]


def test_where_nothing_was_good_beside_it_there_is_no_ratio() -> None:
    taken = {BOTH: [figures(0, 4), figures(0, 4)], "1 P + 1 D": [figures(2, 2), figures(4, 2)]}
    assert rows(taken)[0] == ["text", "median TTFT", "0", "3: -"]


def test_every_threshold_is_a_system_beside_the_workers_that_do_both() -> None:
    names = list(systems([0, 256]))
    assert names == [BOTH, "1 P + 1 D from 0 tokens", "1 P + 1 D from 256 tokens"]
    assert systems([256])[names[2]][1][-1] == "256"


def test_a_request_is_good_whose_first_and_further_tokens_are_in_time() -> None:
    window = {"ttfts": [0.2, 0.2, 0.6, 0.0, 0.2], "latencies": [0.7, 0.71, 1.0, 9.0, 0.2]}
    window |= {"output_lens": [101, 101, 101, 0, 1]}
    assert good_requests(window, 500, 5) == 2
    assert good_requests(window, 500, 6) == 3
    assert good_requests(window, 700, 6) == 4
