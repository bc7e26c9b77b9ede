"""Figures of turns and trials: the step, ratios of rounds, answers with other tokens."""

from __future__ import annotations

import pytest

from benchmarks.against_peer.loads import Turn, decode_step, ratios
from benchmarks.against_peer.trials import Trial, totals
from triptych_bench.goodput.load.job import RequestRecord


def a_turn(system: str, number: int, **more: object) -> Turn:
    fields = {
        "model": "small", "load": "text@16", "seed": 1, "date": "2026-11-23 09:00", "commit": "abc",
        "chip": "chip", "requests": 32, "failed": 0, "others": 0.0, "req_s": 1.0,
        "ttft_ms": 100.0, "tpot_ms": 50.0, "cpu_s": 0.5,
    }  # fmt: skip
    return Turn(**(fields | {"system": system, "number": number} | more))


def record(sent: float, ttft: float, gaps: list[float], **more: object) -> RequestRecord:
    return RequestRecord(
        0, sent, sent, ttft=ttft, e2e=ttft + sum(gaps), itls=tuple(gaps), output_tokens=len(gaps) + 1, **more
    )


def test_gaps_of_a_prefill_and_of_a_smaller_batch_are_no_steps() -> None:
    first = record(0.0, 1.0, [5.0, 0.2, 0.2])
    second = record(0.0, 6.0, [0.2, 0.2, 0.01, 0.01, 0.01, 0.01])  # alone from 6.4 on
    assert decode_step([first, second], 2) == pytest.approx(0.2)


def test_ratios_are_of_the_same_rounds() -> None:
    ours = [a_turn("triptych", 0, req_s=2.0), a_turn("triptych", 1, req_s=9.0), a_turn("triptych", 3)]
    theirs = [a_turn("vllm", 1, req_s=3.0), a_turn("vllm", 0, req_s=4.0)]
    assert ratios(ours, theirs, "req_s") == [0.5, 3.0]
    assert ratios(ours, theirs, "step_ms") == []


def test_a_turn_with_failed_requests_gives_no_ratio() -> None:
    assert ratios([a_turn("triptych", 0)], [a_turn("vllm", 0, failed=1)], "req_s") == []


def test_an_answer_is_other_than_the_right_one_only_where_it_came() -> None:
    right = Trial("right", "nothing", 0, 1.0, [], [[1, 2], [3, 4], [5, 6]], [], [], "photos")
    theirs = Trial("replicas", "nothing", 0, 2.0, [1.0, 1.0], [[1, 2], [3, 9], []], ["gone"], [], "photos")
    assert totals([theirs], [right, theirs]) == ["3", "1", "1", "1"]
