"""The classes of transformers, one after the other: a class's tests share what was loaded of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from support.zoo.cases import Case


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    """The class that the test's parameter names."""
    return Case.open(request.param, 16)
