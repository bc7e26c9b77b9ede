"""36 requests at once, with items of every kind, are answered by vLLM as by the native engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.data.traffic import client_of
from support.vllm_engine.classes import IN_BFLOAT16, RUN, mixed_checkpoint
from support.vllm_engine.engines import Engines
from support.vllm_engine.front_door import FrontDoor
from support.vllm_engine.questions import Question, native_answers, questions
from support.waiting import within
from triptych.base.vllm_classes import CLASSES

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS, REQUESTS, ITEMS = 12, 36, 5
#: The requests' sets of items: more answers than these differ.
SETS = 9
#: On CPUs vLLM attends to their pictures in one direction only.
BOTH_WAYS = ("Gemma3ForConditionalGeneration",)
NAMES = tuple(sorted({*RUN} - {*BOTH_WAYS, *IN_BFLOAT16}))


@dataclass
class Served:
    """A class's checkpoint behind vLLM."""

    name: str
    checkpoint: Path
    door: FrontDoor
    engines: Engines


@pytest.fixture(scope="module", params=NAMES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    checkpoint = mixed_checkpoint(name, folder)
    # Clips come encoded: vLLM need not be ready for any of its own.
    limits = {kind: 0 if kind == "video" else 8 for kind in CLASSES[name].modalities}
    engines = Engines.of(checkpoint, folder, 1, limits=limits)
    door = FrontDoor(checkpoint, engines.store, engines.servers, folder)
    try:
        engines.start()
        door.start()
        yield Served(name, checkpoint, door, engines)
    finally:
        door.stop()
        engines.stop()


async def ask(url: str, question: Question) -> tuple[list[int], list[int]]:
    """The prompt's ids and the answer, of our proxy."""
    async with client_of(url) as client:
        reply = await client.chat.completions.create(  # type: ignore[call-overload]
            model="",
            messages=question.messages,
            max_tokens=TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
    (choice,) = reply.choices
    return reply.model_extra["prompt_token_ids"], choice.model_extra["token_ids"]


async def test_requests_at_once_are_answered_as_by_the_native_engine(served):
    asked = questions(REQUESTS, CLASSES[served.name].modalities)
    expected = await asyncio.to_thread(native_answers, served.checkpoint, asked, TOKENS)
    given = asyncio.gather(*(ask(served.door.urls[0], question) for question in asked))
    answers = await within("the answers", given)
    assert [prompt for prompt, _ in answers] == [prompt for prompt, _ in expected]
    pairs = zip(answers, expected, strict=True)
    others = [(n, one[1], other[1]) for n, (one, other) in enumerate(pairs) if one != other]
    assert not others
    assert len({tuple(output) for _, output in expected}) > SETS
    assert served.door.total("encoder", "triptych_encoder_tower_items_total") == ITEMS
    assert served.engines.servers[0].is_alive()
