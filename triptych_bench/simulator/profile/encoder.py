"""Times of an encoder worker's stages: media to pixels, batches through the tower, saves and loads."""

from __future__ import annotations

import hashlib
import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from triptych.apps.launch.embedded_store import EmbeddedStore
from triptych.base import hashing
from triptych.base.config import MIB
from triptych.base.errors import ConfigError
from triptych.base.types import ItemPlan
from triptych.ec_connector.base import ECConnectorOutput, ECConnectorRole, ECTransferConfig, EncoderOutput
from triptych.ec_connector.factory import ECConnectorFactory
from triptych.ec_connector.metadata import Fetch, LoadId, TransferMetadata
from triptych.encoder_worker.host_copier import HostCopier
from triptych.encoder_worker.media.formats import decode_image
from triptych.models.base import EncoderSide, PreparedItem
from triptych_bench.goodput.load.payload import jpeg
from triptych_bench.goodput.load.workload import Picture
from triptych_bench.simulator.profile.fit import Effort, Sample, in_time, sample_of, timed

#: Sides of the square pictures, and how many make a batch beside one.
SIDES = (64, 224, 448, 128, 640, 320, 96, 1024, 160, 800, 400, 560)
BATCHES = (4, 2, 8)
#: KiB of the embeddings; a row has `_WIDTH` float32 elements.
SIZES = (4, 1024, 64, 4096, 256, 16384, 16, 512, 2048, 8192, 128, 32)
_WIDTH = 256
_MAX_PIXELS = 1 << 26
_WAIT_SECONDS = 20.0
_NAMESPACE = hashlib.sha256(b"profile").hexdigest()


def prepare_samples(encoder: EncoderSide, effort: Effort) -> list[Sample]:
    """Hash, decode and preprocess a JPEG of noise, for every size."""

    def sample(side: int) -> Sample:
        media = jpeg(Picture(side, side, side))

        def work() -> None:
            hashing.mm_hash(media, namespace=_NAMESPACE, modality="image")
            encoder.preprocess(decode_image(media, max_pixels=_MAX_PIXELS), {})

        return timed(work, {"prepare_item": 1, "prepare_pixel": side * side}, effort)

    return in_time("preprocessing", map(sample, SIDES), len(SIDES), effort)


def tower_samples(encoder: EncoderSide, effort: Effort, batch_patches: int) -> list[Sample]:
    """Batches of pictures of one size, up to `batch_patches` patches, to rows in host memory."""
    items: dict[int, PreparedItem] = {}
    for side in SIDES:
        media = jpeg(Picture(side, side, side))
        item = encoder.preprocess(decode_image(media, max_pixels=_MAX_PIXELS), {})
        # The processor may cap the number of patches.
        items.setdefault(item.cost, item)

    def samples() -> Iterator[Sample]:
        for cost, item in items.items():
            alone = tower_sample(encoder, item, 1, effort)
            yield alone
            for count in BATCHES:
                # A batch that would take the time of many others says little that they do not say.
                if count * cost <= batch_patches and count * alone.seconds <= effort.sample_seconds:
                    yield tower_sample(encoder, item, count, effort)

    return in_time("tower", samples(), len(items) * (1 + len(BATCHES)), effort, 8)


def tower_sample(encoder: EncoderSide, item: PreparedItem, count: int, effort: Effort) -> Sample:
    """A batch of `count` times the same picture, by the terms of `EncoderCosts.tower`."""
    to_host, patches = HostCopier(encoder.device), count * item.cost

    def work() -> None:
        with torch.inference_mode():
            to_host(encoder.encode((item,) * count))

    pairs = patches * patches / count
    terms = {"tower_batch": 1, "tower_item": count, "tower_patch": patches, "tower_pair": pairs}
    return timed(work, terms, effort)


class TransferRole:
    """A connector's worker role, and the wait for its reports.

    It waits as an engine does: a busy one would take the interpreter from the connector's own thread.
    """

    def __init__(self, config: ECTransferConfig) -> None:
        self._progress = threading.Event()
        self.worker = ECConnectorFactory.create_connector(config, ECConnectorRole.WORKER, self._progress.set)

    def until(self, done: Callable[[ECConnectorOutput], object]) -> ECConnectorOutput:
        """The first report that is `done`; ConfigError when a transfer fails, or none ends."""
        while self._progress.wait(_WAIT_SECONDS):
            self._progress.clear()
            output = self.worker.get_finished()
            if output.failed or output.unsaved:
                raise ConfigError(f"the store did not take or give an embedding: {output}")
            if done(output):
                return output
        raise ConfigError(f"a transfer did not end in {_WAIT_SECONDS:g} s")


def transfer_times(role: TransferRole, number: int, nbytes: int) -> tuple[float, float]:
    """Seconds of a save until `nbytes` have landed, and of their load until a host copy is here."""
    key, rows = hashlib.sha256(str(number).encode()).hexdigest(), nbytes // (4 * _WIDTH)
    plan = ItemPlan(key, _NAMESPACE, "image", rows, _WIDTH, "float32", rows)
    output = EncoderOutput(plan, torch.rand(rows, _WIDTH))
    began = time.perf_counter()
    role.worker.save_caches({key: output}, key)
    role.until(lambda result: key in result.saved)
    saved, began = time.perf_counter() - began, time.perf_counter()
    role.worker.start_load_caches(TransferMetadata(1, fetches=(Fetch(plan, 1),)), {})
    role.until(lambda result: key in result.fetched)
    loaded = time.perf_counter() - began
    role.worker.start_load_caches(TransferMetadata(2, drops=(LoadId(key, 1),)), {})
    return saved, loaded


def transfer_samples(effort: Effort) -> tuple[list[Sample], list[Sample]]:
    """(saves, loads) of every size, with a store of their own."""
    with (
        tempfile.TemporaryDirectory(prefix="triptych-") as folder,
        EmbeddedStore(Path(folder), 512 * MIB) as store,
    ):
        buffers = 256 * MIB
        role = TransferRole(
            ECTransferConfig(store_url=store.url, namespace=_NAMESPACE, host_buffer_bytes=buffers)
        )
        numbers = itertools.count()

        def sample(size: int) -> tuple[Sample, Sample]:
            nbytes = size << 10
            taken = [transfer_times(role, next(numbers), nbytes) for _ in range(effort.repeats + 1)]
            # The first ones warm connections and buffers up.
            saves, loads = zip(*taken[1:], strict=True)
            saved = sample_of({"save_item": 1.0, "save_byte": float(nbytes)}, saves)
            return saved, sample_of({"load_item": 1.0, "load_byte": float(nbytes)}, loads)

        try:
            pairs = in_time("saves and loads", map(sample, SIZES), len(SIZES), effort)
        finally:
            role.worker.shutdown()
    return [saved for saved, _ in pairs], [loaded for _, loaded in pairs]
