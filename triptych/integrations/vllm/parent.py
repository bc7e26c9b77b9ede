"""The process that started vLLM's engine: without it an engine serves nobody, and holds memory."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from multiprocessing.connection import wait

logger = logging.getLogger(__name__)

#: The exit code of an engine whose parent has gone.
_EXIT = 1


def end_with_parent() -> None:
    """From now on ends this process as soon as its parent has ended. For processes of multiprocessing."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), name="parent", daemon=True).start()


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    logger.critical("the process that started this engine has ended: it ends, too")
    # Its own workers end with it: vLLM has them watch this process.
    os._exit(_EXIT)
