"""Results of the embedding store's commands."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from triptych.store.bulk import Received


class SaveResult(enum.Enum):
    """The result of a save; in all three cases the embedding is in the store."""

    STORED = enum.auto()
    ALREADY = enum.auto()
    REPLACED = enum.auto()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A verified value. `body` is the caller's memory, filled with the tensor's bytes.

    `producer` is the trace context of the span that computed it; empty where there is none.
    """

    body: Received
    producer: bytes = b""


@dataclass(frozen=True, slots=True)
class Missing:
    """No usable value. `damaged_digest` identifies a damaged one, so that a save may replace it."""

    reason: str
    damaged_digest: str = ""


LoadResult = Loaded | Missing


@dataclass(frozen=True, slots=True)
class StoreMemory:
    """The byte budget and eviction policy of a server or a store; `max_bytes` 0: no limit is set."""

    max_bytes: int
    used_bytes: int
    policy: str
    #: Keys evicted since the servers started.
    evicted_keys: int = 0


#: The eviction policy that keeps leases and registrations, which have no TTL.
POLICY = "volatile-lru"


def combined(parts: Sequence[tuple[StoreMemory, float]]) -> StoreMemory:
    """The memory of servers that each hold this part of all keys.

    The budget is what fits before the first server is full: the sum, where each one's is by its part.
    """
    memories = [memory for memory, _ in parts]
    limited = bool(memories) and all(memory.max_bytes for memory in memories)
    return StoreMemory(
        max_bytes=int(min(memory.max_bytes / part for memory, part in parts)) if limited else 0,
        used_bytes=sum(memory.used_bytes for memory in memories),
        evicted_keys=sum(memory.evicted_keys for memory in memories),
        policy=next((memory.policy for memory in memories if memory.policy != POLICY), POLICY),
    )
