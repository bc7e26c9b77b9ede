"""An encoder worker says at its start when the PD workers that are there will not take its embeddings."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from triptych.base.types import WorkerInfo
from triptych.encoder_worker.service import warn_of_mismatch
from triptych.registry.registry import Registry
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore

KEY, OTHER = "a" * 64, "c" * 64
PD = WorkerInfo("10.0.0.1:1", "pd", "i", KEY, "qwen", capacity={"row_width": 8192})
ENCODER = WorkerInfo(
    "10.0.0.2:1", "encoder", "i", KEY, "qwen", namespaces=("b" * 64,), capacity={"row_width": 8192}
)


async def test_it_names_its_key_and_the_one_that_is_served(
    store: EmbeddingStore, caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry(store)
    await registry.register(PD)
    await warn_of_mismatch(registry, replace(ENCODER, model_key=OTHER))
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert KEY[:12] in line and OTHER[:12] in line and "--model-revision" in line


@pytest.mark.parametrize("workers", [(), (PD,), (PD, replace(PD, address="10.0.0.3:1", model_key=OTHER))])
async def test_it_says_nothing_where_it_fits_or_comes_first(
    store: EmbeddingStore, caplog: pytest.LogCaptureFixture, workers: tuple[WorkerInfo, ...]
) -> None:
    registry = Registry(store)
    for info in workers:
        await registry.register(info)
    await warn_of_mismatch(registry, ENCODER)
    assert not caplog.records


async def test_a_store_that_is_away_ends_no_start(caplog: pytest.LogCaptureFixture) -> None:
    class Away:
        async def workers(self) -> list[WorkerInfo]:
            raise StoreUnavailable("away")

    await warn_of_mismatch(Away(), ENCODER)  # type: ignore[arg-type]
    assert "not compared with the PD workers" in caplog.text
