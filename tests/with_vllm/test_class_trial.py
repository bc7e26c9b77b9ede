"""A class that the table lacks is tried, --engine-class generic, or refused in the words of vLLM's end."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest

from support.data.traffic import client_of
from support.vllm_engine.alone import run_alone
from support.vllm_engine.classes import class_checkpoint, recipe_of
from support.vllm_engine.engines import Engines
from support.vllm_engine.front_door import FrontDoor
from support.vllm_engine.questions import native_answers, questions
from support.waiting import within
from support.zoo.checkpoint import write_checkpoint
from support.zoo.processors import ON_TORCHVISION, PROCESSORS
from support.zoo.recipe import Config
from triptych.base.config import PDConfig
from triptych.base.errors import ConfigError
from triptych.base.vllm_classes import CLASSES, NOT_SERVED
from triptych.base.vllm_classes import GENERIC as TRIED
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
            await try_class(engine, model, TRIED)


#: Fields of the parts of config.json as hubs have them, which transformers reads, too, and does not write.
FIELDS: dict[str, Config] = {
    "Ernie4_5_VLMoe": {},
    "Kimi_K25": {},
    "Step3p7": {"vision_config": {"output_dim": None, "width": 32, "layers": 2, "heads": 4}},
    "MiniMaxM3Sparse": {
        "vision_config": {"img_token_compression_config": {"spatial_merge_size": 2}, "rope_theta": 1e4},
        "text_config": {
            "hidden_act": "swigluoai",
            "rope_theta": 5e6,
            "partial_rotary_factor": 0.25,
            "moe_layer_freq": [1, 1, 1],
            "sparse_attention_config": {
                "sparse_attention_freq": [0, 0, 0],
                "sparse_num_index_heads": 4,
                "sparse_topk_blocks": 16,
            },
        },
    },
}
#: What vLLM reads of Kimi's preprocessor_config.json.
MEDIA: Config = {
    "media_proc_cfg": {
        "patch_size": 4,
        "merge_kernel_size": 2,
        "temporal_merge_kernel_size": 4,
        "in_patch_limit": 64,
        "patch_limit_on_one_side": 64,
        "in_patch_limit_each_frame": 64,
        "in_patch_limit_video": None,
        "fixed_output_tokens": None,
        "sample_fps": 2.0,
        "max_num_frames_each_video": None,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
}
#: The processor of ERNIE's videos, without the font that it would fetch.
VIDEOS = {
    "video_processor_type": "Ernie4_5_VLMoeVideoProcessor",
    "temporal_patch_size": 2,
    "patch_size": 4,
    "draw_on_frames": False,
}


@pytest.mark.parametrize("family", FIELDS)
def test_vllm_ends_with_what_the_table_quotes(family: str, tmp_path: Path) -> None:
    name = f"{family}ForConditionalGeneration"
    folder = tmp_path / "checkpoint"
    write_checkpoint(recipe_of(name), folder, PROCESSORS.get(family) or ON_TORCHVISION[family])
    config = json.loads((folder / "config.json").read_text())
    for part, fields in FIELDS[family].items():
        config[part] |= fields
    # The name that hubs have.
    config["architectures"] = [name.replace("_K", "K")]
    (folder / "config.json").write_text(json.dumps(config))
    if family.startswith("Kimi"):
        settings = json.loads((folder / "preprocessor_config.json").read_text())
        (folder / "preprocessor_config.json").write_text(json.dumps({**settings, **MEDIA}))
    if family.startswith("Ernie"):
        (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEOS))
    job = {"checkpoint": str(folder), "dtype": "float32", "conversations": [], "tokens": 1, "out": ""}
    known = CLASSES.get(name, TRIED)
    code, log = run_alone(tmp_path, {**job, "limits": {known.image_kind: 1}})
    why = NOT_SERVED.get(name) or known.not_run
    (quoted,) = re.findall('"(.+)"', why)
    assert code and quoted in log, log[-4000:]
