"""The libraries that a folder's processors need, by transformers' sources, read and not imported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from triptych.base.errors import ConfigError
from triptych.models.checkpoint.architectures import model_sources
from triptych.models.checkpoint.folder import SETTINGS_FILES, read_json

_TORCHVISION = "torchvision"


def check_processor_libraries(path: Path) -> None:
    """ConfigError where a processor that the folder names runs on torchvision alone, and that is lacking."""
    sources = model_sources()
    if sources is None or find_spec(_TORCHVISION) is not None:
        return
    for what, name in _named(path):
        if _needs_torchvision(sources, name):
            raise lacking_library(path, what, name, _TORCHVISION)


def lacking_library(path: Path, what: str, name: str, library: str) -> ConfigError:
    """Names the processor and what to install."""
    return ConfigError(
        f"MODEL={path}: its {what} {name} needs {library}, which is not installed: install it beside the "
        "encoder workers"
    )


def _named(path: Path) -> Iterator[tuple[str, str]]:
    """("processor" or "image processor", class) of the folder's settings."""
    for file in SETTINGS_FILES:
        settings = read_json(path / file) or {}
        pictures = settings.get("image_processor")
        inner = pictures if isinstance(pictures, dict) else {}
        for what, name in (
            ("processor", settings.get("processor_class")),
            ("image processor", settings.get("image_processor_type") or inner.get("image_processor_type")),
        ):
            if isinstance(name, str) and name.isidentifier():
                yield what, name


def _needs_torchvision(sources: Path, name: str) -> bool:
    """Whether a class is marked so, or is of torchvision's backend and has no twin on PIL."""
    base = name.removesuffix("Fast")
    twin = re.compile(rf"^class {base}Pil\b", re.MULTILINE)
    own = re.compile(
        rf"^@requires\(backends=\([^)]*\"{_TORCHVISION}\"[^)]*\)\)\n(?:@.*\n)*class {name}\("
        rf"|^class {base}\(TorchvisionBackend\b",
        re.MULTILINE,
    )
    texts = [file.read_text(encoding="utf-8") for file in sources.glob("*/*processing_*.py")]
    return any(map(own.search, texts)) and not any(map(twin.search, texts))
