"""What proxies have said to be stored a moment ago."""

from __future__ import annotations

from collections.abc import Iterable

#: How long a mark counts, in seconds.
MARK_SECONDS = 10.0


class ReadyMarks:
    """A ready mark may overtake the submission of a request that took the item for pending.

    Only the newest matter: older ones are forgotten.
    """

    def __init__(self) -> None:
        #: When each key's latest mark came, the oldest first.
        self._marks: dict[str, float] = {}

    @property
    def kept(self) -> int:
        """Marks that are not forgotten."""
        return len(self._marks)

    def add(self, mm_hashes: Iterable[str], now: float) -> None:
        """These embeddings are in the store."""
        marks = self._marks
        for key in mm_hashes:
            marks.pop(key, None)
            marks[key] = now
        while marks and not self._counts(marks[oldest := next(iter(marks))], now):
            del marks[oldest]

    def drop(self, mm_hash: str) -> None:
        """The embedding is not there any more."""
        self._marks.pop(mm_hash, None)

    def has(self, mm_hash: str, now: float) -> bool:
        """Whether a mark for the key counts now."""
        at = self._marks.get(mm_hash)
        return at is not None and self._counts(at, now)

    def _counts(self, at: float, now: float) -> bool:
        return at > now - MARK_SECONDS
