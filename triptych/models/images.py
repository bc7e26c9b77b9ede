"""The checkpoint's own image processor, always on the PIL backend: no torchvision, one answer everywhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import PIL
import torch
from transformers import AutoImageProcessor

from triptych.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from PIL import Image

BACKEND = "pil"


class ImageProcessor:
    """Images to tensors. `config` is all that decides the pixels, for the namespace."""

    def __init__(self, path: Path) -> None:
        try:
            self._processor = AutoImageProcessor.from_pretrained(path, backend=BACKEND, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"MODEL={path}: its image processor cannot be loaded ({error}): "
                "give MODEL=/folder with preprocessor_config.json"
            ) from error

    @property
    def config(self) -> dict[str, Any]:
        """The processor's settings, with the backend and its version."""
        settings = dict(self._processor.to_dict())
        for name in ("_name_or_path", "processor_class"):
            settings.pop(name, None)
        return {"settings": settings, "backend": BACKEND, "version": PIL.__version__}

    def get(self, name: str) -> Any:
        """One of the processor's settings, None where it has no such one."""
        return getattr(self._processor, name, None)

    def __call__(self, image: Image.Image, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The model inputs of one RGB image; InvalidRequest for an image that cannot be processed."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                return dict(self._processor(images=[image], return_tensors="pt", **options))
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise InvalidRequest(f"the image cannot be processed: {error}", param="image") from error


def check_known(options: Mapping[str, Any], known: Mapping[str, Callable[[Any], bool]]) -> None:
    """InvalidRequest, naming the option, for one that is unknown or of a wrong kind."""
    for name, value in options.items():
        if name not in known:
            raise InvalidRequest(
                f"unknown mm_processor_kwargs option {name!r}: this model knows {', '.join(sorted(known))}",
                param=f"mm_processor_kwargs.{name}",
            )
        if not known[name](value):
            raise InvalidRequest(
                f"mm_processor_kwargs option {name!r} has an invalid value",
                param=f"mm_processor_kwargs.{name}",
            )


def is_count(value: Any) -> bool:
    """A whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
