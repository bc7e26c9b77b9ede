"""An item's record: what each of its requests knows, and its ready mark of the last seconds."""

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
)
from triptych.base.types import MMFeature
from triptych.pd_worker.core.items.item import MARK_SECONDS, ItemStatus, ItemTable
from triptych.pd_worker.core.kv_cache.block_pool import PrefixChain
from triptych.pd_worker.core.request import RequestState


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


def owners(root: object, keys: set[str], *, without: object = None) -> set[str]:
    """The classes of ours, reachable from `root`, that have one of the keys in a mutable container.

    `without`: a store that is in this process.
    """
    classes: set[str] = set()
    seen: dict[int, object] = {id(without): without}
    left = [root]
    while left:
        thing = left.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        left += parts(thing)
        if type(thing).__module__.startswith("triptych."):
            for value in (value for value in attributes(thing) if value is not without):
                left.append(value)
                if not isinstance(value, tuple | frozenset) and names_one(value, keys):
                    classes.add(type(thing).__name__)
    return classes


def test_a_mark_counts_until_its_seconds_are_over():
    marks = ItemTable()
    marks.mark(["a"], 100.0)
    assert marks.is_marked("a", 100.0 + MARK_SECONDS * 0.9)
    assert not marks.is_marked("a", 100.0 + MARK_SECONDS)
    assert not marks.is_marked("b", 100.0)


def test_a_key_that_is_marked_again_counts_from_then_and_older_ones_are_forgotten():
    marks = ItemTable()
    marks.mark(["a", "b"], 100.0)
    marks.mark(["a"], 100.0 + MARK_SECONDS * 0.5)
    marks.mark(["c"], 100.0 + MARK_SECONDS * 1.2)
    later = 100.0 + MARK_SECONDS * 1.3
    assert [marks.is_marked(key, later) for key in "abc"] == [True, False, True]
    assert len(marks) == 2


def test_a_dropped_mark_counts_no_more():
    marks = ItemTable()
    marks.mark(["a"], 100.0)
    marks.unmark("a")
    marks.unmark("a")
    assert not marks.is_marked("a", 100.0)


def test_features_with_one_hash_share_what_is_known_but_each_is_consumed_for_itself():
    twice = [make_feature("a", 1, 2), make_feature("b", 3, 2), make_feature("a", 5, 2)]
    request = make_request("r", 8, twice, ready=[twice[1].mm_hash])
    state = RequestState(request, PrefixChain(b"r", (), (), (), 1))
    assert [use.status for use in state.items] == [ItemStatus.PENDING, ItemStatus.STORED, ItemStatus.PENDING]
    assert state.items[0] is state.items[2] and state.items[0].unconsumed == {0, 2}
    state.items[0].unconsumed.discard(0)
    assert [state.is_consumed(index) for index in range(3)] == [True, False, False]


def test_a_lost_item_is_reported_once_until_it_arrives_and_is_loaded_again_only_after_a_mark():
    request = make_request("r", 4, [make_feature("a", 1, 2)])
    (use,) = RequestState(request, PrefixChain(b"r", (), (), (), 1)).items
    use.arrive()
    assert use.loaded and use.lose() and not use.loaded and not use.lose()
    use.load_again()
    assert use.status is ItemStatus.LOST
    use.arrive()
    assert use.loaded and use.status is ItemStatus.MARKED
    use.load_again()
    assert use.status is ItemStatus.STORED


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
    engine.arrive(*features)
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
    assert engine.of("item_loaded") and not list(engine.items.table)


def test_a_cross_item_has_the_same_four_owners_while_its_table_is_shared_and_in_host_memory(make):
    text = make_cross("text", 9)
    engine = make(cross=True, host_blocks=16)
    engine.add(*(make_request(name, [2, 0], [text], max_tokens=40, ready=()) for name in "ab"))
    assert in_flight(engine, [text]) == OWNERS
