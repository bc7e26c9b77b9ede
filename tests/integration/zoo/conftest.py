"""The classes of transformers, one after the other: a class's tests share what was loaded of it."""

from __future__ import annotations

import pytest

from support.zoo.cases import Case


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    """The class that the test's parameter names."""
    return Case.open(request.param, 16)
