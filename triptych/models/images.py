"""The checkpoint's own image processor, always on the PIL backend, with compiled steps on 8-bit levels."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import PIL
import torch
import transformers
from PIL import Image, features
from transformers import AutoImageProcessor
from transformers.image_processing_backends import PilBackend
from transformers.image_transforms import get_resize_output_image_size
from transformers.image_utils import ChannelDimension

from triptych.base.errors import ConfigError, InvalidRequest, reason_of
from triptych.base.machine.device import host_empty
from triptych.base.types import JsonObject, Options
from triptych.kernels.functions import CHANNELS, FILTERS, PictureKernel
from triptych.models.checkpoint.folder import no_image_processor, read_json

if TYPE_CHECKING:
    from PIL import Image


_CHANNELS = 3
#: The processor whose order of patches and filter these are, and the steps that the table stands for.
_PROCESSOR = "Qwen2VLImageProcessorPil"
_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
#: Width and height of the pictures that prove a fast path: square, wide, tall, one pixel wide, and one whose
#: height shrinks more than twice as much as its width.
_PROOF_SIZES = ((97, 61), (640, 33), (256, 256), (1, 150), (420, 1400))


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
        tiled = (rows // merge, merge, side, columns // merge, merge, side, _CHANNELS)
        patches = np.asarray(image).reshape(tiled).transpose(0, 3, 1, 4, 6, 2, 5)
        levels = np.ascontiguousarray(patches).reshape(rows * columns, -1)
        return torch.from_numpy(levels), (1, rows, columns)

    def values(self, levels: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """The tower's input [patches, channels * frames * patch²] on `device`, of levels on the host."""
        count, table = len(levels), self._table.to(device, dtype)
        if self._kernel is not None and device.type == "cpu" and dtype.itemsize in (2, 4):
            bits = torch.int16 if dtype.itemsize == 2 else torch.int32
            channels = levels.view(count, _CHANNELS, -1).numpy()
            filled = self._kernel.look_up(channels, table.view(bits).numpy(), self._frames)
            return torch.from_numpy(filled).view(dtype).view(count, -1)
        by_channel = levels.to(device, non_blocking=True).view(count, _CHANNELS, -1)
        shape = (count, _CHANNELS, self._frames, by_channel.shape[-1])
        on_host = device.type == "cpu"
        values = host_empty(shape, dtype) if on_host else torch.empty(shape, dtype=dtype, device=device)
        for channel in range(_CHANNELS):
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
    levels = np.repeat(np.arange(256, dtype=np.uint8)[None, None], _CHANNELS, axis=0)
    scaled = processor.rescale(levels, processor.rescale_factor)
    return np.ascontiguousarray(processor.normalize(scaled, processor.image_mean, processor.image_std)[:, 0])


def proof_pictures() -> Iterator[Image.Image]:
    """Pictures of noise, on which a fast path must give the processor's bits."""
    noise = np.random.default_rng(0)
    for width, height in _PROOF_SIZES:
        yield Image.fromarray(noise.integers(0, 256, (height, width, _CHANNELS), dtype=np.uint8))


logger = logging.getLogger(__name__)


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


BACKEND = "pil"


def processor_identity(settings: JsonObject) -> JsonObject:
    """All that decides a picture's pixel values, for the namespace: settings, and what decodes and resizes.

    Not the compiled kernel and simplejpeg, which are used only where they give the same bits.
    """
    jpeg = features.version("libjpeg_turbo") or features.version("jpg")
    versions = {"pillow": PIL.__version__, "jpeg": jpeg, "webp": features.version("webp")}
    return {
        "settings": settings,
        "backend": BACKEND,
        "versions": {**versions, "transformers": transformers.__version__},
    }


class ImageProcessor:
    """An image processor. `config` is all that decides its output, for the namespace."""

    def __init__(self, path: Path) -> None:
        self._processor = load_image_processor(path)

    @property
    def config(self) -> JsonObject:
        """The processor's settings, with the backend and the versions of what it uses."""
        settings = dict(self._processor.to_dict())
        for name in ("_name_or_path", "processor_class"):
            settings.pop(name, None)
        return processor_identity(settings)

    def patch_recipe(self) -> PatchRecipe | None:
        """The fast path of a Qwen processor, proven on a few pictures; None where there is none."""
        return PatchRecipe.of(self._processor)

    def get(self, name: str) -> Any:
        """One of the processor's settings, None where it has no such one."""
        return getattr(self._processor, name, None)

    @cached_property
    def _fast(self) -> Any:
        return on_levels(self._processor)

    def __call__(self, image: Image.Image, options: Options) -> dict[str, torch.Tensor]:
        """The model inputs of one RGB image; InvalidRequest for an image that cannot be processed."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                return dict(self._fast(images=[image], return_tensors="pt", **options))
        except (ValueError, TypeError, ZeroDivisionError, OverflowError) as error:
            raise InvalidRequest(f"the image cannot be processed: {error}", param="image") from error


def load_image_processor(path: Path) -> Any:
    """The checkpoint's image processor on PIL; ConfigError where there is none."""
    whole = read_json(path / "processor_config.json") or {}
    if read_json(path / "preprocessor_config.json") is None and "image_processor" not in whole:
        raise no_image_processor(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return AutoImageProcessor.from_pretrained(
                path, backend=BACKEND, local_files_only=True, trust_remote_code=False
            )
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = reason_of(error)
        raise ConfigError(
            f"MODEL={path}: its image processor cannot be loaded ({reason}): it may need torchvision"
        ) from error


#: Pixels of an image between resize and crop.
_MAX_RESIZED = 1 << 26


def check_resized(image: Image.Image, options: Options, default: Any) -> None:
    """InvalidRequest for a picture that a processor would make too large before it crops it.

    A processor whose `size`, by the options or `default`, is the shorter edge gives the longer one as many
    times as much as the picture has: a line of pixels would fill the memory.
    """
    size = options.get("size", default)
    sides = {"shortest_edge": size} if isinstance(size, int) else dict(size or {})
    if sides.get("longest_edge"):
        return  # a limit
    if edge := sides.get("shortest_edge"):
        pixels = edge * edge * max(image.size) / min(image.size)
    else:
        pixels = (sides.get("height") or 1) * (sides.get("width") or 1)
    if pixels > _MAX_RESIZED:
        raise InvalidRequest(
            f"image: {image.width}x{image.height} would be resized to {pixels:.0f} pixels, more than "
            f"{_MAX_RESIZED}: send an image with a smaller aspect ratio, or a smaller size",
            param="mm_processor_kwargs.size" if "size" in options else "image",
        )


def check_known(options: Options, known: Mapping[str, Callable[[object], bool]]) -> None:
    """InvalidRequest, naming the option, for one that is unknown or of a wrong kind."""
    for name, value in options.items():
        if name not in known:
            names = ", ".join(sorted(known)) or "none"
            raise InvalidRequest(
                f"unknown mm_processor_kwargs option {name!r}: this model knows {names}",
                param=f"mm_processor_kwargs.{name}",
            )
        if not known[name](value):
            raise InvalidRequest(
                f"mm_processor_kwargs option {name!r} has an invalid value",
                param=f"mm_processor_kwargs.{name}",
            )


def is_count(value: object) -> bool:
    """A whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_rows(planned: int, rows: int) -> None:
    """InvalidRequest where the tower makes another number of rows of an item than its placeholder has."""
    if rows != planned:
        raise InvalidRequest(
            f"its processor writes {planned} placeholders for an item of which its tower makes {rows} "
            "rows: correct preprocessor_config.json and processor_config.json, or fetch the checkpoint again"
        )
