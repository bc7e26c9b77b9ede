"""HTTP servers and clients that begin and end without waits: to import this is all that it takes."""

from __future__ import annotations

import asyncio
import functools
from types import SimpleNamespace

import httpcore2
import uvicorn.server

# It looks every 0.1 s whether it shall end, and then waits as long for its connections.
_hurried = SimpleNamespace(**{**vars(asyncio), "sleep": lambda seconds: asyncio.sleep(seconds / 10)})
uvicorn.server.asyncio = _hurried  # type: ignore[attr-defined, assignment]
# Every client, of http:// too, would read the system's CAs: that takes longer than most requests.
httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)
