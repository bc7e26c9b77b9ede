"""Saves encoder outputs through the connector's worker role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from triptych.ec_connector.base import ECConnectorOutput, ECConnectorWorker
from triptych.encoder_worker.output_cache import OutputCache


class Saver:
    """The engine's side of the connector; used from the engine's thread only."""

    def __init__(self, connector: ECConnectorWorker) -> None:
        self._connector = connector

    def on_progress(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from any thread, whenever `get_finished` has something new."""
        self._connector.on_progress = wake

    def save(self, outputs: OutputCache, mm_hash: str, damaged_digest: str) -> None:
        """Starts the save of one entry; a stored value is replaced only if it has `damaged_digest`."""
        if damaged_digest != outputs[mm_hash].damaged_digest:
            outputs[mm_hash] = replace(outputs[mm_hash], damaged_digest=damaged_digest)
        self._connector.save_caches(outputs, mm_hash)

    def get_finished(self) -> ECConnectorOutput:
        """Drains what has finished."""
        return self._connector.get_finished()
