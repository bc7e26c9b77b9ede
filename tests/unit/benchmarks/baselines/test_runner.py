"""The loop over cells: their order, the time that there is, and which servers run meanwhile."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from benchmarks.baselines import runner
from benchmarks.baselines.matrix import System
from benchmarks.baselines.runner import run_cells
from support.clock import Clock
from triptych_bench.goodput.report.display import Display

SYSTEMS = {name: System(name=name) for name in ("a", "b")}


class Loop:
    """A loop over cells, such as "a1" of system "a", that take a minute each; `done` is what happened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.clock = Clock()
        self.output = io.StringIO()
        monkeypatch.setattr(runner.time, "monotonic", self.clock)

    def pause(self, system: System) -> None:
        self.done.append(f"pause {system.name}")

    def end(self, name: str) -> None:
        self.done.append(f"end {name}")

    def close(self) -> None:
        self.done.append("close")

    def measure(self, cell: str) -> None:
        self.done.append(cell)
        self.clock.now += 60
        if cell == "a9":
            raise OSError

    def run(self, *cells: str, minutes: float = 0.0) -> bool:
        pool: Any = self
        display = Display(Console(file=self.output))
        return run_cells(
            pool,
            cells,
            self.measure,
            lambda cell: SYSTEMS[cell[0]],
            display,
            minutes=minutes,
            expected=lambda cells: 60.0 * len(cells),
        )


@pytest.fixture
def loop(monkeypatch) -> Loop:
    return Loop(monkeypatch)


def test_a_system_is_paused_after_each_of_its_cells_and_ends_after_its_last(loop):
    assert loop.run("a1", "b1", "a2")
    assert loop.done == ["a1", "pause a", "b1", "pause b", "end b", "a2", "pause a", "end a", "close"]


def test_no_cell_begins_that_would_end_too_late(loop):
    assert not loop.run("a1", "a2", "a3", minutes=2.5)
    assert loop.done == ["a1", "pause a", "a2", "pause a", "close"]
    assert "a3 would take 1 min: no time left for it" in loop.output.getvalue()


def test_a_cell_that_just_fits_is_measured(loop):
    assert loop.run("a1", "a2", minutes=2.0)


def test_a_cell_that_raises_leaves_no_server_behind(loop):
    with pytest.raises(OSError):
        loop.run("a9", "b1")
    assert loop.done == ["a9", "pause a", "close"]
