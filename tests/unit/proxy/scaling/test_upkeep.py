"""The proxy process's care for its memory."""

from __future__ import annotations

import gc
import weakref

from triptych.proxy.scaling.upkeep import release_memory


class Node:
    """Half of a cycle."""

    other: Node


async def test_a_cycle_that_no_collection_has_seen_is_gone_once_memory_is_released() -> None:
    gc.disable()
    try:
        one, two = Node(), Node()
        one.other, two.other = two, one
        gone = weakref.ref(one)
        del one, two
        assert gone() is not None
        await release_memory()
        assert gone() is None
    finally:
        gc.enable()
