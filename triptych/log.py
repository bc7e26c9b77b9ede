"""One log format for all processes: request ids go through all of them; prompts, media and keys never."""

from __future__ import annotations

import logging
import sys

_FORMAT = "%(asctime)s %(levelname).1s %(service)s %(name)s: %(message)s"


def setup_logging(service: str, level: str = "info") -> None:
    """Log to stderr, each line carrying the name of this process, such as `pd-0`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S", defaults={"service": service}))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("transformers", "asyncio", "uvicorn.access", "PIL"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def short(key: str) -> str:
    """A key as logs may show it: enough to follow, too little to use."""
    return key[:12]
