"""The page and the targets' figures, of turns that are known."""

from __future__ import annotations

import pytest

from benchmarks.targets import TARGETS
from benchmarks.vllm_fleet.page import LOADS, page, reached
from support.engine.peer_turns import a_turn

LOAD = "image-50@8"
TURNS = [
    *(a_turn("vllm-epd", n, model="tiny", load=LOAD, req_s=2.0, commit="") for n in range(3)),
    *(
        a_turn("triptych", n, model="tiny", load=LOAD, req_s=rate, commit="abc")
        for n, rate in enumerate((2.0, 3.2, 5.0))
    ),
    a_turn("triptych", 3, model="tiny", load=LOAD, req_s=90.0, others=0.5),
    *(
        a_turn("replicas-triptych", n, model="tiny", load=LOAD, req_s=rate)
        for n, rate in enumerate((1.0, 1.1, 1.9))
    ),
    *(a_turn("replicas", n, model="tiny", load=LOAD, req_s=1.0) for n in range(3)),
]


def test_the_targets_get_the_medians_of_the_rounds() -> None:
    assert reached(TURNS) == {
        f"our encoders before vLLM by vLLM's EPD, tiny, {LOAD}": pytest.approx({"req/s": 1.6}),
        f"two vLLM on our store by the two alone, tiny, {LOAD}": pytest.approx({"req/s": 1.1}),
    }


def test_the_page_says_which_targets_are_met_and_which_are_missed() -> None:
    text = page(TURNS, {"vllm": "0.32.0"}, "It is so because.\n")
    assert f"| tiny, {LOAD}: triptych / vllm-epd | ≥ 1.5 | 1.6 (1 – 2.5) | met | 3 |" in text
    assert f"| tiny, {LOAD}: replicas-triptych / replicas | ≥ 1.2 | 1.1 (1 – 1.9) | missed | 3 |" in text
    assert "| tiny, images-4-50@8: replicas-triptych / replicas | ≥ 1.2 | – | not measured | 0 |" in text
    assert "\nvllm 0.32.0.\n" in text and "\nIt is so because.\n" in text
    assert "12 of 13 turns" in text and "## small" not in text


def test_every_target_has_a_load_that_is_measured() -> None:
    made = reached(
        [
            a_turn(system, 0, model="tiny", load=load.name)
            for load in LOADS
            for system in ("triptych", "vllm-epd", "replicas-triptych", "replicas")
        ]
    )
    asked = {target.name for target in TARGETS if target.command.startswith("benchmarks vllm_fleet")}
    assert len(asked) == 8 and asked <= set(made)
