"""Which requests name an item."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from triptych.pd_worker.core.request import RequestState
from triptych.types import MMFeature


class KeyIndex:
    """Requests by the mm_hash of their items, in the order of their coming."""

    def __init__(self) -> None:
        self._states: dict[str, dict[RequestState, None]] = {}

    def add(self, state: RequestState) -> None:
        for feature in state.features:
            self._states.setdefault(feature.mm_hash, {})[state] = None

    def discard(self, state: RequestState) -> None:
        """Idempotent."""
        for feature in state.features:
            states = self._states.get(feature.mm_hash)
            if states is not None:
                states.pop(state, None)
                if not states:
                    del self._states[feature.mm_hash]

    def naming(self, mm_hash: str) -> list[RequestState]:
        return list(self._states.get(mm_hash, ()))

    def naming_any(self, mm_hashes: Iterable[str]) -> Iterator[RequestState]:
        """One that names several comes several times."""
        for mm_hash in mm_hashes:
            yield from self._states.get(mm_hash, ())

    def features(self) -> Iterator[tuple[str, MMFeature]]:
        """Every key with an item that has it."""
        for key, states in self._states.items():
            for state in states:
                yield key, next(feature for feature in state.features if feature.mm_hash == key)
                break
