"""vLLM answers from the rows of the adapter for all classes as from those of its own encoder."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from support.data.pictures import picture
from support.data.traffic import Case, ask
from support.vllm_engine.classes import (
    ADAPTED,
    ALWAYS_RESIZED,
    IN_BFLOAT16,
    class_checkpoint,
    processor,
    recipe_of,
)
from support.vllm_engine.encoders import EncoderProcess
from support.vllm_engine.engines import Engines
from support.vllm_engine.fleet import raw
from support.vllm_engine.front_door import FrontDoor
from support.zoo.cases import assert_exact
from support.zoo.models import Reference
from support.zoo.own_processor import TEXT, generated
from support.zoo.processors import make_processor

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = 12
QUESTION = TEXT
#: Classes whose answers are compared with those of transformers, too.
GENERATED = ("Gemma3ForConditionalGeneration", "InternVLForConditionalGeneration")
#: Pictures that no processor resizes, or all of them in one way.
SIZE = (32, 16)


@dataclass
class Served:
    """One class's vLLM and our encoder worker."""

    name: str
    checkpoint: Path
    folder: Path
    engines: Engines

    def answer(self, *parts: dict[str, Any]) -> tuple[list[int], int]:
        """vLLM's own answer, and how many tokens the prompt has."""
        reply = self.engines.servers[0].ask([*parts, {"type": "text", "text": QUESTION}], TOKENS)
        assert reply["status"] == 200, reply
        return reply["token_ids"], reply["usage"]["prompt_tokens"]

    def generated(self, images: Sequence[Image.Image]) -> tuple[list[int], Reference]:
        """The prompt and the answer of transformers, from the same checkpoint."""
        cls = getattr(transformers, self.name)
        model = cls.from_pretrained(self.checkpoint, dtype=torch.float32).eval()
        # `generate` fills what a call leaves out from here: nothing ends an answer early.
        model.generation_config = transformers.GenerationConfig(pad_token_id=0)
        return generated(model, make_processor(processor(recipe_of(self.name))), images, TOKENS)


@pytest.fixture(scope="module", params=sorted({*ADAPTED} - {*IN_BFLOAT16, *ALWAYS_RESIZED}))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = class_checkpoint(request.param, folder / "checkpoint")
    engines = Engines.of(checkpoint, folder, 1, limits={"image": 8})
    try:
        engines.start()
        yield Served(request.param, checkpoint, folder, engines)
    finally:
        engines.stop()


def test_pixels_are_not_read_where_the_store_has_their_rows(served):
    encoder = EncoderProcess(served.checkpoint, served.engines.store.url, served.folder / "encoder.log")
    encoder.start()
    try:
        one, other = picture(1, *SIZE), picture(2, *SIZE)
        encoder.encode(one)
        # The pixels of one picture under the key of the other.
        from_store = served.answer(raw(other, encoder.key(one)))
    finally:
        encoder.stop()
    own = [served.answer(raw(image)) for image in (one, other)]
    assert from_store == own[0]
    assert own[0] != own[1]


async def test_a_pd_worker_gives_vllm_the_rows_and_gets_its_own_answers(served):
    door = FrontDoor(served.checkpoint, served.engines.store, served.engines.servers, served.folder)
    try:
        door.start()
        images = [picture(3, *SIZE), picture(4, *SIZE), picture(5, 16, 16)]
        cases = [
            Case((0, QUESTION), (images[0],)),
            Case((0, 1, QUESTION), (images[0], images[1])),
            Case((0, QUESTION), (images[2],)),
            Case((QUESTION,)),
        ]
        answers = [await ask(door.urls[0], case, TOKENS) for case in cases]
        encoded = door.total("encoder", "triptych_encoder_tower_items_total")
    finally:
        door.stop()
    assert encoded == len(images)
    if served.name in GENERATED:
        for case, answer in zip(cases[:2], answers, strict=False):
            prompt, expected = await asyncio.to_thread(served.generated, case.images)
            assert answer.prompt_token_ids == prompt
            assert_exact(expected, answer.token_ids, f"{len(case.images)} pictures")
    for case, answer in zip(cases, answers, strict=True):
        own = await asyncio.to_thread(served.answer, *(raw(image) for image in case.images))
        assert (answer.token_ids, answer.usage.prompt_tokens) == own
    assert len({tuple(answer.token_ids) for answer in answers}) == len(cases)
