"""Times of a save and a load through the connector's worker role and an embedded store."""

from __future__ import annotations

import hashlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from triptych.config import MIB
from triptych.ec_connector.base import ECConnectorOutput, ECConnectorRole, ECTransferConfig, EncoderOutput
from triptych.ec_connector.factory import ECConnectorFactory
from triptych.ec_connector.metadata import Fetch, LoadId, TransferMetadata
from triptych.errors import ConfigError
from triptych.launch.embedded_store import EmbeddedStore
from triptych.simulator.profile.fit import Sample
from triptych.simulator.profile.timing import Effort, in_time
from triptych.types import ItemPlan

KIB = 1 << 10
#: Bytes of the embeddings; a row has `_WIDTH` float32 elements.
SIZES = tuple(size * KIB for size in (4, 1024, 64, 4096, 256, 16384, 16, 512, 2048, 8192, 128, 32))
_WIDTH = 256
_WAIT_SECONDS = 20.0
_NAMESPACE = hashlib.sha256(b"profile").hexdigest()


class Transfers:
    """One worker role for saves and loads, and the wait until it has finished one."""

    def __init__(self, store_url: str) -> None:
        config = ECTransferConfig(store_url=store_url, namespace=_NAMESPACE, host_buffer_bytes=256 * MIB)
        self._progress = threading.Event()
        self._worker = ECConnectorFactory.create_connector(config, ECConnectorRole.WORKER, self._progress.set)
        self._count = 0

    def item(self, nbytes: int) -> EncoderOutput:
        """An embedding of `nbytes` that the store does not hold yet."""
        self._count += 1
        mm_hash = hashlib.sha256(str(self._count).encode()).hexdigest()
        rows = nbytes // (4 * _WIDTH)
        plan = ItemPlan(mm_hash, _NAMESPACE, "image", rows, _WIDTH, "float32", rows)
        return EncoderOutput(plan, torch.rand(rows, _WIDTH))

    def save(self, item: EncoderOutput) -> float:
        """Seconds until it has landed."""
        key = item.plan.mm_hash
        began = time.perf_counter()
        self._worker.save_caches({key: item}, key)
        self._wait(lambda output: key in output.saved)
        return time.perf_counter() - began

    def load(self, item: EncoderOutput) -> float:
        """Seconds until a host copy is here; it is dropped again."""
        key = item.plan.mm_hash
        began = time.perf_counter()
        self._worker.start_load_caches(TransferMetadata(1, fetches=(Fetch(item.plan, 1),)), {})
        self._wait(lambda output: key in output.fetched)
        seconds = time.perf_counter() - began
        self._worker.start_load_caches(TransferMetadata(2, drops=(LoadId(key, 1),)), {})
        return seconds

    def close(self) -> None:
        self._worker.shutdown()

    def _wait(self, done: Callable[[ECConnectorOutput], bool]) -> None:
        deadline = time.monotonic() + _WAIT_SECONDS
        while True:
            self._progress.wait(_WAIT_SECONDS)
            self._progress.clear()
            output = self._worker.get_finished()
            if output.failed or output.unsaved:
                raise ConfigError(f"the store did not take or give an embedding: {output}")
            if done(output):
                return
            if time.monotonic() > deadline:
                raise ConfigError(f"a transfer did not end in {_WAIT_SECONDS:g} s")


def transfer_samples(effort: Effort) -> tuple[list[Sample], list[Sample]]:
    """(saves, loads) of every size, one at a time."""
    with tempfile.TemporaryDirectory(prefix="triptych-") as folder:
        store = EmbeddedStore(Path(folder), 512 * MIB)
        store.start()
        transfers = Transfers(store.url)

        def sample(nbytes: int) -> tuple[Sample, Sample]:
            items = [transfers.item(nbytes) for _ in range(effort.repeats + 1)]
            return _sample("save", nbytes, map(transfers.save, items)), _sample(
                "load", nbytes, map(transfers.load, items)
            )

        try:
            pairs = in_time("saves and loads", map(sample, SIZES), len(SIZES), effort)
            saves, loads = zip(*pairs, strict=True)
        finally:
            transfers.close()
            store.stop()
    return list(saves), list(loads)


def _sample(kind: str, nbytes: int, repeats: Iterable[float]) -> Sample:
    """Without the first one, which warms connections and buffers up."""
    _, *seconds = repeats
    return Sample({f"{kind}_item": 1, f"{kind}_byte": nbytes}, statistics.median(seconds), tuple(seconds))
