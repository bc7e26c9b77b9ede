"""Steps of image processors on 8-bit levels, compiled, where they give the processor's bits."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from transformers.image_processing_backends import PilBackend
from transformers.image_transforms import get_resize_output_image_size
from transformers.image_utils import ChannelDimension

from triptych.kernels.functions import CHANNELS, FILTERS, PictureKernel

logger = logging.getLogger(__name__)

#: Width and height of the pictures that prove a fast path: square, wide, tall, one pixel wide, and one whose
#: height shrinks more than twice as much as its width.
_PROOF_SIZES = ((97, 61), (640, 33), (256, 256), (1, 150), (420, 1400))


def proof_pictures() -> Iterator[Image.Image]:
    """Pictures of noise, on which a fast path must give the processor's bits."""
    noise = np.random.default_rng(0)
    for width, height in _PROOF_SIZES:
        yield Image.fromarray(noise.integers(0, 256, (height, width, CHANNELS), dtype=np.uint8))


class Rescaled(np.ndarray):
    """Rescaled levels that know which they were, so that normalising needs a table only. A view does not."""

    levels: np.ndarray | None = None
    scale: float = 0.0


class LevelSteps(PilBackend):  # type: ignore[misc]
    """The backend of a processor, in its class's bases before PilBackend."""

    kernel: ClassVar[PictureKernel | None] = None

    def process_image(self, image: Any, *args: Any, **kwargs: Any) -> np.ndarray:
        """[channels, height, width], a view of the picture's pixels."""
        if isinstance(image, Image.Image) and image.mode == "RGB":
            return np.moveaxis(np.asarray(image), -1, 0)
        return super().process_image(image, *args, **kwargs)  # type: ignore[no-any-return]

    def resize(
        self,
        image: np.ndarray,
        size: Any,
        resample: Any = None,
        reducing_gap: int | None = None,
        **kwargs: Any,
    ) -> np.ndarray:
        edges = (size.shortest_edge, size.longest_edge, size.max_height, size.max_width)
        kernel, levels = self.kernel, _is_rgb_levels(image) and resample in FILTERS and reducing_gap is None
        if kernel is not None and levels and not any(edges[1:]):
            height, width = size.height, size.width
            if edges[0]:
                height, width = get_resize_output_image_size(
                    image,
                    size=edges[0],
                    default_to_square=False,
                    input_data_format=ChannelDimension.FIRST,
                )
            if height and width:
                pixels, to = np.moveaxis(image, 0, -1), (int(width), int(height))
                resized: np.ndarray = kernel.levels(pixels, to, int(resample), to)[0]
                return resized
        return super().resize(image, size, resample, reducing_gap, **kwargs)  # type: ignore[no-any-return]

    def rescale(self, image: np.ndarray, scale: float, **kwargs: Any) -> np.ndarray:
        if not _is_rgb_levels(image):
            return super().rescale(image, scale, **kwargs)  # type: ignore[no-any-return]
        image = np.ascontiguousarray(image)
        values = self._looked_up(image, super().rescale(_LEVELS, scale, **kwargs)).view(Rescaled)
        values.levels, values.scale = image, scale
        return values

    def normalize(
        self, image: np.ndarray, mean: float | Iterable[float], std: float | Iterable[float], **kwargs: Any
    ) -> np.ndarray:
        levels = image.levels if isinstance(image, Rescaled) else None
        if levels is None:
            return super().normalize(image, mean, std, **kwargs)  # type: ignore[no-any-return]
        scaled = super().rescale(_LEVELS, image.scale)  # type: ignore[attr-defined]
        return self._looked_up(levels, super().normalize(scaled, mean, std, **kwargs))

    def _looked_up(self, levels: np.ndarray, table: np.ndarray) -> np.ndarray:
        """The values of contiguous levels [channels, height, width] by `table` [channels, 1, 256]."""
        table = np.ascontiguousarray(table[:, 0])
        if self.kernel is not None and table.itemsize in (2, 4):
            values = self.kernel.look_up(levels.reshape(1, len(levels), -1), table)
            return values.reshape(levels.shape)
        return np.stack([np.take(row, plane) for row, plane in zip(table, levels, strict=True)])


#: Every level of every channel, as a picture.
_LEVELS = np.repeat(np.arange(256, dtype=np.uint8)[None, None], CHANNELS, axis=0)


def _is_rgb_levels(image: np.ndarray) -> bool:
    return image.dtype == np.uint8 and image.ndim == 3 and len(image) == CHANNELS


def on_levels(processor: Any) -> Any:
    """`processor` with these steps where they give its bits; else `processor` itself."""
    cls = type(processor)
    if not isinstance(processor, PilBackend):
        return processor
    kernel = PictureKernel.load()
    for chosen in (kernel, None) if kernel else (None,):
        fast = copy.copy(processor)
        fast.__class__ = type(
            cls.__name__, (cls, LevelSteps), {"__module__": cls.__module__, "kernel": chosen}
        )
        different = next((image for image in proof_pictures() if not _alike(processor, fast, image)), None)
        if different is None:
            return fast
        logger.warning(
            "pictures are prepared %s: the faster way differs from transformers' %s on one of %dx%d pixels",
            "without the compiled kernel" if chosen else "by transformers' own steps",
            cls.__name__,
            *different.size,
        )
    return processor


def _alike(processor: Any, fast: Any, image: Image.Image) -> bool:
    """Whether both make the same of a picture, or both refuse it."""
    expected, actual = _prepared(processor, image), _prepared(fast, image)
    if expected is None or actual is None:
        return expected is actual
    return expected.keys() == actual.keys() and all(_equal(expected[name], actual[name]) for name in expected)


def _prepared(processor: Any, image: Image.Image) -> dict[str, Any] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return dict(processor(images=[image], return_tensors="pt"))
        except (ValueError, TypeError, ZeroDivisionError, OverflowError):
            return None


def _equal(expected: Any, actual: Any) -> bool:
    if torch.is_tensor(expected):
        return torch.is_tensor(actual) and expected.dtype == actual.dtype and torch.equal(expected, actual)
    return bool(expected == actual)
