"""Saves encoder outputs through an EC connector, worker role."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from triptych.ec_connector.base import ECConnectorOutput, ECConnectorRole, ECTransferConfig
from triptych.ec_connector.connectors.output_cache import OutputCache
from triptych.ec_connector.mixin import ECConnectorModelRunnerMixin


class Saver(Protocol):
    """The engine's side of a connector; `save` is called from its thread only."""

    def on_progress(self, tell: Callable[[], None]) -> None:
        """`tell` is called, from any thread, whenever `get_finished` has something new."""

    def save(self, outputs: OutputCache, mm_hash: str, damaged_digest: str) -> None:
        """Starts the save of one entry; a stored value is replaced only if it has `damaged_digest`."""

    def get_finished(self) -> ECConnectorOutput:
        """Drains what has finished; callable from any thread, each report is given once."""


class ConnectorSaver(ECConnectorModelRunnerMixin):
    """Saves through a connector of its own."""

    def __init__(self, config: ECTransferConfig) -> None:
        self._tell: Callable[[], None] = lambda: None
        self.ensure_ec_transfer_initialized(config, ECConnectorRole.WORKER, self._on_finished)

    def _on_finished(self) -> None:
        self._tell()

    def on_progress(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def save(self, outputs: OutputCache, mm_hash: str, damaged_digest: str) -> None:
        self.maybe_save_ec_to_connector(outputs, mm_hash, damaged_digest)

    def get_finished(self) -> ECConnectorOutput:
        return self.get_ec_transfer().get_finished()

    def close(self) -> None:
        """Ends transfers and closes connections."""
        self.shutdown_ec_transfer()
