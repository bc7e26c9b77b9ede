"""vLLM's own encoder cache, followed from the scheduler's calls: a connector cannot ask for it."""

from __future__ import annotations

from collections.abc import Iterable

#: Rows and patch grid of an item.
ItemSize = tuple[int, tuple[int, ...]]


class EngineCache:
    """The items in the cache, with the sizes that they were computed for.

    An item that no request has taken yet goes when another one needs its place, which vLLM tells at the end
    of the step: after a request that may take places, `holds` says no until then.
    """

    def __init__(self) -> None:
        self._held: dict[str, ItemSize] = {}
        self._allocated: dict[str, ItemSize] = {}
        self._may_evict = False

    def holds(self, identifier: str, size: ItemSize) -> bool:
        """Whether vLLM surely has the item, if the request asked about takes no place before it."""
        return not self._may_evict and self._held.get(identifier) == size

    def may_evict(self) -> None:
        """A request is scheduled that needs places."""
        self._may_evict = True

    def allocated(self, identifier: str, size: ItemSize) -> None:
        """The item has its place from this step on."""
        self._allocated[identifier] = size

    def end_step(self, freed: Iterable[str]) -> None:
        """The step's end; `freed` have lost their places in it, and not got them again."""
        self._held |= self._allocated
        for identifier in freed:
            self._held.pop(identifier, None)
        self._allocated, self._may_evict = {}, False
