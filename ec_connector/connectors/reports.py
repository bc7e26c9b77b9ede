"""Reports of a worker role's transfers, kept until the engine drains them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from triptych.ec_connector.base import ECConnectorOutput, FailedLoad
from triptych.ec_connector.metadata import LoadId


class Reports:
    """The reports of a worker role's transfers, safe between threads. Each one is drained exactly once.

    `on_progress` is called, from any thread, after each report.
    """

    def __init__(self, on_progress: Callable[[], None]) -> None:
        self.on_progress = on_progress
        self._lock = threading.Lock()
        self._output = ECConnectorOutput()

    def fetched(self, load_id: LoadId, seconds: float) -> None:
        with self._lock:
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
        with self._lock:
            failure = FailedLoad(load_id.mm_hash, reason, damaged_digest, unreachable)
            self._output.failed.append(failure)
            self._output.generations[load_id.mm_hash] = load_id.generation
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
