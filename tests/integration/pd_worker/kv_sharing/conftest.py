"""Requests that wait for their blocks as long as these take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.engine.sharing import wait_for_blocks
from support.stores.server import StoreServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    """A store of the test's own, to do harm to."""
    server = StoreServer(tmp_path / "store")
    server.start()
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_blocks(monkeypatch)
