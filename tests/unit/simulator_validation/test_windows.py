"""Windows of a validation are measured once, whatever cuts the run off. No cluster is started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulator_validation import __main__ as validation
from benchmarks.simulator_validation.comparison import ValidationCell, plan_cells
from support.simulated import COSTS, MODEL
from triptych.errors import ConfigError

FIGURES = {"ttft": 0.1, "tpot": 0.01, "throughput": 10.0}
CELLS = plan_cells(["1e1pd-pinned", "1-colocated"], ["mix"], 2)


class FakeMachine:
    """Starts no cluster; fails at the window named `breaks_at`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, breaks_at: str = "") -> None:
        self.started: list[str] = []
        self.measured: list[str] = []
        self.warmed_up = 0
        self._breaks_at = breaks_at
        monkeypatch.setattr(validation, "_cluster", self._cluster)
        monkeypatch.setattr(validation, "_measured", self._measured)
        monkeypatch.setattr(validation, "_warm_up", self._warm_up)

    @contextmanager
    def _cluster(self, system: Any, options: Any) -> Iterator[str]:
        self.started.append(system.name)
        yield "http://127.0.0.1"

    def _warm_up(self, cell: ValidationCell, options: Any, url: str) -> None:
        self.warmed_up += 1

    def _measured(self, cell: ValidationCell, windows: Any, options: Any, url: str) -> dict[str, Any]:
        if cell.name == self._breaks_at:
            raise ConfigError("cut off")
        self.measured.append(cell.name)
        return {"cell": cell.name, "rate": 1.0, "figures": FIGURES, "doubts": [], "load_before": 0.0}


def options(*words: str) -> Any:
    return validation.parser().parse_args(["--profile", "p.json", "--results", "r", *words])


def measure(windows: validation.Windows, *words: str) -> bool:
    return validation.measure_all(CELLS, windows, options(*words), lambda line: None)


def test_every_window_is_measured_once_with_one_start_per_system_and_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = FakeMachine(monkeypatch)
    assert measure(validation.Windows(tmp_path))
    assert machine.measured == [cell.name for cell in CELLS]
    assert machine.started == ["1e1pd-pinned", "1-colocated"] * 2
    assert machine.warmed_up == 4


def test_a_run_that_was_cut_off_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = FakeMachine(monkeypatch, breaks_at=CELLS[5].name)
    with pytest.raises(ConfigError, match="cut off"):
        measure(validation.Windows(tmp_path))
    second = FakeMachine(monkeypatch)
    assert measure(validation.Windows(tmp_path))
    assert first.measured + second.measured == [cell.name for cell in CELLS]
    assert second.started == ["1e1pd-pinned", "1-colocated"]


def test_a_window_is_compared_with_its_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "read_costs", lambda path: COSTS)
    monkeypatch.setattr(validation, "read_shape", lambda path: MODEL)
    FakeMachine(monkeypatch)
    windows = validation.Windows(tmp_path)
    measure(windows)
    (found,) = validation.compared(CELLS[:1], windows, options()).values()
    assert {one.metric: one.measured for one in found} == FIGURES
    assert all(one.simulated > 0 for one in found)


def test_no_cluster_is_started_without_time_for_a_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = FakeMachine(monkeypatch)
    assert not measure(validation.Windows(tmp_path), "--minutes", "0.1")
    assert not machine.started


def test_an_open_window_is_sent_at_a_share_of_the_first_closed_ones_throughput(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = validation.Windows(tmp_path)
    cell = ValidationCell("1e1pd-pinned", "mix", "open", 1)
    with pytest.raises(ConfigError, match="closed window first"):
        windows.rate(cell, 0.6)
    FakeMachine(monkeypatch)
    measure(windows)
    assert windows.rate(cell, 0.6) == 6.0


def test_what_is_no_window_is_named(tmp_path: Path) -> None:
    cell = CELLS[0]
    (tmp_path / f"{cell.name}.json").write_text('{"format": "other"}')
    with pytest.raises(ConfigError, match=r"closed\.0\.json"):
        validation.Windows(tmp_path).read(cell)
