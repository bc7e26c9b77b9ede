"""A PD worker of the tiny model behind a real gRPC server, and a client of it, for each test that asks."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from support.engine.pd_serving import served_model, serving
from support.fakes.pd_client import PDClient
from triptych.pd_worker.native import LoadedModel, NativeWorker

Served = tuple[NativeWorker, PDClient]


@pytest.fixture
def model() -> LoadedModel:
    return served_model("qwen3_vl")


@pytest.fixture
async def served(model: LoadedModel, store_url: str) -> AsyncIterator[Served]:
    async with serving(model, store_url) as pair:
        yield pair


@pytest.fixture
def worker(served: Served) -> NativeWorker:
    return served[0]


@pytest.fixture
def client(served: Served) -> PDClient:
    return served[1]
