"""Imports ahead of time: nearly all of a worker's start is importing torch and transformers."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Imports without the cycle collector, which finds nothing among modules and costs a fifth of the time.

    What was made stays out of later collections too.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def preload(path: Path) -> None:
    """Imports all model code that a worker of this checkpoint needs; ConfigError as loading it would give.

    Starts no thread and opens no device: the process may be forked afterwards.
    """
    from triptych.models.registry import family_of

    # Builds nothing: the family's module is imported to have its encoder's settings.
    family_of(path).encoder.processor_config(path)
