"""On which KV blocks' contents the known prefixes of waiting requests depend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from triptych.pd_worker.core.request import RequestState


class PrefixWatch:
    """A prefix is another one when a block of it goes, or when the first one that it lacks comes."""

    def __init__(self) -> None:
        self._digests: dict[RequestState, Sequence[bytes]] = {}
        self._states: dict[bytes, set[RequestState]] = {}

    def __len__(self) -> int:
        """Contents that some request depends on."""
        return len(self._states)

    def watch(self, state: RequestState, digests: Sequence[bytes]) -> None:
        """The request depends on these contents, and on no others any more."""
        if self._digests.get(state) == digests:
            return
        self.forget(state)
        self._digests[state] = digests
        for digest in digests:
            self._states.setdefault(digest, set()).add(state)

    def forget(self, state: RequestState) -> None:
        """Idempotent."""
        for digest in self._digests.pop(state, ()):
            states = self._states[digest]
            states.discard(state)
            if not states:
                del self._states[digest]

    def depending(self, digests: Iterable[bytes]) -> set[RequestState]:
        """The requests whose prefix is another one when these contents have come or gone."""
        return {state for digest in digests for state in self._states.get(digest, ())}
