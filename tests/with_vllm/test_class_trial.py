"""A class that the table lacks is tried: --engine-class generic."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from support.data.traffic import client_of
from support.vllm_engine.classes import class_checkpoint
from support.vllm_engine.engines import Engines
from support.vllm_engine.front_door import FrontDoor
from support.vllm_engine.questions import native_answers, questions
from support.waiting import within
from triptych.base.config import PDConfig
from triptych.base.errors import ConfigError
from triptych.base.vllm_classes import CLASSES
from triptych.pd_worker.vllm.class_trial import try_class
from triptych.pd_worker.vllm.connection import connected
from triptych.pd_worker.vllm.worker import load_front_model

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

NAME = "Idefics3ForConditionalGeneration"
TOKENS, REQUESTS = 12, 36
GENERIC = ("--engine-class", "generic")


async def test_a_class_whose_pictures_vllm_writes_alike_is_served_and_another_is_refused(tmp_path):
    assert NAME not in CLASSES
    checkpoint = class_checkpoint(NAME, tmp_path / "checkpoint")
    engines = Engines.of(checkpoint, tmp_path, 1, engine_class="generic")
    door = FrontDoor(checkpoint, engines.store, engines.servers, tmp_path, pd_words=[GENERIC])
    asked = questions(REQUESTS, ("image",))
    expected = await asyncio.to_thread(native_answers, checkpoint, asked, TOKENS)
    try:
        engines.start()
        door.start()

        async def ask(question) -> list[int]:
            async with client_of(door.urls[0]) as client:
                reply = await client.chat.completions.create(
                    model="",
                    messages=question.messages,
                    max_tokens=TOKENS,
                    temperature=0,
                    extra_body={"ignore_eos": True, "return_token_ids": True},
                )
            return reply.choices[0].model_extra["token_ids"]

        answers = await within("the answers", asyncio.gather(*map(ask, asked)))
        assert answers == [output for _, output in expected]
        assert len({tuple(output) for output in answers}) > 9
        await refused(_with_more_rows(checkpoint, tmp_path / "other"), engines)
    finally:
        door.stop()
        engines.stop()


def _with_more_rows(checkpoint: Path, folder: Path) -> Path:
    """The same, whose processor here makes more tokens of a picture than the server's."""
    shutil.copytree(checkpoint, folder)
    file = folder / "processor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "image_seq_len": 9}))
    return folder


async def refused(checkpoint: Path, engines: Engines) -> None:
    config = PDConfig(
        model=str(checkpoint),
        store=engines.store.url,
        engine="vllm",
        engine_url=engines.servers[0].url,
        engine_class="generic",
        dtype="float32",
    )
    async with asyncio.timeout(200), connected(config, asyncio.Event()) as engine:
        assert engine is not None
        model = load_front_model(config, engine.info.max_model_len)
        with pytest.raises(ConfigError, match=f"{NAME}: of a picture of .* rows, for which vLLM writes"):
            await try_class(engine, model)
