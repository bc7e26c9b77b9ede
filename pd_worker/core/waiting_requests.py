"""Requests that do not run, by what they wait for: a step looks only at those whose case may differ."""

from __future__ import annotations

from collections.abc import Iterable

from triptych.pd_worker.core.items import Sought
from triptych.pd_worker.core.prefix_watch import PrefixWatch
from triptych.pd_worker.core.request import RequestState, RequestStatus
from triptych.pd_worker.core.request_order import OrderedRequests


class WaitingRequests:
    """Some wait for room for their items, some for embeddings; the others for a slot and blocks.

    A request whose case may have changed is looked at again in the next step. `prefixes` are those of the
    admitted requests with items: a longer one needs fewer items.
    """

    def __init__(self) -> None:
        self._all = OrderedRequests()
        #: Not admitted: with items, and text only.
        self._for_room = OrderedRequests()
        self._text = OrderedRequests()
        #: Admitted, and as far as is known all that they need is here or on its way from the host copy.
        self.startable = OrderedRequests()
        self._again: set[RequestState] = set()
        #: Those whose items have never all been here.
        self._incomplete: set[RequestState] = set()
        self.prefixes = PrefixWatch()

    def __len__(self) -> int:
        return len(self._all)

    @property
    def num_incomplete(self) -> int:
        """Requests that wait for embeddings and have not had them all yet."""
        return len(self._incomplete)

    def add(self, state: RequestState) -> None:
        self._all.add(state)
        if state.features and state.items_at is None:
            self._incomplete.add(state)
        self.file(state)

    def discard(self, state: RequestState) -> None:
        """Idempotent."""
        for queue in (self._all, self._for_room, self._text, self.startable):
            queue.discard(state)
        self._again.discard(state)
        self._incomplete.discard(state)
        self.prefixes.forget(state)

    def file(self, state: RequestState) -> None:
        """The request waits for something else now: its status says so."""
        self._for_room.discard(state)
        self._text.discard(state)
        self.startable.discard(state)
        if state.status is RequestStatus.WAITING_ROOM:
            (self._for_room if state.features else self._text).add(state)
            return
        if state.features:
            self._again.add(state)
        if not state.features or state.status is RequestStatus.PREEMPTED:
            # What was preempted in this step still stands before all that came later.
            self.startable.add(state)

    def completed(self, state: RequestState) -> None:
        """All its items have been here."""
        self._incomplete.discard(state)

    def look_again(self, states: Iterable[RequestState]) -> None:
        """The case of these may have changed. Requests that do not wait, or are not admitted, are ignored."""
        self._again.update(state for state in states if state.waits_with_items)

    def sought(self, state: RequestState, found: Sought) -> None:
        """What has been found of the items that it needs. Room for a host copy may come within the step."""
        if found is Sought.WAITS:
            self.startable.discard(state)
        else:
            self.startable.add(state)
        if found is Sought.NO_ROOM:
            self._again.add(state)

    def unready(self, state: RequestState) -> None:
        """The request cannot start after all: an item that it needs is not here."""
        self.startable.discard(state)
        self._again.add(state)

    def first_for_room(self, *, text_only: bool) -> RequestState | None:
        """The first request that is not admitted; `text_only`: the first one without items."""
        text = self._text[0] if len(self._text) else None
        media = self._for_room[0] if len(self._for_room) and not text_only else None
        if text is None or media is None:
            return text or media
        return min(text, media, key=lambda state: state.order)

    def changed(self) -> list[RequestState]:
        """The admitted requests that have to be looked at now, in order; drained."""
        changed = sorted(self._again, key=lambda state: state.order)
        self._again.clear()
        return changed
