"""The scheduler's tests share an engine that has no model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.engine.engine_requests import STORE, Make, ModellessEngine
from triptych.ec_connector.connectors.memory import memory_store


@pytest.fixture
def make() -> Iterator[Make]:
    """An engine without a model over an empty store."""
    memory_store(STORE).clear()
    yield lambda **options: ModellessEngine(STORE, **options)
    memory_store(STORE).clear()
