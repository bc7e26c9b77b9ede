"""An unmodified vLLM as encoder worker: it saves in our format what our own encoder worker would."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from PIL import Image

from support.data.items import fresh_buffer
from support.vllm_engine.fleet import TEXT, ask, assert_as_generate, fresh, raw, stored
from triptych.base.types import ItemPlan
from triptych.store import keys
from triptych.store.bulk import Loaded
from triptych.store.embedding_store import EmbeddingStore

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]


def encoded(fleet: Any, producer: Any, image: Image.Image) -> None:
    """vLLM encodes the picture under our key, and saves it."""
    answer = producer.ask([raw(image, fleet.encoder.key(image)), TEXT], 1)
    assert answer["status"] == 200, answer
    until(lambda: fleet.store.call("EXISTS", keys.embedding(fleet.encoder.key(image))))


def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def value(fleet: Any, image: Image.Image) -> tuple[ItemPlan, torch.Tensor]:
    """The stored plan and rows."""

    async def read() -> tuple[ItemPlan, bytes]:
        store = await EmbeddingStore.connect(fleet.store.url)
        try:
            [plan] = await store.look_up([(fleet.encoder.key(image), fleet.encoder.namespace)])
            assert plan is not None
            result = await store.load(plan, fresh_buffer)
            assert isinstance(result, Loaded)
            return plan, bytes(result.body)
        finally:
            await store.close()

    plan, body = asyncio.run(read())
    return plan, torch.frombuffer(bytearray(body), dtype=torch.float32).reshape(plan.rows, plan.width)


def test_its_rows_and_plan_are_those_of_our_encoder_worker(fleet, producer):
    for image in (fresh(), fresh(96, 48), fresh(48, 128)):
        encoded(fleet, producer, image)
        plan, rows = value(fleet, image)
        fleet.store.call("DEL", keys.embedding(plan.mm_hash))
        fleet.encoder.encode(image)
        our_plan, our_rows = value(fleet, image)
        assert plan == our_plan
        torch.testing.assert_close(rows, our_rows, atol=2e-4, rtol=1e-4)


def test_what_it_encodes_another_vllm_answers_as_generate_does(fleet, producer):
    image = fresh()
    encoded(fleet, producer, image)
    assert_as_generate(fleet, [ask(fleet, stored(fleet, image))], [[image]])


def test_what_the_store_evicted_and_it_still_holds_is_saved_again(fleet, producer):
    image = fresh()
    encoded(fleet, producer, image)
    fleet.store.call("DEL", keys.embedding(fleet.encoder.key(image)))
    encoded(fleet, producer, image)
    assert_as_generate(fleet, [ask(fleet, stored(fleet, image))], [[image]])


def test_it_names_the_grid_and_key_of_each_item_in_its_answer(fleet, producer):
    image = fresh(96, 48)
    answer = producer.ask([raw(image, fleet.encoder.key(image)), TEXT], 1)
    item = answer["ec_transfer_params"][fleet.encoder.key(image)]
    assert item["metadata"]["image_grid_thw"] in ([[1, 6, 12]], [1, 6, 12])
