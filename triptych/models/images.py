"""The checkpoint's own image processor, always on the PIL backend; checks of options and rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import PIL
import torch
import transformers
from PIL import Image, features
from transformers import AutoImageProcessor

from triptych.base.errors import ConfigError, InvalidRequest, reason_of
from triptych.base.types import JsonObject, Options
from triptych.models.checkpoint.folder import no_image_processor, read_json
from triptych.models.level_steps import on_levels
from triptych.models.patch_recipe import PatchRecipe

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
