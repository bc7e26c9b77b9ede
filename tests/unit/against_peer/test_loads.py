"""Loads, their order of systems and their seeds."""

from __future__ import annotations

import pytest

from benchmarks.against_peer.loads import LOADS, Load, chosen, seed_of, turn
from triptych.errors import ConfigError


def test_patterns_choose_loads_and_none_chooses_all() -> None:
    assert [load.name for load in chosen(["text*@16", "image@1"], LOADS)] == [
        "text@16",
        "text-450@16",
        "image@1",
    ]
    assert chosen([], LOADS) == list(LOADS)
    with pytest.raises(ConfigError, match=r"images-4@16"):
        chosen(["video@1"], LOADS)


def test_a_round_has_some_requests_even_one_at_a_time() -> None:
    assert [Load("text", at_once).requests(2) for at_once in (1, 4, 16)] == [4, 8, 32]


def test_systems_take_turns_in_going_first() -> None:
    assert [turn(["vllm", "before", "triptych"], number)[0] for number in range(4)] == [
        "vllm",
        "triptych",
        "vllm",
        "triptych",
    ]


def test_no_two_rounds_share_requests() -> None:
    seeds = {seed_of(model, load, n) for model in ("tiny", "small") for load in LOADS for n in range(20)}
    assert len(seeds) == 2 * len(LOADS) * 20
