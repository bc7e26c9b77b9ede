"""A stage beside its limit."""

from __future__ import annotations

from benchmarks.stages.work import Stage


def test_a_stage_says_which_share_of_its_limit_it_reaches() -> None:
    assert Stage("step", 0.02, 0.015, "reading").row() == ["step", "20", "15", "75%", "reading"]
    assert Stage("preprocess", 0.002).row() == ["preprocess", "2", "–", "–", "–"]
