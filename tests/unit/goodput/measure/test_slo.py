"""Objectives in vLLM's syntax."""

from __future__ import annotations

import math

import pytest

from triptych.base.errors import ConfigError
from triptych.goodput.measure.slo import parse_slo


def test_objectives_are_read_in_milliseconds():
    slo = parse_slo(["ttft:500 tpot:50", "e2el:8000"])
    assert str(slo) == "ttft:500 tpot:50 e2el:8000"
    assert slo.seconds("ttft") == 0.5
    assert parse_slo(["tpot:50"]).seconds("ttft") == math.inf


def test_a_limit_is_met_exactly_and_missed_above():
    slo = parse_slo(["ttft:500,tpot:50"])
    assert slo.misses({"ttft": 0.5, "tpot": 0.05, "e2el": 9.0}) == ()
    assert slo.misses({"ttft": 0.501, "tpot": 0.06, "e2el": 9.0}) == ("ttft", "tpot")


@pytest.mark.parametrize(
    "word", ["itl:5", "ttft", "ttft:", "ttft:-1", "ttft:nan", "ttft:inf", "ttft:1 ttft:2"]
)
def test_what_is_no_objective_is_refused_by_name(word):
    with pytest.raises(ConfigError, match="--slo"):
        parse_slo([word])
