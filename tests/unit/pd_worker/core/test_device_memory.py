"""A device without free memory loses no item: its move is tried again, and fails by name in the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.engine.engine_requests import (
    STORE,
    Make,
    ModellessEngine,
    finished,
    make_feature,
    make_request,
    publish,
)
from triptych.base.errors import Unavailable
from triptych.base.types import FinishReason
from triptych.pd_worker.core.items.tracker import MAX_MOVES
from triptych.pd_worker.core.request_events import ItemLoaded, ItemMissing


class Device:
    """Counts moves to an engine's device, and loads from its store; moves fail for which it is `full`."""

    def __init__(self, engine: ModellessEngine, full: Callable[[int], bool]) -> None:
        self.moves = self.loads = 0
        worker: Any = engine.worker
        move, fetch = worker._on_device, worker._fetch

        def on_device(entry: object) -> object:
            self.moves += 1
            if full(self.moves):
                raise MemoryError("cuda:0 has no 1024 bytes free")
            return move(entry)

        def fetched(order: object) -> None:
            self.loads += 1
            fetch(order)

        worker._on_device, worker._fetch = on_device, fetched


def test_a_move_that_finds_no_memory_is_made_again_without_another_load(make: Make) -> None:
    engine, image = make(), make_feature("cat", 2, 6)
    device = Device(engine, lambda moves: moves < MAX_MOVES)
    publish(STORE, image)
    engine.add(make_request("a", 16, [image]))
    engine.run_out()
    assert finished(engine)["a"].reason is FinishReason.LENGTH
    assert (device.moves, device.loads) == (MAX_MOVES, 1)
    assert len(engine.of(ItemLoaded)) == 1 and not engine.of(ItemMissing)
    engine.assert_at_rest()


def test_a_request_whose_item_never_fits_goes_on_elsewhere_and_nothing_is_encoded_again(make):
    engine, image = make(), make_feature("cat", 2, 6)
    device = Device(engine, lambda moves: True)
    publish(STORE, image)
    engine.add(make_request("a", 16, [image]), make_request("b", 16))
    engine.run_out()
    error = finished(engine)["a"].error
    assert isinstance(error, Unavailable) and "no free memory for an item's embedding" in error.message
    assert finished(engine)["b"].reason is FinishReason.LENGTH
    assert (device.moves, device.loads) == (MAX_MOVES, 1) and not engine.of(ItemMissing)
    engine.assert_at_rest()


def test_embeddings_that_nobody_needs_make_room_on_the_device(make: Make) -> None:
    engine, old, new = make(), make_feature("old", 2, 6), make_feature("new", 2, 6)
    publish(STORE, old, new)
    engine.add(make_request("a", 16, [old]))
    engine.run_out()
    assert old.mm_hash in engine.resident
    device = Device(engine, lambda moves: old.mm_hash in engine.resident)
    engine.add(make_request("b", 16, [new]))
    engine.run_out()
    assert finished(engine)["b"].reason is FinishReason.LENGTH
    assert device.moves == 2 and old.mm_hash not in engine.resident
