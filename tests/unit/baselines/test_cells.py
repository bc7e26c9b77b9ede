"""Order of cells, their rates, the time they take."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.baselines.cell import Cell, CellFiles, chosen, plan_cells, read_folder, seed_of
from benchmarks.baselines.matrix import Matrix
from benchmarks.baselines.measure import (
    FIRST_GUESS,
    CellFailed,
    estimate,
    fixed_rate,
    format_duration,
    rate_of,
    search_start,
    seconds_left,
    settings_of,
    window_requests,
    without_bulk,
)
from support.engine.cells import TOML, cell, window
from triptych.errors import ConfigError
from triptych.goodput.load.job import Target

MATRIX = msgspec.toml.decode(TOML, type=Matrix)


def names(cells: list[Cell]) -> list[str]:
    return [one.name for one in cells]


def test_the_baselines_capacity_comes_first_then_repeat_by_repeat_with_systems_in_turns():
    planned = names(plan_cells(MATRIX))
    first = [name for name in planned[:8]]
    assert all(name.startswith("capacity.") and ".colocated." in name for name in first)
    assert [name for name in planned if name.startswith("fixed")] == [
        *("fixed.text.colocated.0", "fixed.text.epd-shared.0", "fixed.text.vllm.0"),
        *("fixed.mix.colocated.0", "fixed.mix.epd-shared.0", "fixed.mix.vllm.0"),
        *("fixed.text.vllm.1", "fixed.text.epd-shared.1", "fixed.text.colocated.1"),
        *("fixed.mix.vllm.1", "fixed.mix.epd-shared.1", "fixed.mix.colocated.1"),
    ]
    assert planned.index("search.images-4.colocated.0") < planned.index("fixed.text.vllm.1")


def test_repeats_of_the_command_line_win_over_those_of_the_file():
    assert len(plan_cells(MATRIX, 1)) * 3 == len(plan_cells(MATRIX, 3))


def test_patterns_select_cells_and_one_without_a_match_is_an_error():
    planned = plan_cells(MATRIX)
    assert names(chosen(planned, ["fixed.mix.*.0", "search.*.vllm.1"])) == [
        *("fixed.mix.colocated.0", "fixed.mix.epd-shared.0", "fixed.mix.vllm.0", "search.reuse-50.vllm.1"),
    ]
    assert chosen(planned, []) == planned
    with pytest.raises(ConfigError, match="--only 'fixed.video.*' fits no cell"):
        chosen(planned, ["fixed.video.*"])


def test_systems_get_the_same_requests_and_nothing_else_does():
    cells = [
        Cell("fixed", "mix", "colocated", 0),
        *(Cell("fixed", "mix", "colocated", 1), Cell("fixed", "text", "colocated", 0)),
        Cell("search", "mix", "colocated", 0),
    ]
    seeds = {seed_of(one, 1) for one in cells} | {seed_of(cells[0], 2)}
    assert len(seeds) == 5
    assert seed_of(Cell("fixed", "mix", "vllm", 0), 1) == seed_of(cells[0], 1)


def test_the_fixed_rate_is_a_share_of_the_baselines_median_capacity_and_then_stays():
    finished = [
        cell("capacity", "mix", "colocated", repeat, windows=[window(throughput)])
        for repeat, throughput in enumerate((8.0, 10.0, 30.0))
    ]
    finished.append(cell("capacity", "mix", "colocated-big", windows=[window(100.0)]))
    assert fixed_rate(MATRIX, "mix", finished) == pytest.approx(7.0)
    assert fixed_rate(MATRIX, "text", finished) is None
    finished.append(cell("fixed", "mix", "vllm", rate=6.5))
    assert fixed_rate(MATRIX, "mix", finished) == 6.5
    assert fixed_rate(msgspec.structs.replace(MATRIX, rates={"mix": 2.0}), "mix", finished) == 2.0


def test_a_cell_whose_rate_is_unknown_fails_with_the_remedy():
    with pytest.raises(CellFailed, match="the capacity of colocated on mix is not measured"):
        rate_of(MATRIX, Cell("fixed", "mix", "vllm", 0), [])
    assert rate_of(MATRIX, Cell("capacity", "mix", "vllm", 0), []) is None


def test_a_search_begins_at_the_fixed_rate_and_below_it_where_that_was_too_much():
    one = Cell("search", "images-4", "epd-shared", 0)
    capacity = cell("capacity", "images-4", "colocated", windows=[window(10.0)])
    kept = cell("fixed", "images-4", "epd-shared", rate=7.0)
    lost = cell("fixed", "images-4", "epd-shared", 1, rate=7.0, windows=[window(sustained=False)])
    assert search_start(MATRIX, one, [capacity]) == 7.0
    assert search_start(MATRIX, one, [capacity, kept]) == 7.0
    assert search_start(MATRIX, one, [capacity, lost]) == pytest.approx(4.2)
    assert search_start(MATRIX, one, []) is None


def test_a_fixed_window_ends_with_its_requests_or_its_seconds():
    assert window_requests(MATRIX, 10.0) == 300
    assert window_requests(MATRIX, 1.0) == 150
    assert window_requests(MATRIX, 0.001) == 5


def test_settings_follow_the_kind():
    target = Target("http://x", "m")
    fixed = settings_of(MATRIX, Cell("fixed", "mix", "vllm", 0), target, 7, 1.0)
    assert (fixed.requests, fixed.arrivals.rate, fixed.concurrency, fixed.seed) == (150, 1.0, 0, 7)
    closed = settings_of(MATRIX, Cell("capacity", "mix", "vllm", 0), target, 7, None)
    assert (closed.requests, closed.concurrency) == (160, 16)
    search = settings_of(MATRIX, Cell("search", "mix", "vllm", 0), target, 7, 2.0)
    assert (search.requests, search.seconds, search.arrivals.rate) == (0, 20.0, 2.0)


def test_estimates_come_from_the_likest_finished_cells():
    one = Cell("fixed", "mix", "vllm", 1)
    assert estimate(one, []) == FIRST_GUESS["fixed"]
    finished = [cell("fixed", "text", "vllm", wall_s=10.0)]
    assert estimate(one, finished) == 10.0
    finished += [cell("fixed", "mix", "colocated", wall_s=20.0)]
    assert estimate(one, finished) == 20.0
    finished += [cell("fixed", "mix", "vllm", wall_s=30.0), cell("search", "mix", "vllm", wall_s=999.0)]
    finished += [cell("fixed", "mix", "vllm", wall_s=1.0, status="failed")]
    assert estimate(one, finished) == 30.0
    assert seconds_left([one, Cell("capacity", "mix", "vllm", 0)], finished) == 30.0 + FIRST_GUESS["capacity"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (40, "40 s"), (600, "10 min"), (3900, "1 h 05 min"), (7170, "2 h 00 min")],
)
def test_durations_are_printed_in_readable_units(seconds, text):
    assert format_duration(seconds) == text


def test_single_requests_are_left_out_of_searches_but_not_their_first_error():
    full = window(failed=1, itls=[[0.1]], queue_depths=[])
    assert "itls" not in without_bulk(full, short=False) and "stages" in without_bulk(full, short=False)
    short = without_bulk(full, short=True)
    assert "stages" not in short and short["first_error"] == "late"


def test_cells_are_read_back_with_the_plan_and_a_damaged_one_is_an_error(tmp_path):
    planned = plan_cells(MATRIX)
    files = CellFiles(tmp_path, "toy")
    files.write_plan(MATRIX, planned)
    files.write(planned[3], cell("capacity", "images-4", "colocated"))
    ((plan, cells),) = read_folder(tmp_path)
    assert plan["cells"] == names(planned)
    assert [found["cell"]["load"] for found in cells] == ["images-4"]
    assert not list(tmp_path.glob(".*"))
    files.path(planned[3]).write_text("{")
    with pytest.raises(ConfigError, match="remove it to measure the cell again"):
        files.read(planned)


def test_a_folder_without_a_plan_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="holds no plan"):
        read_folder(tmp_path)
