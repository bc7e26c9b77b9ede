"""The scheduler's tests share an engine that has no model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.engine.engine_requests import STORE, Make, ModellessEngine


@pytest.fixture
def make() -> Iterator[Make]:
    """An engine without a model over an empty store."""
    STORE.clear()
    yield lambda **options: ModellessEngine(STORE, **options)
    STORE.clear()
