"""Loading of a worker's tower: weights, warm-up, graphs, and on a GPU the memory of its largest batch."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image

from triptych.base.config import EncoderConfig, format_size
from triptych.base.errors import ConfigError, InvalidRequest
from triptych.base.hashing import stored_as
from triptych.base.machine.device import DeviceMemory, memory_of
from triptych.base.progress import Progress
from triptych.base.types import INT8
from triptych.encoder_worker.graphs.graph_encoder import uncounted_bytes, with_graphs
from triptych.models.base import EncoderSide, PreparedItem
from triptych.models.checkpoint.support import check_supported, required_by_flags
from triptych.models.geometry import row_parts
from triptych.models.identity import ModelIdentity, model_identity
from triptych.models.images import check_rows
from triptych.models.registry import family_of, load_encoder, resolve_device, resolve_dtype

logger = logging.getLogger(__name__)


def load(config: EncoderConfig) -> tuple[EncoderSide, ModelIdentity]:
    """The tower, warm and with its graphs, and its model's identity.

    ConfigError for a checkpoint that cannot be served.
    """
    encoder = load_tower(config)
    model = model_identity(
        Path(config.model),
        dtype=encoder.dtype,
        revision=config.model_revision,
        quantization=config.quantization,
    )
    if config.ec_store_rows == INT8:
        # With another key, too: by that of the checkpoint, PD workers of earlier releases would take them.
        key, namespace = (stored_as(name, INT8) for name in (model.model_key, model.namespace))
        model = replace(model, model_key=key, namespace=namespace)
    return encoder, model


def scales_of(path: Path, width: int) -> int:
    """Scales of a row of this checkpoint in int8; ConfigError where they do not divide it."""
    decoder = family_of(path).decoder
    config = decoder.read_config(path)
    parts = row_parts(decoder.geometry_of(config), decoder.cross_of(config))
    if width % parts:
        raise ConfigError(
            f"--ec-store-rows int8: the rows of MODEL={path} are {width} wide, in no {parts} equal parts: "
            "leave it at dtype"
        )
    return parts


def load_tower(config: EncoderConfig) -> EncoderSide:
    """One rank's tower, warm and with its graphs, on the rank's device.

    ConfigError for a checkpoint that cannot be served.
    """
    start = time.monotonic()
    path = Path(config.model)
    check_supported(path, required_by_flags(config))
    device = resolve_device(config.device)
    dtype = resolve_dtype(path, device, config.dtype)
    encoder = load_encoder(path, device=device, dtype=dtype, quantization=config.quantization)
    with Progress("warming up"):
        try:
            warm_up(encoder)
        except InvalidRequest as error:
            raise ConfigError(f"MODEL={path} cannot take its own sample: {error.message}") from error
    size = format_size(parameter_bytes(encoder))
    logger.info("loaded %s of encoder weights in %.1f s", size, time.monotonic() - start)
    return with_graphs(config, encoder)


def activation_bytes(config: EncoderConfig, encoder: EncoderSide) -> int:
    """Bytes that the largest batch takes on a GPU, measured by running it; ConfigError if it does not fit.

    0 on a CPU, where the run would take too long.
    """
    if encoder.device.type == "cpu":
        return 0
    nbytes = check_encoder_memory(config, encoder, memory_of(encoder.device))
    logger.info("the largest batch of the tower takes %s of %s", format_size(nbytes), encoder.device)
    return nbytes


def check_encoder_memory(config: EncoderConfig, encoder: EncoderSide, memory: DeviceMemory) -> int:
    """Bytes of the largest batch above the weights, measured; ConfigError if they do not fit."""
    batch = largest_batch(config, encoder)
    memory.reset_peak()
    held = memory.used() + uncounted_bytes(encoder)
    budget = config.device_memory or held + int(memory.free() * memory.share)
    with Progress("measuring memory"), torch.inference_mode():
        encoder.encode(batch)
    activations = max(0, memory.peak() + uncounted_bytes(encoder) - held)
    # Returns what the run has left in torch's allocator.
    memory.reset_peak()
    if held + activations > budget:
        raise ConfigError(
            f"the tower has {format_size(budget)} of {encoder.device} and needs {format_size(held)} for its "
            f"weights and {format_size(activations)} for a batch of {len(batch)} items: lower "
            "--encoder-batch-patches or --max-image-pixels, or raise --device-memory"
        )
    return activations


def largest_batch(config: EncoderConfig, encoder: EncoderSide) -> Sequence[PreparedItem]:
    """A batch of the largest accepted items, as many as --encoder-batch-patches allows."""
    media = encoder.sample()
    if encoder.modality == "image":
        side = max(1, math.isqrt(config.max_image_pixels))
        media = Image.new("RGB", (side, side), "grey")
    item = encoder.preprocess(media, {})
    return [item] * max(1, config.batch_patches // max(1, item.cost))


def warm_up(encoder: EncoderSide) -> None:
    """One small forward, so that the first request does not pay for lazy initialisation.

    InvalidRequest where the tower makes another number of rows than the sample's placeholder has.
    """
    item = encoder.preprocess(encoder.sample(), {})
    with torch.inference_mode():
        rows = encoder.encode([item])
    check_rows(item.rows, len(rows[0]))


def parameter_bytes(encoder: EncoderSide) -> int:
    """Bytes of the tower's parameters."""
    return sum(p.numel() * p.element_size() for p in encoder.module.parameters())
