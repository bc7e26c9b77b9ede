from __future__ import annotations

import pytest

from support.data.items import bare_plan
from support.data.job_events import job_ready, job_waits
from support.data.lifecycles import IDS, at_worker, begun, looked_up, planned, ready
from support.data.pd_events import pd_admitted, pd_loaded, pd_missing
from triptych.protos.common_pb2 import EmbeddingSource
from triptych.proxy import events
from triptych.proxy.requests import instructions as do


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


def test_an_item_is_stored_in_the_epoch_that_its_job_ended_in() -> None:
    machine, end = begun("a"), ready("a")
    end.store_epoch, end.clock_jumps = "third", 2
    looked_up(machine)
    machine.deliver(end)
    assert machine.items["a"].stored_in == ("third", 2)


@pytest.mark.parametrize("event", [pd_loaded(1, "a"), pd_missing(1, "a")])
def test_jobs_are_told_which_item_a_worker_has_or_has_not(event: events.WorkerEvent) -> None:
    assert do.TellJobs(event).mm_hash == "a"
    assert do.TellJobs(pd_admitted(1, IDS)).mm_hash == ""


def test_the_plan_that_came_first_stays() -> None:
    machine = begun("a")
    looked_up(machine)
    machine.deliver(planned("a"))
    machine.deliver(job_ready("a", bare_plan("a", rows=9)))
    plan = machine.items["a"].plan
    assert plan is not None and plan.rows == 1
