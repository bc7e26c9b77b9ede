"""Results of the embedding store's commands."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from triptych.ec_connector.store.scatter import Received


class SaveResult(enum.Enum):
    """The result of a save; in all three cases the embedding is in the store."""

    STORED = enum.auto()
    ALREADY = enum.auto()
    REPLACED = enum.auto()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A verified value. `body` is the caller's memory, filled with the tensor's bytes."""

    body: Received


@dataclass(frozen=True, slots=True)
class Missing:
    """No usable value. `damaged_digest` identifies a damaged one, so that a save may replace it."""

    reason: str
    damaged_digest: str = ""


LoadResult = Loaded | Missing


@dataclass(frozen=True, slots=True)
class StoreMemory:
    """The server's byte budget and eviction policy; `max_bytes` 0: no limit is set."""

    max_bytes: int
    used_bytes: int
    policy: str
