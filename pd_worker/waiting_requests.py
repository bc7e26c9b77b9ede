"""Requests that do not run, by what they wait for: a step looks only at those whose case may differ."""

from __future__ import annotations

from collections.abc import Iterable

from triptych.pd_worker.request import RequestOrder, RequestState, RequestStatus
from triptych.pd_worker.request_order import OrderedRequests


class WaitingRequests:
    """Some wait for room for their items, some for embeddings; the others for a slot and blocks.

    A request whose case may have changed is looked at again in the next step. One more is looked at in every
    step, whatever has happened: another request may have computed its prefix, which no event tells.
    """

    def __init__(self) -> None:
        self._all = OrderedRequests()
        #: Not admitted: with items, and text only.
        self._for_room = OrderedRequests()
        self._text = OrderedRequests()
        #: Admitted, and all that they need is here or on its way from the host copy.
        self.startable = OrderedRequests()
        self._again: set[RequestState] = set()
        #: Those whose items have never all been here.
        self._incomplete: set[RequestState] = set()
        self._audited: RequestOrder | None = None

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

    def file(self, state: RequestState) -> None:
        """The request waits for something else now: its status says so."""
        self._for_room.discard(state)
        self._text.discard(state)
        self.startable.discard(state)
        if state.status is RequestStatus.WAITING_ROOM:
            (self._for_room if state.features else self._text).add(state)
        elif state.features:
            self._again.add(state)
        else:
            self.startable.add(state)

    def completed(self, state: RequestState) -> None:
        """All its items have been here."""
        self._incomplete.discard(state)

    def look_again(self, states: Iterable[RequestState]) -> None:
        """The case of these may have changed. Requests that do not wait, or are not admitted, are ignored."""
        self._again.update(state for state in states if state.waits_with_items)

    def sought(self, state: RequestState, here: bool) -> None:
        """Whether all items that it needs are here, or on their way from the host copy."""
        if here:
            self.startable.add(state)
        else:
            self.startable.discard(state)

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

    def audit(self) -> None:
        """Has one request more looked at, each in its turn."""
        if not len(self._all):
            return
        state = None if self._audited is None else self._all.after(self._audited)
        state = state or self._all[0]
        self._audited = state.order
        self.look_again((state,))
