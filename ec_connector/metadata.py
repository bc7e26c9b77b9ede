"""What the roles tell each other: a step's orders, as msgpack between processes, and reports of transfers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Self

import msgspec

from triptych.base.types import EmbeddingSource, ItemPlan, prepared
from triptych.ec_connector.base import ECConnectorMetadata, ECConnectorOutput, FailedLoad


@dataclass(frozen=True, slots=True)
class LoadId:
    """The id of one load, and of the host copy that it makes: `generation` counts the loads of all keys."""

    mm_hash: str
    generation: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """An order to get an item into a host copy: from its `source`, where it has one, else from the store."""

    plan: ItemPlan
    generation: int
    source: EmbeddingSource | None = None

    @property
    def load_id(self) -> LoadId:
        return LoadId(self.plan.mm_hash, self.generation)


@dataclass(frozen=True)
class TransferMetadata(ECConnectorMetadata):
    """A step's orders: first `drops` of host copies, then `fetches`, then `moves` into the encoder cache."""

    step: int
    fetches: tuple[Fetch, ...] = ()
    moves: tuple[LoadId, ...] = ()
    drops: tuple[LoadId, ...] = ()

    def loads(self) -> Iterable[tuple[str, int]]:
        ids = (*(fetch.load_id for fetch in self.fetches), *self.moves)
        return tuple((load.mm_hash, load.generation) for load in ids)

    def without_loads(self) -> Self:
        return replace(self, fetches=(), moves=())

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """The metadata that `to_bytes` made, by a process of the same release; ValueError for other bytes."""
        return msgspec.msgpack.decode(raw, type=prepared(cls))


class Reports:
    """The reports of a worker role's transfers, safe between threads. Each one is drained exactly once.

    `on_progress` is called, from any thread, after each report.
    """

    def __init__(self, on_progress: Callable[[], None]) -> None:
        self.on_progress = on_progress
        self._lock = threading.Lock()
        self._output = ECConnectorOutput()

    def fetched(self, load_id: LoadId, seconds: float, path: str = "store") -> None:
        with self._lock:
            self._output.paths[load_id.mm_hash] = path
            self._output.fetched[load_id.mm_hash] = seconds
            self._output.generations[load_id.mm_hash] = load_id.generation
        self.on_progress()

    def loaded(self, load_id: LoadId) -> None:
        with self._lock:
            self._output.loaded.append(load_id.mm_hash)
            # A later load of the key may have been reported already, whose generation counts.
            self._output.generations.setdefault(load_id.mm_hash, load_id.generation)
        self.on_progress()

    def failed(
        self, load_id: LoadId, reason: str, damaged_digest: str = "", *, unreachable: bool = False
    ) -> None:
        self._failed(load_id, FailedLoad(load_id.mm_hash, reason, damaged_digest, unreachable))

    def not_moved(self, load_id: LoadId, error: Exception) -> None:
        """The copy to the device failed. Where only memory was short, the host copy may be moved again."""
        reason = f"copy to the device failed: {error}"
        self._failed(load_id, FailedLoad(load_id.mm_hash, reason, no_memory=isinstance(error, MemoryError)))

    def _failed(self, load_id: LoadId, failure: FailedLoad) -> None:
        with self._lock:
            self._output.failed.append(failure)
            self._output.generations[load_id.mm_hash] = load_id.generation
        self.on_progress()

    def offered(self, mm_hash: str, source: EmbeddingSource) -> None:
        with self._lock:
            self._output.offered[mm_hash] = source
        self.on_progress()

    def saved(self, mm_hash: str) -> None:
        with self._lock:
            self._output.saved.append(mm_hash)
        self.on_progress()

    def unsaved(self, mm_hash: str, reason: str) -> None:
        with self._lock:
            self._output.unsaved[mm_hash] = reason
        self.on_progress()

    def not_loaded_by_a_producer(self, load_id: LoadId) -> None:
        self.failed(load_id, "ec_role is producer: this connector only saves")

    def not_saved_by_a_consumer(self, mm_hash: str) -> None:
        self.unsaved(mm_hash, "ec_role is consumer: this connector only loads")

    def forget(self, load_id: LoadId) -> None:
        """Removes a dropped load's reports, except that of its move into the encoder cache."""
        with self._lock:
            if self._output.generations.get(load_id.mm_hash) == load_id.generation:
                self._output.fetched.pop(load_id.mm_hash, None)
                self._output.failed = [f for f in self._output.failed if f.mm_hash != load_id.mm_hash]

    def drain(self) -> ECConnectorOutput:
        with self._lock:
            output, self._output = self._output, ECConnectorOutput()
        return output
