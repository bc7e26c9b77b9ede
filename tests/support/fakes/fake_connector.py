"""EC connectors, worker role, whose saves a test watches."""

from __future__ import annotations

from collections.abc import Callable

from triptych.ec_connector.base import (
    ECConnectorMetadata,
    ECConnectorOutput,
    ECConnectorWorker,
    ECTransferConfig,
    EncoderCacheMap,
)


class RecordingWorker(ECConnectorWorker):
    """Lands every save at once, save those of keys in `refused`."""

    def __init__(self, config: ECTransferConfig, on_progress: Callable[[], None] | None = None) -> None:
        super().__init__(config, on_progress)
        self.saves: list[tuple[str, str]] = []
        self.refused: set[str] = set()
        self.broken: set[str] = set()
        self.output = ECConnectorOutput()

    def start_load_caches(self, metadata: ECConnectorMetadata, encoder_cache: EncoderCacheMap) -> None:
        raise NotImplementedError

    def save_caches(self, encoder_cache: EncoderCacheMap, mm_hash: str, damaged_digest: str = "") -> None:
        if mm_hash in self.broken:
            raise RuntimeError("no save")
        self.saves.append((mm_hash, damaged_digest))
        if mm_hash in self.refused:
            self.output.unsaved[mm_hash] = "no room"
        else:
            self.output.saved.append(mm_hash)
        self.on_progress()

    def get_finished(self) -> ECConnectorOutput:
        output, self.output = self.output, ECConnectorOutput()
        return output

    def shutdown(self) -> None:
        pass


class SlowWorker(RecordingWorker):
    """Lands saves when the test says so."""

    def save_caches(self, encoder_cache: EncoderCacheMap, mm_hash: str, damaged_digest: str = "") -> None:
        self.saves.append((mm_hash, damaged_digest))

    def land(self, mm_hash: str) -> None:
        self.output.saved.append(mm_hash)
        self.on_progress()


def fake_transfer(name: str = "Recording") -> ECTransferConfig:
    """The config of a connector of this module."""
    return ECTransferConfig(connector=f"{__name__}:{name}", ec_role="producer")
