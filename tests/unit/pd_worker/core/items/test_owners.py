"""Few classes know items: while requests are in flight only these have an mm_hash in what they change."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import chain
from typing import Any

from support.engine.engine_requests import (
    STORE,
    Make,
    ModellessEngine,
    make_cross,
    make_feature,
    make_request,
    publish,
)
from triptych.base.types import MMFeature
from triptych.pd_worker.core.request_events import ItemLoaded

OWNERS = {"ItemTable", "EncoderCache", "Admission", "MemoryConnectorScheduler"}


def attributes(thing: object) -> Iterator[Any]:
    yield from getattr(thing, "__dict__", {}).values()
    for kind in type(thing).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(thing, name):
                yield getattr(thing, name)


def parts(container: object) -> Iterable[Any]:
    """What stands in a container; nothing where it is none."""
    if isinstance(container, Mapping):
        return chain(container.keys(), container.values())
    return container if isinstance(container, list | tuple | Set | deque) else ()


def names_one(container: object, keys: set[str]) -> bool:
    return any(part in keys if isinstance(part, str) else names_one(part, keys) for part in parts(container))


def owners(root: object, keys: set[str]) -> set[str]:
    """The classes of ours, reachable from `root`, that have one of the keys in a mutable container.

    Without the store, which is in this process.
    """
    classes: set[str] = set()
    seen: dict[int, object] = {id(STORE): STORE}
    left = [root]
    while left:
        thing = left.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        left += parts(thing)
        if type(thing).__module__.startswith("triptych."):
            for value in (value for value in attributes(thing) if value is not STORE):
                left.append(value)
                if not isinstance(value, tuple | frozenset) and names_one(value, keys):
                    classes.add(type(thing).__name__)
    return classes


def in_flight(engine: ModellessEngine, features: Iterable[MMFeature]) -> set[str]:
    """The owners in the lives of two requests: they wait, load, run, are preempted and come back."""
    keys = {feature.mm_hash for feature in features}
    seen: set[str] = set()

    def watched(steps: int) -> None:
        for _ in range(steps):
            seen.update(owners(engine.scheduler, keys))
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


def test_the_owner_of_a_swapped_table_is_the_items_record(make: Make) -> None:
    text = make_cross("text", 9)
    engine = make(cross=True, host_blocks=16)
    engine.add(make_request("a", [2, 0], [text], max_tokens=40, ready=()))
    assert in_flight(engine, [text]) == OWNERS


def test_a_key_in_any_container_of_an_object_is_seen() -> None:
    engine = ModellessEngine(STORE)
    for place in ({"key": 1}, {1: "key"}, ["key"], {("key", 2): 1}, [(1.0, "key")], {"a": {2: "key"}}):
        engine.scheduler.kv.__dict__["extra"] = place
        assert owners(engine.scheduler, {"key"}) == {"KVCacheManager"}
