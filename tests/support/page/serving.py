"""An application served on a loopback port by a thread of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from support.processes.cluster import wait_for


@contextlib.contextmanager
def serving(app: Starlette, port: int) -> Iterator[None]:
    """An application on a loopback port, in a thread of its own."""
    config = uvicorn.Config(
        app, port=port, log_level="warning", lifespan="off", loop="asyncio", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_for("the server", lambda: server.started)
        yield
    finally:
        server.should_exit = True
        thread.join(30)
