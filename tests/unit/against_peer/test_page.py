"""The page and the targets' figures, of turns that are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.against_peer.page import page, reached
from benchmarks.against_peer.rounds import read_turns, turns_file
from benchmarks.targets import TARGETS
from support.engine.peer_turns import a_turn
from triptych.errors import ConfigError

TURNS = [
    *(a_turn("vllm", n, load="text-450@16", req_s=1.0, ttft_ms=100.0, step_ms=50.0) for n in range(3)),
    *(
        a_turn("triptych", n, load="text-450@16", req_s=rate, ttft_ms=150.0, step_ms=75.0)
        for n, rate in enumerate((0.5, 0.6, 0.9))
    ),
    a_turn("vllm-epd", 0, load="text-450@16", req_s=0.25),
    a_turn("vllm", 0, load="image@1", others=0.5),
]


def test_the_targets_get_the_medians_of_the_rounds() -> None:
    found = reached(TURNS)
    assert found["engine alone, small, text-450@16"] == pytest.approx({"req/s": 0.6, "TPOT": 1.0})
    assert found["vLLM, small, text-450@16"] == pytest.approx({"req/s": 0.6, "TTFT": 1.5, "TPOT": 1.0})
    assert found["decode step of 16 at context 480, by vLLM's"] == pytest.approx({"step": 1.5})
    assert found["vLLM's EPD, small, text-450@16"] == pytest.approx({"req/s": 2.0})
    assert "vLLM, small, image@1" not in found


def test_every_load_of_a_target_can_be_measured() -> None:
    made = reached(
        [
            a_turn(system, 0, model=model, load=load, step_ms=1.0)
            for model in ("tiny", "small")
            for system in ("vllm", "vllm-epd", "triptych", "colocated")
            for load in ("text@1", "text@4", "text@16", "text-450@16", "image@1", "image@4", "image@16")
            + ("images-4@1", "images-4@4", "images-4@16")
        ]
    )
    asked = {target.name for target in TARGETS if target.command.startswith("benchmarks against_peer")}
    assert asked <= set(made)


def test_the_page_says_what_was_measured_and_how_quiet_it_was() -> None:
    text = page(TURNS)
    assert "| text-450@16 | 0.6 (0.5 – 0.9) | 1.5 | 1 | 1.5 | 1 | 3 |" in text
    assert "7 of 8 turns; where others used more than 0.15 cores, they are left out." in text
    assert "triptych abc" in text and "## tiny" not in text


def test_a_line_that_is_no_turn_is_named(tmp_path: Path) -> None:
    turns_file(tmp_path, "small").write_text('{"a": 1}\n')
    with pytest.raises(ConfigError, match=str(tmp_path)):
        read_turns(tmp_path)
