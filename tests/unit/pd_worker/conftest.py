"""The scheduler's tests share an engine that has no model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.engine.engine_requests import STORE, Make, ModellessEngine


@pytest.fixture
def make() -> Iterator[Make]:
    """Engines without a model over an empty store: one that has answered all its requests holds nothing."""
    engines: list[ModellessEngine] = []

    def made(**options: Any) -> ModellessEngine:
        engines.append(ModellessEngine(STORE, **options))
        return engines[-1]

    STORE.clear()
    yield made
    STORE.clear()
    for engine in engines:
        if engine.idle:
            engine.assert_at_rest()
