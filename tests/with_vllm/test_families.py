"""Qwen2.5-VL and LLaVA: our rows are those of vLLM's own encoder, and vLLM answers from ours.

Qwen3-VL's are in test_producer.py and test_fleet.py.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from support.data.items import fresh_buffer
from support.data.traffic import Case, ask, ask_all, expected, mixed_cases
from support.vllm_engine.checkpoints import LIMITS, vllm_checkpoint
from support.vllm_engine.engines import Engines
from support.vllm_engine.fleet import TEXT, fresh, raw
from support.vllm_engine.front_door import FrontDoor, assert_varied_and_exact
from support.waiting import within
from triptych.base.types import ItemPlan
from triptych.store import keys
from triptych.store.bulk import Loaded
from triptych.store.embedding_store import EmbeddingStore

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = 24
#: Pictures that no processor resizes: vLLM's uses torchvision for that and ours PIL, which differ a little.
SIZES = {"qwen2_5_vl": ((64, 64), (96, 48), (48, 128)), "llava": ((48, 48), (48, 48))}
#: Rows of both are in float32; their elements are between -0.5 and 0.5 or so.
ATOL, RTOL = 2e-5, 1e-4


@dataclass
class Served:
    """A family's checkpoint, the vLLM that serves it, as consumer and producer, and our front door."""

    family: str
    checkpoint: Path
    engines: Engines
    door: FrontDoor


@pytest.fixture(scope="module", params=sorted(SIZES))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    family, folder = request.param, tmp_path_factory.mktemp(request.param)
    checkpoint = vllm_checkpoint(family, folder / family)
    engines = Engines.of(checkpoint, folder, 1, "ec_both", limits=LIMITS[family])
    door = FrontDoor(checkpoint, engines.store, engines.servers, folder)
    try:
        engines.start()
        door.start()
        yield Served(family, checkpoint, engines, door)
    finally:
        door.stop()
        engines.stop()


async def stored(served: Served, mm_hash: str) -> tuple[ItemPlan, torch.Tensor]:
    """The plan and rows under a key, once they are there."""
    namespace = served.engines.servers[0].extra["namespace"]
    store = await EmbeddingStore.connect(served.engines.store.url)
    try:
        plan = None
        async with asyncio.timeout(60):
            while plan is None:
                [plan] = await store.look_up([(mm_hash, str(namespace))])
                await asyncio.sleep(0.05)
        result = await store.load(plan, fresh_buffer)
        assert isinstance(result, Loaded)
        body = bytearray(bytes(result.body))
        return plan, torch.frombuffer(body, dtype=torch.float32).reshape(plan.rows, plan.width)
    finally:
        await store.close()


def keys_in(served: Served) -> set[str]:
    found = served.engines.store.call("KEYS", keys.EMBEDDING + "*")
    return {name.decode().partition("{")[2].partition("}")[0] for name in found}


async def by_our_encoder(served: Served, image: Image.Image) -> tuple[ItemPlan, torch.Tensor]:
    before = keys_in(served)
    await ask(served.door.urls[0], Case((0, "x"), (image,)), 1)
    [mm_hash] = keys_in(served) - before
    return await stored(served, mm_hash)


async def by_vllm(served: Served, image: Image.Image) -> tuple[ItemPlan, torch.Tensor]:
    """Under another key than ours, which vLLM would take our rows for."""
    mm_hash = hashlib.sha256(image.tobytes()).hexdigest()
    answer = served.engines.servers[0].ask([raw(image, mm_hash), TEXT], 1)
    assert answer["status"] == 200, answer
    return await stored(served, mm_hash)


async def test_rows_and_plans_of_our_encoder_are_those_of_vllms_own(served):
    earlier = None
    for image in (fresh(*size) for size in SIZES[served.family]):
        our_plan, ours = await by_our_encoder(served, image)
        plan, theirs = await by_vllm(served, image)
        assert plan.mm_hash != our_plan.mm_hash
        assert replace(plan, mm_hash=our_plan.mm_hash) == our_plan
        torch.testing.assert_close(ours, theirs, atol=ATOL, rtol=RTOL)
        # Rows, and the rows of two pictures, differ by more than what is tolerated.
        assert ours.std(dim=0).mean() > 100 * ATOL
        if earlier is not None:
            assert (ours[:4] - earlier[:4]).abs().mean() > 100 * ATOL
        earlier = ours


async def test_mixed_requests_are_answered_from_our_rows_as_generate_does(served):
    cases = mixed_cases(16, seed=21)
    reference = await asyncio.to_thread(expected, served.checkpoint, cases, TOKENS)
    encoded = served.door.total("encoder", "triptych_encoder_tower_items_total")
    answers = await within("the answers", ask_all(served.door.urls[0], cases, TOKENS))
    assert_varied_and_exact(reference, [answer.token_ids for answer in answers])
    assert served.door.total("encoder", "triptych_encoder_tower_items_total") > encoded
    assert served.engines.servers[0].is_alive()
