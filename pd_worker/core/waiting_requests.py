"""Queues of waiting requests; a step examines only those that may have changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from triptych.base.errors import RequestError
from triptych.pd_worker.core.admission import AdmissionQueue, RequestsInTurns
from triptych.pd_worker.core.items.tracker import Readiness
from triptych.pd_worker.core.request import RequestState, RequestStatus
from triptych.pd_worker.core.tenant_turns import TenantTurns


def waits_for_items(state: RequestState) -> bool:
    """Admitted, with items, and not running."""
    return bool(state.features) and state.status in (RequestStatus.WAITING_ITEMS, RequestStatus.PREEMPTED)


class PrefixWatch:
    """The digests of KV blocks on which the cached prefixes of waiting requests depend.

    A prefix changes when one of its blocks is evicted, or when the first block that it lacks is cached.
    """

    def __init__(self) -> None:
        self._digests: dict[RequestState, Sequence[bytes]] = {}
        self._states: dict[bytes, set[RequestState]] = {}

    def __len__(self) -> int:
        """Digests that some request depends on."""
        return len(self._states)

    def watch(self, state: RequestState, digests: Sequence[bytes]) -> None:
        """The request depends on these digests, in place of any earlier ones."""
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
        """The requests whose prefix may change when blocks with these digests are cached or evicted."""
        return {state for digest in self._states.keys() & digests for state in self._states[digest]}


class StartableRequests(RequestsInTurns[RequestState]):
    """Requests that can start as far as their items go; `pooled` are those of them that need no slot."""

    def __init__(self, turns: TenantTurns) -> None:
        super().__init__(turns)
        self.pooled = RequestsInTurns[RequestState](turns)

    def add(self, request: RequestState) -> None:
        super().add(request)
        if request.request.pooling is not None:
            self.pooled.add(request)

    def discard(self, request: RequestState) -> None:
        super().discard(request)
        self.pooled.discard(request)

    def with_slots(self, free: Callable[[], int]) -> Iterable[RequestState]:
        """As `one_by_one`; from the first one on that lacks a slot, only those that need none."""
        return self._with_slots(free) if self.tenants else ()

    def _with_slots(self, free: Callable[[], int]) -> Iterator[RequestState]:
        for state in self.one_by_one():
            if state.request.pooling is None and free() <= 0:
                yield from self.pooled.one_by_one()
                return
            yield state


class WaitingRequests:
    """Requests that wait: for room for their items, for embeddings, or for a slot and blocks.

    A request that may have changed is examined in the next step. `prefixes` are those of admitted requests
    with items: a longer prefix needs fewer items.
    """

    def __init__(self, turns: TenantTurns) -> None:
        self._all: set[RequestState] = set()
        self._admission = AdmissionQueue[RequestState](turns)
        #: Admitted, with all items resident or being moved from their host copies, as far as is known.
        self.startable = StartableRequests(turns)
        self._changed: set[RequestState] = set()
        #: Those whose items have never all been resident.
        self._incomplete: set[RequestState] = set()
        self.prefixes = PrefixWatch()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[RequestState]:
        """In no order. Not to be changed meanwhile."""
        return iter(self._all)

    @property
    def num_incomplete(self) -> int:
        """Requests that wait for embeddings and have not had them all yet."""
        return len(self._incomplete)

    def add(self, state: RequestState) -> None:
        self._all.add(state)
        if state.features and state.items_at is None:
            self._incomplete.add(state)
        self.requeue(state)

    def discard(self, state: RequestState) -> None:
        """Idempotent."""
        self._all.discard(state)
        self._admission.discard(state)
        self.startable.discard(state)
        self._changed.discard(state)
        self._incomplete.discard(state)
        self.prefixes.forget(state)

    def requeue(self, state: RequestState) -> None:
        """Moves the request to the queue that belongs to its status."""
        self._admission.discard(state)
        self.startable.discard(state)
        if state.status is RequestStatus.WAITING_ADMISSION:
            self._admission.add(state, has_items=bool(state.features))
            return
        if state.features:
            self._changed.add(state)
        if not state.features or state.status is RequestStatus.PREEMPTED:
            # A request preempted in this step still comes before all later ones.
            self.startable.add(state)

    def completed(self, state: RequestState) -> None:
        """All items of the request have been resident once."""
        self._incomplete.discard(state)

    def recheck(self, states: Iterable[RequestState]) -> None:
        """These requests are examined in the next step; those not waiting or not admitted are ignored."""
        self._changed.update(state for state in states if waits_for_items(state))

    def recheck_prefixes(self, digests: Iterable[bytes]) -> None:
        """Blocks with these digests were cached or evicted: requests that depend on them may have changed."""
        if len(self.prefixes):
            self.recheck(self.prefixes.depending(digests))

    def watch_prefix(self, state: RequestState, digests: Sequence[bytes]) -> None:
        """The request's prefix depends on these digests."""
        self.prefixes.watch(state, digests)

    def set_readiness(self, state: RequestState, readiness: Readiness) -> None:
        """Whether the request has its items. Room for a host copy may come within the step."""
        if readiness is Readiness.WAITING:
            self.startable.discard(state)
        else:
            self.startable.add(state)
        if readiness is Readiness.NO_SPACE:
            self._changed.add(state)

    def put_off(self, state: RequestState) -> None:
        """An admitted request waits for its admission again."""
        state.status = RequestStatus.WAITING_ADMISSION
        self._changed.discard(state)
        self.prefixes.forget(state)
        self.requeue(state)

    def unready(self, state: RequestState) -> None:
        """The request cannot start after all: an item that it needs is not resident."""
        self.startable.discard(state)
        self._changed.add(state)

    def admit(
        self, take: Callable[[RequestState], bool]
    ) -> Iterator[tuple[RequestState, RequestError | None]]:
        """As `AdmissionQueue.admit`; the caller queues the admitted ones again."""
        return self._admission.admit(take)

    def drain_changed(self) -> list[RequestState]:
        """The admitted requests to examine now, in order."""
        changed = sorted(self._changed, key=lambda state: state.order)
        self._changed.clear()
        return changed
