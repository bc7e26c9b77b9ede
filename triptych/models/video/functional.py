"""The functions of torchvision that transformers' video processors call, on torch alone.

Each gives the bits of `torchvision.transforms.v2.functional` on a CPU; `tests/integration/zoo` compares.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch.nn.functional import interpolate
from torch.nn.functional import pad as torch_pad


class InterpolationMode(enum.Enum):
    """The filters of a resize, by torch's names."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


#: The filters by Pillow's numbers.
_PILLOW = ("NEAREST", "LANCZOS", "BILINEAR", "BICUBIC", "BOX", "HAMMING")
_SMOOTH = (InterpolationMode.BILINEAR, InterpolationMode.BICUBIC, InterpolationMode.LANCZOS)


def resize(
    image: torch.Tensor,
    size: Sequence[int],
    interpolation: InterpolationMode | int = InterpolationMode.BILINEAR,
    antialias: bool = True,
) -> torch.Tensor:
    """[..., channels, *size] of [..., channels, height, width]."""
    height, width = size
    if (height, width) == tuple(image.shape[-2:]):
        return image
    if isinstance(interpolation, int):
        interpolation = InterpolationMode[_PILLOW[interpolation]]
    flat = image.reshape(-1, *image.shape[-3:])
    smooth = interpolation in _SMOOTH
    given = {"align_corners": False, "antialias": antialias} if smooth else {}
    resized = interpolate(flat, size=[height, width], mode=interpolation.value, **given)
    return resized.reshape(*image.shape[:-2], height, width)


def normalize(
    image: torch.Tensor, mean: Sequence[float], std: Sequence[float], inplace: bool = False
) -> torch.Tensor:
    """(image - mean) / std by channel."""
    by_channel = [torch.as_tensor(values, dtype=image.dtype, device=image.device) for values in (mean, std)]
    offset, scale = (values.view(-1, 1, 1) if values.ndim == 1 else values for values in by_channel)
    moved = image.sub_(offset) if inplace else image.sub(offset)
    return moved.div_(scale)


def pad(
    image: torch.Tensor, padding: Sequence[int], fill: float | None = 0, padding_mode: str = "constant"
) -> torch.Tensor:
    """With `padding` (left, top, right, bottom) of the value `fill`."""
    left, top, right, bottom = padding
    return torch_pad(image, [left, right, top, bottom], mode=padding_mode, value=fill or 0)


def crop(image: torch.Tensor, top: int, left: int, height: int, width: int) -> torch.Tensor:
    """The part of this size from (top, left) on."""
    return image[..., top : top + height, left : left + width]


def grayscale_to_rgb(image: torch.Tensor) -> torch.Tensor:
    """Three equal channels of one; other pictures as they are."""
    return image.expand(*image.shape[:-3], 3, *image.shape[-2:]) if image.shape[-3] == 1 else image
