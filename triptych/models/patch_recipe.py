"""A recipe of patches: pictures as a tower of patches takes them, in the levels of their pixels."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from PIL import Image

from triptych.base.errors import InvalidRequest
from triptych.base.machine.device import host_empty
from triptych.kernels.functions import CHANNELS, FILTERS, PictureKernel
from triptych.models.level_steps import proof_pictures

logger = logging.getLogger(__name__)

#: The processor whose order of patches and filter these are, and the steps that the table stands for.
_PROCESSOR = "Qwen2VLImageProcessorPil"
_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")


class PatchRecipe:
    """Resize, patch order and table of one checkpoint's image processor, for a tower that takes patches.

    transformers' processor normalises whole pictures in floating point, on values that have only 256 levels.
    Patches of levels are an eighth of its output, and the table, made by its own arithmetic, gives
    the same bits. Times: `benchmarks/results/earlier.md`.
    """

    def __init__(self, processor: Any, kernel: PictureKernel | None = None) -> None:
        self._processor = processor
        self._kernel = kernel
        self._patch = int(processor.patch_size)
        self._merge = int(processor.merge_size)
        self._frames = int(processor.temporal_patch_size)
        self._table = torch.from_numpy(_table(processor))

    @classmethod
    def of(cls, processor: Any) -> Self | None:
        """The recipe of `processor`; None where its steps are others or a bit of a picture differs."""
        settings = processor.to_dict()
        bounded = all(map((settings.get("size") or {}).get, ("shortest_edge", "longest_edge")))
        if type(processor).__name__ != _PROCESSOR or not bounded or not all(map(settings.get, _STEPS)):
            return None
        kernel = PictureKernel.load() if processor.resample in FILTERS else None
        recipes = [cls(processor, chosen) for chosen in ((kernel, None) if kernel else (None,))]
        for recipe in recipes:
            different = next((picture for picture in proof_pictures() if not recipe.proves(picture)), None)
            if different is None:
                return recipe
            logger.warning(
                "pictures are prepared %s: the faster way differs from transformers' processor on one of "
                "%dx%d pixels",
                "without the compiled kernel" if recipe.compiled else "by transformers' processor",
                *different.size,
            )
        return None

    @property
    def compiled(self) -> bool:
        """Whether the compiled kernel resizes and orders."""
        return self._kernel is not None

    def proves(self, picture: Image.Image) -> bool:
        """Whether grid and pixel values of `picture` equal the processor's to the bit."""
        expected = self._processor(images=[picture], return_tensors="pt")
        levels, grid = self.levels(picture)
        values = self.values(levels, torch.device("cpu"), torch.float32)
        return [*grid] == expected["image_grid_thw"][0].tolist() and torch.equal(
            values, expected["pixel_values"]
        )

    def levels(
        self, image: Image.Image, limits: Mapping[str, int] | None = None
    ) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """uint8 [patches, channels * patch²] of one RGB picture, in the tower's order, and its grid.

        `limits` are those of the processor's `size`, its own if None. InvalidRequest for a shape that it
        refuses.
        """
        side, merge = self._patch, self._merge
        width, height = self._resized(image.size, limits or self._processor.size)
        rows, columns = height // side, width // side
        if self._kernel is not None:
            filter_ = int(self._processor.resample)
            patches = self._kernel.levels(np.asarray(image), (width, height), filter_, (side, side), merge)
            return torch.from_numpy(patches.reshape(rows * columns, -1)), (1, rows, columns)
        if image.size != (width, height):
            image = image.resize((width, height), self._processor.resample)
        tiled = (rows // merge, merge, side, columns // merge, merge, side, CHANNELS)
        patches = np.asarray(image).reshape(tiled).transpose(0, 3, 1, 4, 6, 2, 5)
        levels = np.ascontiguousarray(patches).reshape(rows * columns, -1)
        return torch.from_numpy(levels), (1, rows, columns)

    def values(self, levels: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """The tower's input [patches, channels * frames * patch²] on `device`, of levels on the host."""
        count, table = len(levels), self._table.to(device, dtype)
        if self._kernel is not None and device.type == "cpu" and dtype.itemsize in (2, 4):
            bits = torch.int16 if dtype.itemsize == 2 else torch.int32
            channels = levels.view(count, CHANNELS, -1).numpy()
            filled = self._kernel.look_up(channels, table.view(bits).numpy(), self._frames)
            return torch.from_numpy(filled).view(dtype).view(count, -1)
        by_channel = levels.to(device, non_blocking=True).view(count, CHANNELS, -1)
        shape = (count, CHANNELS, self._frames, by_channel.shape[-1])
        on_host = device.type == "cpu"
        values = host_empty(shape, dtype) if on_host else torch.empty(shape, dtype=dtype, device=device)
        for channel in range(CHANNELS):
            taken = table[channel].index_select(0, by_channel[:, channel].reshape(-1).int())
            values[:, channel] = taken.view(count, 1, -1)
        return values.view(count, -1)

    def _resized(self, size: tuple[int, int], limits: Mapping[str, int]) -> tuple[int, int]:
        """Width and height that the processor resizes a picture to."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        width, height = size
        bounds = limits["shortest_edge"], limits["longest_edge"]
        try:
            rows, columns = smart_resize(height, width, self._patch * self._merge, *bounds)
        except ValueError as error:
            raise InvalidRequest(f"the image cannot be processed: {error}", param="image") from error
        return int(columns), int(rows)


def _table(processor: Any) -> np.ndarray:
    """float32 [channels, 256]: what the processor makes of every level of each channel."""
    levels = np.repeat(np.arange(256, dtype=np.uint8)[None, None], CHANNELS, axis=0)
    scaled = processor.rescale(levels, processor.rescale_factor)
    return np.ascontiguousarray(processor.normalize(scaled, processor.image_mean, processor.image_std)[:, 0])
