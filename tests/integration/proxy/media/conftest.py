"""A web server for fetches."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from support.processes.web import WebServer
from triptych.proxy.media import fetcher as media_fetcher


@pytest.fixture
async def web(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WebServer]:
    monkeypatch.setattr(media_fetcher, "FIRST_BACKOFF", 0.01)
    async with WebServer() as server:
        yield server
