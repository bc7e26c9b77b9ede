from __future__ import annotations

from support.data.items import bare_plan
from support.data.job_events import job_ready, job_waits
from support.data.lifecycles import at_worker, begun, looked_up, planned, ready
from support.data.pd_events import pd_missing
from triptych.protos.common_pb2 import EmbeddingSource


def test_an_item_comes_from_the_job_that_it_waits_for_unless_the_store_had_it() -> None:
    machine = begun("a", "b")
    looked_up(machine)
    machine.deliver(job_waits("a", "joined"))
    machine.deliver(job_waits("b", "encoded"))
    machine.deliver(ready("a"))
    machine.deliver(job_ready("b", bare_plan("b"), already_stored=True))
    assert {key: item.origin for key, item in machine.items.items()} == {"a": "joined", "b": "store"}


def test_an_item_is_read_at_its_source_until_it_is_lost_and_nowhere_that_makes_no_sense() -> None:
    machine = at_worker("a")
    end = job_ready("a", bare_plan("a"))
    end.ready.source.CopyFrom(EmbeddingSource(name="f" * 32, address="h:1"))
    machine.deliver(pd_missing(1, "a"))
    machine.deliver(end)
    item = machine.items["a"]
    assert item.source is not None and item.source.address == item.slot.source.address == "h:1"
    machine.deliver(pd_missing(1, "a"))
    assert item.source is None and not item.slot.HasField("source")
    end.ready.source.name = "no name"
    machine.deliver(end)
    assert item.source is None and not item.slot.HasField("source")


def test_the_plan_that_came_first_stays() -> None:
    machine = begun("a")
    looked_up(machine)
    machine.deliver(planned("a"))
    machine.deliver(job_ready("a", bare_plan("a", rows=9)))
    plan = machine.items["a"].plan
    assert plan is not None and plan.rows == 1
