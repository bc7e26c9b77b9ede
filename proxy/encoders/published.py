"""Published bytes: in a tower or in the store, and not loaded by a PD worker yet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class _Hold:
    nbytes: int
    holders: set[str]


class Published:
    """What counts against the share: one hold per item, with the requests that have still to load it."""

    def __init__(self) -> None:
        self._holds: dict[str, _Hold] = {}
        self._by_holder: dict[str, set[str]] = {}
        self.nbytes = 0

    def hold(self, mm_hash: str, nbytes: int, holders: Iterable[str]) -> None:
        """The item counts from now on; one that counts already stays as it is."""
        if mm_hash not in self._holds:
            self._holds[mm_hash] = _Hold(nbytes, set())
            self.nbytes += nbytes
            for request_id in holders:
                self.join(mm_hash, request_id)

    def join(self, mm_hash: str, request_id: str) -> None:
        """The request, too, has still to load the item."""
        self._holds[mm_hash].holders.add(request_id)
        self._by_holder.setdefault(request_id, set()).add(mm_hash)

    def holds(self, mm_hash: str, request_id: str) -> bool:
        return mm_hash in self._by_holder.get(request_id, ())

    def leave(self, mm_hash: str, request_id: str) -> None:
        """The request loads the item no more; the item goes on counting."""
        self._holds[mm_hash].holders.discard(request_id)
        self._forget(mm_hash, request_id)

    def free(self, mm_hash: str) -> None:
        """The item counts no more. Idempotent."""
        hold = self._holds.pop(mm_hash, None)
        if hold is not None:
            self.nbytes -= hold.nbytes
            for request_id in hold.holders:
                self._forget(mm_hash, request_id)

    def free_unheld(self, mm_hash: str) -> None:
        """The item counts no more where no request has still to load it."""
        hold = self._holds.get(mm_hash)
        if hold is not None and not hold.holders:
            self.free(mm_hash)

    def end(self, request_id: str) -> None:
        """The request loads nothing more."""
        for mm_hash in list(self._by_holder.get(request_id, ())):
            self.leave(mm_hash, request_id)
            self.free_unheld(mm_hash)

    def _forget(self, mm_hash: str, request_id: str) -> None:
        items = self._by_holder[request_id]
        items.discard(mm_hash)
        if not items:
            del self._by_holder[request_id]
