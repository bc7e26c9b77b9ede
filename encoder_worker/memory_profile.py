"""The profiling pass of a tower at its start, on a GPU: the largest batch, run once, and what it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from PIL import Image

from triptych.config import EncoderConfig, format_size
from triptych.errors import ConfigError
from triptych.machine.device_memory import DeviceMemory
from triptych.models.base import EncoderSide, PreparedItem


def check_encoder_memory(config: EncoderConfig, encoder: EncoderSide, memory: DeviceMemory) -> int:
    """What the largest batch takes of the device above the weights; ConfigError where that does not fit."""
    batch = largest_batch(config, encoder)
    memory.reset_peak()
    held = memory.used()
    budget = config.device_memory or held + int(memory.free() * memory.share)
    with torch.inference_mode():
        encoder.encode(batch)
    activations = max(0, memory.peak() - held)
    # What the run has left in the allocator is given back.
    memory.reset_peak()
    if held + activations > budget:
        raise ConfigError(
            f"the tower has {format_size(budget)} of {encoder.device} and needs {format_size(held)} for its "
            f"weights and {format_size(activations)} for a batch of {len(batch)} items: lower "
            "--encoder-batch-patches or --max-image-pixels, or raise --device-memory"
        )
    return activations


def largest_batch(config: EncoderConfig, encoder: EncoderSide) -> Sequence[PreparedItem]:
    """A batch of the longest items that are taken, as many as --encoder-batch-patches lets in."""
    media = encoder.sample()
    if encoder.modality == "image":
        side = max(1, math.isqrt(config.max_image_pixels))
        media = Image.new("RGB", (side, side), "grey")
    item = encoder.preprocess(media, {})
    return [item] * max(1, config.batch_patches // max(1, item.cost))
