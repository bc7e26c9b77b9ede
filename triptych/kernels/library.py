"""The loaded library of the kernels: from the wheel, from the cache, or compiled now."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from pathlib import Path

from triptych.kernels.build import SOURCES, BuildError, compile_library, library_name

logger = logging.getLogger(__name__)


@functools.cache
def kernel_library() -> ctypes.CDLL | None:
    """The library; None, with one line in the log, where there is none and none can be compiled."""
    try:
        return _load()
    except (BuildError, OSError) as error:
        logger.warning(
            "no compiled kernels, so that a picture takes about twice the CPU time: %s; install g++ (Debian: "
            "apt-get install g++), or a wheel that was built where it is",
            " ".join(str(error).split()),
        )
        return None


def _load() -> ctypes.CDLL:
    cache = _cache_folder()
    for folder in (SOURCES, cache):
        if (folder / library_name()).is_file():
            return ctypes.CDLL(str(folder / library_name()))
    logger.info("compiling the kernels, once on this machine")
    return ctypes.CDLL(str(compile_library(cache)))


def _cache_folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return base / "triptych" / "kernels"
