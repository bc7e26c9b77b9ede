"""What the kill table says of its trials."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from benchmarks.against_peer.rounds import keep
from benchmarks.kills import __main__ as kills
from benchmarks.kills.__main__ import NOTHING, RIGHT, Run, faults, page
from benchmarks.kills.load import Load, Trial
from benchmarks.kills.systems import SYSTEMS, Place, System

GOOD, OTHER = [1, 2, 3], [1, 2, 4]


def trial(system: str, answers: list[list[int]], **changed: object) -> Trial:
    values: dict[str, object] = {
        "stall": 1.0,
        "by_hand": 0,
        "errors": [],
        "number": 0,
        "fault": "store killed",
    }
    return Trial(system=system, answers=answers, **values | changed)


def cells(text: str, system: str) -> list[str]:
    line = next(line for line in text.splitlines() if f"| {system} |" in line)
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_row_counts_failed_and_wrong_answers_and_restarts_of_all_rounds():
    trials = [trial(RIGHT, [GOOD] * 3, number=n) for n in range(2)]
    trials.append(trial("native", [GOOD, OTHER, []]))
    trials.append(
        trial("native", [[], GOOD, []], number=1, by_hand=1, stall=3.0, errors=["ValueError: gone"])
    )
    text = page(trials)
    assert cells(text, "native") == ["store killed", "native", "2", "6", "3", "1", "1, 3", "1"]
    assert "- `native, store killed: ValueError: gone`" in text


def test_an_answer_without_a_right_one_beside_it_is_neither_called_wrong_nor_right():
    assert cells(page([trial("native", [OTHER])]), "native")[5] == "not compared"


def test_a_stall_is_the_longest_time_after_the_fault_in_which_no_client_got_a_token():
    load = Load("http://127.0.0.1:1")
    load.times = [1.0, 9.0, 10.5, 14.0, 14.5]
    assert load.stall(10.0) == 3.5
    assert load.stall(20.0) == 0.0


def test_a_system_that_nobody_starts_again_is_only_killed(tmp_path):
    system = System([], "", "", {"encoder": "encoder"}, restarts=False, files=Path(tmp_path))
    assert [fault.name for fault in faults(system)] == ["encoder killed"]
    names = [fault.name for fault in faults(System([], "", "", {"encoder": "encoder"}, files=tmp_path))]
    assert names == [NOTHING, "encoder killed", "encoder cut off", "embeddings lost"]


def test_every_system_has_a_sentence_on_the_page():
    text = page([])
    assert [name for name in SYSTEMS if f"`{name}`" not in text] == []


class Started(Exception):
    """The system was started."""


@pytest.mark.parametrize(
    ("there", "seconds", "starts"),
    [((), 60.0, True), ((), -1.0, False), (("store killed", "store cut off"), 60.0, False)],
)
def test_what_is_there_is_not_run_again_and_nothing_begins_when_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: tuple[str, ...], seconds: float, starts: bool
) -> None:
    def started(*_: object, **__: object) -> None:
        raise Started

    monkeypatch.setattr(kills, "Processes", started)
    monkeypatch.setitem(SYSTEMS, "vllm-pd", lambda place: System([], "", "", {"store": "store"}))
    file = tmp_path / "kills.jsonl"
    for fault in (NOTHING, *there):
        keep(file, trial("vllm-pd", [GOOD], fault=fault))
    run = Run("vllm-pd", 0, Place(tmp_path, tmp_path), file, "*", time.monotonic() + seconds)
    found = False
    try:
        asyncio.run(run.measure())
    except Started:
        found = True
    assert found is starts


def test_answers_of_every_fault_of_every_system_are_compared(tmp_path: Path) -> None:
    known = {fault.name for fault in kills._all_faults()}
    parts = ("encoder", "prefill server", "decoding server", "worker before vLLM", "store", "proxy")
    system = System([], "", "", dict.fromkeys(parts, ""), files=tmp_path)
    assert {fault.name for fault in faults(system)} <= known
