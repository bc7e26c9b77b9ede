"""Requests that wait for their blocks as long as these take."""

from __future__ import annotations

import pytest

from support.engine.sharing import wait_for_blocks


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_blocks(monkeypatch)
