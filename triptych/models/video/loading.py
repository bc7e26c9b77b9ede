"""Loading of a checkpoint's video processor, whose classes transformers imports with torchvision only."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import transformers
import transformers.utils as transformers_utils
from PIL import Image
from transformers.utils import is_torchvision_available

from triptych.base.errors import ConfigError, reason_of
from triptych.base.types import JsonObject
from triptych.models.checkpoint.folder import read_config, read_json
from triptych.models.video import functional

#: The settings of videos where they have a file of their own.
SETTINGS_FILE = "video_preprocessor_config.json"
#: Model types that have their class from another one, for checkpoints that do not name it.
_BORROWED = {
    **dict.fromkeys(("qwen2_5_vl", "qwen2_5_omni", "exaone4_5"), "Qwen2VLVideoProcessor"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_vl_moe"), "Qwen3VLVideoProcessor"),
    "minicpmv4_7": "MiniCPMV4_6VideoProcessor",
}
#: Modules of transformers that take functions from torchvision where that is installed.
_SHARED = ("transformers.image_processing_backends", "transformers.video_processing_utils")
_PACKAGES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
_LOCK = threading.Lock()


def load_video_processor(path: Path) -> Any:
    """The checkpoint's video processor, None where it has none; ConfigError for one that fails to load."""
    name = _class_name(path)
    if name is None:
        return None
    try:
        cls = getattr(_module_of(name), name)
        return cls.from_pretrained(path, local_files_only=True)
    except Exception as error:  # of any kind: code of the class
        reason = reason_of(error)
        raise ConfigError(f"MODEL={path}: its video processor {name} cannot be loaded: {reason}") from error


def video_settings(path: Path) -> JsonObject:
    """The settings of videos that have a file of their own, for the namespace; empty where there is none."""
    return read_json(path / SETTINGS_FILE) or {}


def _class_name(path: Path) -> str | None:
    in_processor = (read_json(path / "processor_config.json") or {}).get("video_processor") or {}
    named = {**in_processor, **video_settings(path)}.get("video_processor_type")
    model_type = str(read_config(path).get("model_type", ""))
    module = f"models.{model_type}.video_processing_{model_type}"
    own = [name for name, where in transformers._class_to_module.items() if where == module]
    processors = [name for name in own if name.endswith("VideoProcessor")]
    names = (named, _BORROWED.get(model_type), *processors)
    return next((name for name in names if name in transformers._class_to_module), None)


def _module_of(name: str) -> Any:
    """The module of the class, which calls torchvision, or what stands for it."""
    module = f"transformers.{transformers._class_to_module[name]}"
    if is_torchvision_available():
        return importlib.import_module(module)
    with _LOCK, _stand_ins():
        loaded: Any = importlib.import_module(module)
    for each in (loaded, *map(importlib.import_module, _SHARED)):
        each.tvF = functional
    backends: Any = sys.modules[_SHARED[0]]
    modes = {
        Image.Resampling.NEAREST: functional.InterpolationMode.NEAREST_EXACT,
        **{getattr(Image.Resampling, each): getattr(functional.InterpolationMode, each) for each in _FILTERS},
    }
    backends.pil_torch_interpolation_mapping = modes
    backends.torch_pil_interpolation_mapping = {mode: filter_ for filter_, mode in modes.items()}
    backends.is_torchvision_greater_or_equal = lambda *_, **__: True
    return loaded


_FILTERS = ("BOX", "BILINEAR", "HAMMING", "BICUBIC", "LANCZOS")


@contextmanager
def _stand_ins() -> Iterator[None]:
    """While a module is imported, `torchvision.transforms.v2.functional` is `functional`: some name it where
    they are defined."""
    packages = {name: ModuleType(name) for name in _PACKAGES}
    for name, package in packages.items():
        package.__path__ = []
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(packages[parent], leaf, package)
    last = packages[_PACKAGES[-1]]
    last.functional = functional  # type: ignore[attr-defined]
    last.InterpolationMode = functional.InterpolationMode  # type: ignore[attr-defined]
    asked, transformers_utils.is_torchvision_v2_available = (
        transformers_utils.is_torchvision_v2_available,
        lambda: True,
    )
    sys.modules.update(packages)
    sys.modules[f"{_PACKAGES[-1]}.functional"] = functional
    try:
        yield
    finally:
        transformers_utils.is_torchvision_v2_available = asked
        for name in (*_PACKAGES, f"{_PACKAGES[-1]}.functional"):
            sys.modules.pop(name, None)
