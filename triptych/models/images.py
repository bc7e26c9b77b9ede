"""The checkpoint's own image processor, always on the PIL backend: no torchvision, one answer everywhere."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import PIL
import torch

from triptych.base.errors import ConfigError, InvalidRequest
from triptych.base.types import JsonObject, Options
from triptych.models.checkpoint.folder import read_config, read_json
from triptych.models.patches import PatchRecipe

if TYPE_CHECKING:
    from PIL import Image
    from transformers import BaseImageProcessor

BACKEND = "pil"
#: The PIL classes by the name that checkpoints give, taken from their modules: in transformers 5.16 even
#: `AutoImageProcessor(backend="pil")` needs torchvision.
_CLASSES = {
    "Qwen2VLImageProcessor": "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
    "CLIPImageProcessor": "transformers.models.clip.image_processing_pil_clip",
    "ViTImageProcessor": "transformers.models.vit.image_processing_pil_vit",
    "LlavaImageProcessor": "transformers.models.llava.image_processing_pil_llava",
}
_DEFAULTS = {"llava": "CLIPImageProcessor"}


class ImageProcessor:
    """An image processor. `config` is all that decides its output, for the namespace."""

    def __init__(self, path: Path) -> None:
        self._processor = _load(path)

    @property
    def config(self) -> JsonObject:
        """The processor's settings, with the backend and its version."""
        settings = dict(self._processor.to_dict())
        for name in ("_name_or_path", "processor_class"):
            settings.pop(name, None)
        return {"settings": settings, "backend": BACKEND, "version": PIL.__version__}

    def patch_recipe(self) -> PatchRecipe | None:
        """The fast path of a Qwen processor, proven on a few pictures; None where there is none."""
        return PatchRecipe.of(self._processor)

    def get(self, name: str) -> Any:
        """One of the processor's settings, None where it has no such one."""
        return getattr(self._processor, name, None)

    def __call__(self, image: Image.Image, options: Options) -> dict[str, torch.Tensor]:
        """The model inputs of one RGB image; InvalidRequest for an image that cannot be processed."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                return dict(self._processor(images=[image], return_tensors="pt", **options))
        except (ValueError, TypeError, ZeroDivisionError, OverflowError) as error:
            raise InvalidRequest(f"the image cannot be processed: {error}", param="image") from error


def _load(path: Path) -> BaseImageProcessor:
    settings = read_json(path / "preprocessor_config.json")
    if settings is None:
        settings = (read_json(path / "processor_config.json") or {}).get("image_processor")
    if not settings:
        raise ConfigError(
            f"MODEL={path} has no image processor: give MODEL=/folder with preprocessor_config.json"
        )
    default = _DEFAULTS.get(read_config(path).get("model_type", ""), "Qwen2VLImageProcessor")
    named = settings.get("image_processor_type") or default
    name = named.removesuffix("Fast").removesuffix("Pil")
    if name not in _CLASSES:
        raise ConfigError(f"MODEL={path} wants image processor {named}: only {', '.join(_CLASSES)} are known")
    processor = getattr(importlib.import_module(_CLASSES[name]), f"{name}Pil")
    try:
        return processor.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"MODEL={path}: its image processor cannot be loaded: {error}") from error


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
