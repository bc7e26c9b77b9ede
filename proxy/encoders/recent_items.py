"""Items whose embeddings have just been published."""

from __future__ import annotations

from collections import OrderedDict

from triptych.proxy.ports import JobReady

#: Longer than any look-up in the store takes.
KEPT_SECONDS = 60.0
KEPT_ITEMS = 4096


class RecentItems:
    """The items published too recently for running look-ups to see them; `now` never goes back."""

    def __init__(self) -> None:
        self._landed: OrderedDict[str, tuple[float, JobReady]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._landed)

    def add(self, mm_hash: str, end: JobReady, now: float) -> None:
        """The embedding is in the store as of now."""
        self._landed.pop(mm_hash, None)
        self._landed[mm_hash] = now, end
        while len(self._landed) > KEPT_ITEMS or next(iter(self._landed.values()))[0] < now - KEPT_SECONDS:
            self._landed.popitem(last=False)

    def published_since(self, mm_hash: str, moment: float) -> JobReady | None:
        """How the item's job ended, if that was at `moment` or later."""
        landed, end = self._landed.get(mm_hash, (moment, None))
        return end if landed >= moment else None
