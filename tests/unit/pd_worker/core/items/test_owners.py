"""Few classes know items: while requests are in flight only these have an mm_hash in what they change."""

from __future__ import annotations

from collections.abc import Iterable

from support.engine.engine_requests import (
    STORE,
    Make,
    ModellessEngine,
    make_cross,
    make_feature,
    make_request,
    publish,
)
from support.owners import owners
from triptych.base.types import MMFeature
from triptych.pd_worker.core.request_events import ItemLoaded

OWNERS = {"ItemTable", "EncoderCache", "Admission", "MemoryConnectorScheduler"}


def in_flight(engine: ModellessEngine, features: Iterable[MMFeature]) -> set[str]:
    """The owners in the lives of two requests: they wait, load, run, are preempted and come back."""
    keys = {feature.mm_hash for feature in features}
    seen: set[str] = set()

    def watched(steps: int) -> None:
        for _ in range(steps):
            seen.update(owners(engine.scheduler, keys, without=STORE))
            engine.step()

    watched(2)
    publish(STORE, *features)
    engine.scheduler.mark_ready(keys, engine.now)
    watched(6)
    engine.scheduler.pause(["a"], [], "proxy")
    watched(3)
    engine.scheduler.pause([], ["a"], "proxy")
    watched(3)
    engine.run_out()
    return seen


def test_items_in_the_prompt_have_four_owners(make: Make) -> None:
    features = [make_feature("one", 1, 4), make_feature("two", 6, 20)]
    engine = make(host_blocks=16)
    engine.add(*(make_request(name, 30, features, max_tokens=40, ready=()) for name in "ab"))
    assert in_flight(engine, features) == OWNERS
    assert engine.of(ItemLoaded) and not list(engine.items.table)


def test_a_cross_item_has_the_same_four_owners_while_its_table_is_shared_and_in_host_memory(
    make: Make,
) -> None:
    text = make_cross("text", 9)
    engine = make(cross=True, host_blocks=16)
    engine.add(*(make_request(name, [2, 0], [text], max_tokens=40, ready=()) for name in "ab"))
    assert in_flight(engine, [text]) == OWNERS
