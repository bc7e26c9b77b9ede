"""The checkpoint's own image processor, always on the PIL backend: no torchvision, one answer everywhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import PIL
import torch
import transformers
from PIL import features
from transformers import AutoImageProcessor

from triptych.base.errors import ConfigError, InvalidRequest
from triptych.base.types import JsonObject, Options
from triptych.models.checkpoint.folder import read_json
from triptych.models.level_steps import on_levels
from triptych.models.patches import PatchRecipe

if TYPE_CHECKING:
    from PIL import Image

BACKEND = "pil"
#: Files with a processor's settings; one of them has those of the images.
SETTINGS_FILES = ("processor_config.json", "preprocessor_config.json")


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
        raise ConfigError(
            f"MODEL={path} has no image processor: give MODEL=/folder with preprocessor_config.json"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return AutoImageProcessor.from_pretrained(
                path, backend=BACKEND, local_files_only=True, trust_remote_code=False
            )
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = " ".join(f"{type(error).__name__} {error}".split())[:200]
        raise ConfigError(
            f"MODEL={path}: its image processor cannot be loaded ({reason}): it may need torchvision"
        ) from error


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
