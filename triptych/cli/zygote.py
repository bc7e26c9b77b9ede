"""`python -m triptych.cli.zygote MODEL FD`: imports what MODEL's workers need, then forks them on order."""

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
from pathlib import Path

from triptych.cli import main
from triptych.cpu.threads import thread_environment
from triptych.errors import ConfigError
from triptych.launch.fork.process import Order, become, serve_orders
from triptych.launch.parent import die_with_parent
from triptych.log import setup_logging

#: What workers import besides, without gRPC.
_ALSO = ("transformers.models.auto.tokenization_auto", "triptych.models.identity")


def await_order(model: str, descriptor: int) -> Order:
    """Returns in a forked worker only. No gRPC here: it does not survive a fork."""
    thread_environment()
    # The one library that starts threads when it is imported; workers need no BLAS but torch's.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    die_with_parent()
    from triptych.models.preload import preload, quick_imports

    with quick_imports():
        try:
            preload(Path(model))
            for name in _ALSO:
                importlib.import_module(name)
        except ConfigError:
            # Each worker says so itself, and exits as it would without a zygote.
            logging.getLogger("launch").debug("not everything could be imported", exc_info=True)
    return serve_orders(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    setup_logging("zygote")
    become(await_order(sys.argv[1], int(sys.argv[2])))
    main()
