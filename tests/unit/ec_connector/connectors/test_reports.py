"""Reports that are drained together: each is of its own load."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from triptych.base.types import ItemPlan, MMFeature, Placement
from triptych.ec_connector.base import ECConnectorOutput, ECTransferConfig, Presence
from triptych.ec_connector.connectors.scheduler_role import TableScheduler
from triptych.ec_connector.metadata import LoadId, Reports

KEY = "a" * 64
PLAN = ItemPlan(KEY, "n" * 64, "image", 3, 4, "float32", 3)
FIRST, SECOND = (
    SimpleNamespace(request_id=name, features=[MMFeature(PLAN, Placement(0, 3))])
    for name in ("first", "second")
)


@pytest.mark.parametrize("move_first", [True, False])
def test_the_end_of_an_earlier_loads_move_does_not_hide_that_a_later_load_has_arrived(
    move_first: bool,
) -> None:
    role, reports = TableScheduler(ECTransferConfig()), Reports(lambda: None)
    generations = []
    for request in FIRST, SECOND:  # the first one ends while its item is being moved
        role.add_request(request)
        role.item_ready(KEY)
        (fetch,) = role.build_connector_meta(None).fetches
        generations.append(fetch.generation)
        if request is FIRST:
            role.update_connector_output(ECConnectorOutput(fetched={KEY: 0.1}))
            role.request_finished(request)
            role.build_connector_meta(None)
    calls = [
        lambda: reports.loaded(LoadId(KEY, generations[0])),
        lambda: reports.fetched(LoadId(KEY, generations[1]), 0.1),
    ]
    for call in calls if move_first else reversed(calls):
        call()
    output = reports.drain()
    assert output.loaded == [KEY]
    role.update_connector_output(output)
    assert role.has_caches(SECOND) == [Presence.HIT], "a request would wait for ever for what is there"
