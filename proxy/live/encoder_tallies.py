"""Tallies of what each encoder worker has done for this proxy."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from triptych.proxy.live.goodput import mean
from triptych.proxy.ports import JobReady

#: Items whose times are averaged.
_LAST = 32


@dataclass(slots=True)
class _Tally:
    done: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))


class EncoderTallies:
    """The tallies by address. `keep` drops those of workers that have gone."""

    def __init__(self) -> None:
        self._tallies: dict[str, _Tally] = {}

    def add(self, end: JobReady) -> None:
        """An item is in the store. One that was there already took no time of the tower."""
        tally = self._tallies.setdefault(end.address, _Tally())
        tally.done += 1
        if not end.already_stored:
            tally.seconds.append(end.encode_seconds)

    def keep(self, addresses: Collection[str]) -> None:
        for address in self._tallies.keys() - set(addresses):
            del self._tallies[address]

    def read(self, address: str) -> tuple[int, float | None]:
        """Items done, and the mean milliseconds of the last towers' batches; None before the first."""
        tally = self._tallies.get(address, _Tally())
        seconds = mean(tally.seconds)
        return tally.done, None if seconds is None else round(seconds * 1000, 1)
