"""Times of an encoder worker's two stages: media to prepared pixels, and batches through the tower."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from triptych import hashing
from triptych.encoder_worker.host_copier import HostCopier
from triptych.encoder_worker.media.formats import decode_image
from triptych.goodput.load.pictures import jpeg
from triptych.goodput.load.workload import Picture
from triptych.models.base import EncoderSide, PreparedItem
from triptych.simulator.profile.fit import Sample
from triptych.simulator.profile.timing import Deadline, Effort, timed

#: Sides of the square pictures, and how many make a batch.
SIDES = (64, 224, 448, 128, 640, 320, 96, 1024, 160, 800, 400, 560)
BATCHES = (1, 4, 2, 8)
_MAX_PIXELS = 1 << 26
_NAMESPACE = hashlib.sha256(b"profile").hexdigest()


def prepare_samples(encoder: EncoderSide, effort: Effort) -> list[Sample]:
    """Hash, decode and preprocess a JPEG of noise, for every size."""
    deadline = Deadline(effort.stage_seconds)
    samples: list[Sample] = []
    for side in SIDES:
        media = jpeg(Picture(side, side, side))

        def work(media: bytes = media) -> None:
            hashing.mm_hash(media, namespace=_NAMESPACE, modality="image")
            encoder.preprocess(decode_image(media, max_pixels=_MAX_PIXELS), {})

        samples.append(timed(work, {"prepare_item": 1, "prepare_pixel": side * side}, effort))
        if deadline.over and len(samples) >= 4:
            break
    return samples


def tower_samples(encoder: EncoderSide, effort: Effort, batch_patches: int) -> list[Sample]:
    """Batches of pictures of one size, up to `batch_patches` patches, to rows in host memory."""
    deadline = Deadline(effort.stage_seconds)
    samples: list[Sample] = []
    for prepared in distinct_pictures(encoder, SIDES):
        alone = 0.0
        for count in BATCHES:
            # A batch that would take the time of many others says little that they do not say.
            if count > 1 and (count * prepared.cost > batch_patches or count * alone > effort.sample_seconds):
                continue
            samples.append(tower_sample(encoder, prepared, count, effort))
            alone = alone or samples[-1].seconds
            if deadline.over and len(samples) >= 8:
                return samples
    return samples


def tower_sample(encoder: EncoderSide, prepared: PreparedItem, count: int, effort: Effort) -> Sample:
    """A batch of `count` times the same picture."""
    to_host = HostCopier(encoder.device)
    items = (prepared,) * count

    def work() -> None:
        with torch.inference_mode():
            to_host(encoder.encode(items))

    return timed(work, tower_terms(count, count * prepared.cost), effort)


def tower_terms(items: int, patches: int) -> dict[str, float]:
    """The terms of `EncoderCosts.tower`."""
    pairs = patches * patches / items
    return {"tower_batch": 1, "tower_item": items, "tower_patch": patches, "tower_pair": pairs}


def distinct_pictures(encoder: EncoderSide, sides: Sequence[int]) -> list[PreparedItem]:
    """One prepared picture for every number of patches that the sides give; the processor may cap them."""
    found: dict[int, PreparedItem] = {}
    for side in sides:
        media = jpeg(Picture(side, side, side))
        item = encoder.preprocess(decode_image(media, max_pixels=_MAX_PIXELS), {})
        found.setdefault(item.cost, item)
    return list(found.values())
