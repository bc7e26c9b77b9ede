"""What a side of a checkpoint takes in memory once its quantized weights are floats."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from triptych.base.config import format_size
from triptych.base.errors import ConfigError
from triptych.base.machine.device import memory_of
from triptych.models.checkpoint.scaled_weights import described
from triptych.models.checkpoint.tensors import Checkpoint

logger = logging.getLogger(__name__)


def check_room(
    path: Path,
    names_of: Callable[[Iterable[str]], Mapping[str, str]],
    *,
    device: torch.device,
    dtype: torch.dtype,
    in_8_bits: bool = False,
    ranks: int = 1,
) -> None:
    """Logs what is dequantized of the side whose keys `names_of` picks; ConfigError where that does not fit.

    Nothing happens for a side without quantized weights. With `in_8_bits` they are rounded again at once.
    """
    checkpoint = Checkpoint(path)
    mine = names_of(checkpoint.files)
    scaled = [checkpoint.scaled[key] for key in mine if key in checkpoint.scaled]
    if not scaled:
        return
    elements = sum(weight.stored.elements for weight in scaled)
    item = 1 if in_8_bits else dtype.itemsize
    floats = checkpoint.nbytes(mine, dtype=dtype) - elements * (dtype.itemsize - item)
    needed, free = floats // ranks, memory_of(device).free()
    name = str(dtype).removeprefix("torch.")
    logger.info(
        "quantized weights are dequantized to %s: %s; %s in the files, %s in memory",
        name,
        described(scaled),
        format_size(elements),
        format_size(elements * item // ranks),
    )
    if needed > free:
        raise ConfigError(
            f"MODEL={path}: its weights take {format_size(needed)} as {name}, and {format_size(free)} of "
            f"{device} are free: give --dtype bfloat16 where it is float32, more memory, or a smaller model"
        )
