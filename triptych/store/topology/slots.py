"""Slot maps of a Redis Cluster: which server has which of the 16384 slots. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from redis.crc import key_slot

SLOTS = 16384

#: Commands whose second word is not a key.
_WITHOUT_KEYS = ("CLUSTER", "CONFIG", "FLUSHALL", "INFO", "KEYS", "PING")
#: Host and port of a server.
Place = tuple[str, int]


class SlotMap:
    """The owner of each slot, by host and port; slots that no server has are None."""

    def __init__(self, owners: Sequence[Place | None]) -> None:
        self._owners = [*owners, *[None] * (SLOTS - len(owners))]

    @classmethod
    def parse(cls, rows: Sequence[Sequence[object]], asked: str) -> SlotMap:
        """The map in a reply to CLUSTER SLOTS. A server without a host in it is the one that was `asked`.

        ValueError for another reply.
        """
        owners: list[Place | None] = [None] * SLOTS
        for row in rows:
            first, last, primary = row[:3]
            if not isinstance(first, int) or not isinstance(last, int) or not isinstance(primary, list):
                raise ValueError("no row of slots")
            host, port = primary[:2]
            text = host.decode() if isinstance(host, bytes) else ""
            owners[first : last + 1] = [(text or asked, int(port))] * (last + 1 - first)
        if len(owners) != SLOTS:
            raise ValueError("slots beyond the last one")
        return cls(owners)

    def owner(self, slot: int) -> Place | None:
        return self._owners[slot]

    def move(self, slot: int, place: Place) -> None:
        """The slot's owner is another one, as a MOVED reply says."""
        if 0 <= slot < SLOTS:
            self._owners[slot] = place

    def parts(self) -> dict[Place, float]:
        """The part of all slots that each server has."""
        counts = Counter(owner for owner in self._owners if owner is not None)
        return {place: count / SLOTS for place, count in sorted(counts.items())}


def slot_of(key: str) -> int:
    """The slot of a key: of the tag in its braces, where it has one."""
    return int(key_slot(key.encode()))


def key_of(words: Sequence[object]) -> str | None:
    """The first key of a command, as the store's commands are written; None for one without keys."""
    if words[0] == "EVAL":
        return str(words[3]) if words[2] else None
    return str(words[1]) if len(words) > 1 and words[0] not in _WITHOUT_KEYS else None
