"""A prompt with a video, as a PD worker builds it, resumes it, and refuses what does not fit it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.videos.cases import VideoCase, built, plan_of, prepared
from support.videos.classes import CLASSES
from support.videos.clips import make_clip
from support.zoo.recipe import END, START
from triptych.base.errors import InvalidRequest
from triptych.base.types import ItemPlan
from triptych.models.base import DecoderSide
from triptych.models.registry import load_decoder, load_encoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.frontend.prompt import PromptBuilder, open_checkpoint
from triptych.pd_worker.vllm.http.call import place_of, size_of

_CPU = {"device": torch.device("cpu"), "dtype": torch.float32}
Parts = tuple[VideoCase, DecoderSide, PromptBuilder, ItemPlan]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    entry = next(entry for entry in CLASSES if entry.family == "Qwen3VL")
    case = entry.case(Path(tmp_path_factory.mktemp("video")), make_clip())
    encoder = load_encoder(case.model, **_CPU)
    decoder = load_decoder(case.model, **_CPU, attn_implementation=ATTENTION_NAME)
    builder, _ = open_checkpoint(case.model, decoder, 4096)
    return case, decoder, builder, plan_of(prepared(case, encoder), encoder.width)


def test_a_request_is_resumed_on_another_worker_from_its_token_ids(parts: Parts) -> None:
    case, decoder, builder, plan = parts
    prompt = built(case, decoder, plan)
    (feature,) = prompt.features
    place = (feature.placement.offset, feature.placement.length)
    resumed = builder.resume(prompt.token_ids, [place], [plan])
    assert resumed == prompt
    shifted = (place[0] + 1, place[1])
    with pytest.raises(InvalidRequest):
        builder.resume(prompt.token_ids, [shifted], [plan])


def test_a_slot_and_a_plan_of_two_modalities_are_refused(parts: Parts) -> None:
    case, _, builder, plan = parts
    messages = json.dumps(case.messages).encode()
    with pytest.raises(InvalidRequest, match="modalities in other orders"):
        builder.build(messages, [replace(plan, modality="image")])
    with pytest.raises(InvalidRequest, match="2 items came"):
        builder.build(messages, [plan, plan])


def test_a_text_cannot_write_a_videos_tokens(parts: Parts) -> None:
    case, decoder, builder, plan = parts
    text = {"type": "text", "text": "<|video|> and <|vision_start|><|video|><|vision_end|>"}
    messages = [{"role": "user", "content": [{"type": "video"}, text]}]
    prompt = builder.build(json.dumps(messages).encode(), [plan])
    video = decoder.config.video_token_id  # type: ignore[attr-defined]
    assert prompt.token_ids.count(video) == plan.rows
    with pytest.raises(InvalidRequest, match="images come in messages"):
        builder.build_token_ids([5, video])


@pytest.mark.parametrize("family", ["Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe", "Glm4v", "Glm4vMoe"])
def test_vllm_is_given_a_place_with_one_run_of_rows_for_each_frame(family: str, tmp_path: Path) -> None:
    entry = next(entry for entry in CLASSES if entry.family == family)
    case = entry.case(tmp_path, make_clip(frames=16, size=(48, 32)))
    encoder = load_encoder(case.model, **_CPU)
    decoder = load_decoder(case.model, **_CPU, attn_implementation=ATTENTION_NAME)
    plan = plan_of(prepared(case, encoder), encoder.width)
    prompt = built(case, decoder, plan)
    (feature,) = prompt.features
    place, runs = place_of(feature)
    # vLLM counts the positions of each frame by itself where there are as many runs as frames.
    frames, rows, columns = plan.grid_thw
    assert [count for _, count in runs] == [rows * columns // 4] * frames
    assert size_of(plan) == ("video_grid_thw", plan.grid_thw)
    tokens = prompt.token_ids[place["offset"] : place["offset"] + place["length"]]
    assert {tokens[start + at] for start, count in runs for at in range(count)} <= decoder.row_token_ids
    if family.startswith("Qwen"):
        # It finds each frame between these two, from the place's first token on.
        assert [(tokens[start - 1], tokens[start + count]) for start, count in runs] == [
            (START, END)
        ] * frames
