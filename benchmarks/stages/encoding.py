"""The encoder's stages and the store's: preprocess, tower, save, load."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu.device_limits import tower_work
from benchmarks.stages.work import Limits, Stage, median_seconds
from triptych.base import hashing
from triptych.base.config import MIB
from triptych.encoder_worker.media.formats import decode_image
from triptych.goodput.load.payload import jpeg
from triptych.goodput.load.workload import Picture
from triptych.models.registry import load_encoder
from triptych.simulator.profile.encoder import Transfers

#: Pixels of a side of the peer kit's pictures.
SIDE = 320
_MAX_PIXELS = 1 << 22


def encoding(model: Path, dtype: torch.dtype, found: Limits, rounds: int) -> Iterator[Stage]:
    """Preprocess, the tower with one and with four pictures, an embedding to the store and back."""
    encoder = load_encoder(model, device=torch.device("cpu"), dtype=dtype)
    media = jpeg(Picture(1, SIDE, SIDE))

    def prepare() -> object:
        hashing.mm_hash(media, namespace="0" * 64, modality="image")
        return encoder.preprocess(decode_image(media, max_pixels=_MAX_PIXELS), {})

    yield Stage(f"hash, decode and preprocess {SIDE}x{SIDE}", median_seconds(prepare, 4 * rounds))
    item = encoder.preprocess(decode_image(media, max_pixels=_MAX_PIXELS), {})
    for count in (1, 4):
        with torch.inference_mode():
            seconds = median_seconds(lambda count=count: encoder.encode([item] * count), rounds)  # type: ignore[misc]
        least = tower_work(encoder, [item] * count).flops / found.product
        yield Stage(f"tower, {count} of {SIDE}x{SIDE}", seconds, least, "matrix product")
    nbytes = item.rows * encoder.width * torch.empty(0, dtype=dtype).element_size()
    yield from transfers(nbytes, found, 4 * rounds)


def transfers(nbytes: int, found: Limits, repeats: int) -> Iterator[Stage]:
    """Save and load of one embedding through a store of this machine."""
    with Transfers.opened(256 * MIB) as link:
        saves, loads = link.times(nbytes, repeats)
    for name, taken in (("save", saves), ("load", loads)):
        yield Stage(
            f"{name} of {nbytes / 1e3:.0f} kB", statistics.median(taken), nbytes / found.copy, "copying"
        )
