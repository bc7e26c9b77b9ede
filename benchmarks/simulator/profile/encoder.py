"""Times of an encoder worker's two stages: media to prepared pixels, and batches through the tower."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from triptych import hashing
from triptych.encoder_worker.host_copier import HostCopier
from triptych.encoder_worker.media.formats import decode_image
from triptych.goodput.load.pictures import jpeg
from triptych.goodput.load.workload import Picture
from triptych.models.base import EncoderSide, PreparedItem
from triptych.simulator.profile.fit import Sample
from triptych.simulator.profile.timing import Effort, in_time, timed

#: Sides of the square pictures, and how many make a batch beside one.
SIDES = (64, 224, 448, 128, 640, 320, 96, 1024, 160, 800, 400, 560)
BATCHES = (4, 2, 8)
_MAX_PIXELS = 1 << 26
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

    pictures = distinct_pictures(encoder)

    def samples() -> Iterator[Sample]:
        for prepared in pictures:
            alone = tower_sample(encoder, prepared, 1, effort)
            yield alone
            for count in BATCHES:
                # A batch that would take the time of many others says little that they do not say.
                if count * prepared.cost <= batch_patches and count * alone.seconds <= effort.sample_seconds:
                    yield tower_sample(encoder, prepared, count, effort)

    return in_time("tower", samples(), len(pictures) * (1 + len(BATCHES)), effort, 8)


def tower_sample(encoder: EncoderSide, prepared: PreparedItem, count: int, effort: Effort) -> Sample:
    """A batch of `count` times the same picture, by the terms of `EncoderCosts.tower`."""
    to_host = HostCopier(encoder.device)
    patches = count * prepared.cost

    def work() -> None:
        with torch.inference_mode():
            to_host(encoder.encode((prepared,) * count))

    pairs = patches * patches / count
    terms = {"tower_batch": 1, "tower_item": count, "tower_patch": patches, "tower_pair": pairs}
    return timed(work, terms, effort)


def distinct_pictures(encoder: EncoderSide) -> list[PreparedItem]:
    """One prepared picture for every number of patches that SIDES give; the processor may cap them."""
    found: dict[int, PreparedItem] = {}
    for side in SIDES:
        media = jpeg(Picture(side, side, side))
        item = encoder.preprocess(decode_image(media, max_pixels=_MAX_PIXELS), {})
        found.setdefault(item.cost, item)
    return list(found.values())
