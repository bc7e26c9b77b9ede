"""Who may be worked on beside whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Isolation:
    """A suspect, which may have killed its encoders, is alone at its encoder: so nobody else is blamed.

    Counts the jobs in preprocessing or in a tower at every encoder, and the suspects among them.
    """

    def __init__(self) -> None:
        self._busy: Counter[str] = Counter()
        self._suspects: Counter[str] = Counter()
        self._kept: set[str] = set()

    def begin(self) -> None:
        """Another look at all jobs: what was kept in the last one is forgotten."""
        self._kept.clear()

    def admits(self, address: str, *, suspect: bool) -> bool:
        """Whether the job may begin there now."""
        return not self._closed(address) and not (suspect and self._busy[address])

    def enter(self, address: str, *, suspect: bool) -> None:
        """The job has begun there."""
        self._busy[address] += 1
        self._suspects[address] += suspect

    def leave(self, address: str, *, suspect: bool) -> None:
        """The job is not worked on there any more."""
        self._busy[address] -= 1
        self._suspects[address] -= suspect
        if not self._busy[address]:
            del self._busy[address], self._suspects[address]

    def keep(self, addresses: Iterable[str]) -> None:
        """A suspect waits for the emptiest of these to become empty: nothing begins there before it."""
        free = [address for address in addresses if not self._closed(address)]
        if free:
            self._kept.add(min(free, key=lambda address: (self._busy[address], address)))

    def _closed(self, address: str) -> bool:
        return address in self._kept or self._suspects[address] > 0
