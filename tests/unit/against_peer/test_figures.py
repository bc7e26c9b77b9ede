"""Figures of turns: the step, and ratios of rounds."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.against_peer.loads import OTHERS_LIMIT, Turn, decode_step, quiet, ratios
from support.engine.peer_turns import a_turn
from triptych.goodput.load.job import RequestRecord


def record(sent: float, ttft: float, gaps: list[float], **more: object) -> RequestRecord:
    return RequestRecord(
        0, sent, sent, ttft=ttft, e2e=ttft + sum(gaps), itls=tuple(gaps), output_tokens=len(gaps) + 1, **more
    )


def test_the_step_is_that_of_the_time_in_which_all_decode() -> None:
    first = record(0.0, 1.0, [9.0, 0.1, 0.1, 0.1])  # waits while the second one is prefilled
    second = record(0.0, 9.5, [0.1] * 20, warm_up=True)
    assert decode_step([first, second], 2) == pytest.approx(0.1)


def test_gaps_of_a_prefill_and_of_a_smaller_batch_are_no_steps() -> None:
    first = record(0.0, 1.0, [5.0, 0.2, 0.2])
    second = record(0.0, 6.0, [0.2, 0.2, 0.01, 0.01, 0.01, 0.01])  # alone from 6.4 on
    assert decode_step([first, second], 2) == pytest.approx(0.2)


def test_a_step_of_0_of_tokens_that_came_together_is_no_figure() -> None:
    assert ratios([a_turn("triptych", 0, step_ms=0.0)], [a_turn("vllm", 0, step_ms=2.0)], "step_ms") == []


def test_there_is_no_step_where_never_all_decode_or_a_request_failed() -> None:
    assert decode_step([record(0.0, 1.0, [0.1]), record(5.0, 1.0, [0.1])], 2) is None
    failed = record(0.0, 1.0, [0.1, 0.1], error="gone")
    assert decode_step([record(0.0, 1.0, [0.1, 0.1]), failed], 2) is None


def test_ratios_are_of_the_same_rounds() -> None:
    ours = [a_turn("triptych", 0, req_s=2.0), a_turn("triptych", 1, req_s=9.0), a_turn("triptych", 3)]
    theirs = [a_turn("vllm", 1, req_s=3.0), a_turn("vllm", 0, req_s=4.0)]
    assert ratios(ours, theirs, "req_s") == [0.5, 3.0]
    assert ratios(ours, theirs, "step_ms") == []


def test_a_turn_with_failed_requests_gives_no_ratio() -> None:
    assert ratios([a_turn("triptych", 0)], [a_turn("vllm", 0, failed=1)], "req_s") == []


def test_a_round_that_was_measured_again_counts_once() -> None:
    again = a_turn("vllm", 0, req_s=7.0)
    assert quiet([a_turn("vllm", 0), a_turn("vllm", 1), again]) == [again, a_turn("vllm", 1)]


def test_a_turn_beside_other_work_is_no_figure() -> None:
    loud = a_turn("vllm", 0, req_s=7.0, others=2 * OTHERS_LIMIT)
    assert quiet([a_turn("vllm", 0), loud, a_turn("vllm", 1, others=OTHERS_LIMIT)]) == [
        a_turn("vllm", 0),
        a_turn("vllm", 1, others=OTHERS_LIMIT),
    ]


def test_a_turn_is_kept_as_a_line_of_json() -> None:
    kept = a_turn("vllm", 0, step_ms=12.5)
    assert msgspec.json.decode(msgspec.json.encode(kept), type=Turn) == kept
