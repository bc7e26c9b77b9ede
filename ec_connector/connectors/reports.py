"""What a worker role has finished, gathered from its transfers until the engine asks."""

from __future__ import annotations

import threading
from collections.abc import Callable

from triptych.ec_connector.base import ECConnectorOutput, FailedLoad
from triptych.ec_connector.metadata import HostCopy


class Reports:
    """Thread-safe. Every report but a forgotten one is drained exactly once."""

    def __init__(self, on_progress: Callable[[], None]) -> None:
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._output = ECConnectorOutput()

    def fetched(self, copy: HostCopy, seconds: float) -> None:
        with self._lock:
            self._output.fetched[copy.mm_hash] = seconds
            self._output.generations[copy.mm_hash] = copy.generation
        self._on_progress()

    def loaded(self, copy: HostCopy) -> None:
        with self._lock:
            self._output.loaded.append(copy.mm_hash)
            self._output.generations[copy.mm_hash] = copy.generation
        self._on_progress()

    def failed(self, copy: HostCopy, reason: str, damaged_digest: str = "") -> None:
        with self._lock:
            self._output.failed.append(FailedLoad(copy.mm_hash, reason, damaged_digest))
            self._output.generations[copy.mm_hash] = copy.generation
        self._on_progress()

    def saved(self, mm_hash: str) -> None:
        with self._lock:
            self._output.saved.append(mm_hash)
        self._on_progress()

    def unsaved(self, mm_hash: str, reason: str) -> None:
        with self._lock:
            self._output.unsaved[mm_hash] = reason
        self._on_progress()

    def not_loaded_by_a_producer(self, copy: HostCopy) -> None:
        self.failed(copy, "ec_role is producer: this connector only saves")

    def not_saved_by_a_consumer(self, mm_hash: str) -> None:
        self.unsaved(mm_hash, "ec_role is consumer: this connector only loads")

    def forget(self, copy: HostCopy) -> None:
        """Nobody asks for this load any more; what was moved into the cache is still told."""
        with self._lock:
            if self._output.generations.get(copy.mm_hash) == copy.generation:
                self._output.fetched.pop(copy.mm_hash, None)
                self._output.failed = [f for f in self._output.failed if f.mm_hash != copy.mm_hash]

    def drain(self) -> ECConnectorOutput:
        with self._lock:
            output, self._output = self._output, ECConnectorOutput()
        return output
