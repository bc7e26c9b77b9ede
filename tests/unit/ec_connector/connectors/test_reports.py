"""Reports that are drained together: each is of its own load."""

from __future__ import annotations

import pytest

from triptych.ec_connector.connectors.reports import Reports
from triptych.ec_connector.connectors.scheduler_role import LoadTable
from triptych.ec_connector.metadata import LoadId
from triptych.types import ItemPlan

KEY = "a" * 64
PLAN = ItemPlan(KEY, "n" * 64, "image", 3, 4, "float32", 3)


@pytest.mark.parametrize("move_first", [True, False])
def test_the_end_of_an_earlier_loads_move_does_not_hide_that_a_later_load_has_arrived(
    move_first: bool,
) -> None:
    table, reports = LoadTable(), Reports(lambda: None)
    generations = []
    for request in ("first", "second"):  # the first one ends while its item is being moved
        table.add_holder(request, [PLAN])
        table.mark_ready(KEY)
        ((fetch,), _, _) = table.drain()
        generations.append(fetch.generation)
        if request == "first":
            table.fetched(KEY, fetch.generation)
            table.release(request, KEY)
            table.drain()
    calls = [
        lambda: reports.loaded(LoadId(KEY, generations[0])),
        lambda: reports.fetched(LoadId(KEY, generations[1]), 0.1),
    ]
    for call in calls if move_first else reversed(calls):
        call()
    output = reports.drain()
    assert output.loaded == [KEY]
    for key in output.fetched:
        table.fetched(key, output.generations[key])
    assert table.presence(KEY).name == "HIT", "a request would wait for ever for what is there"
