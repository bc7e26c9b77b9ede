"""Videos by each class's own video processor: the pixels, prompt and greedy answer of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from support.data.pictures import picture
from support.engine.engine_cell import engine_cell
from support.videos.cases import Sides, VideoAnswer, VideoCase, answered, built, plan_of, prepared, reference
from support.videos.classes import CLASSES
from support.videos.clips import make_clip
from triptych.base.config import MIB
from triptych.models.generic import DECODER, ENCODER
from triptych.models.registry import load_decoder, load_encoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
OWN_FAMILY = [entry for entry in CLASSES if entry.family in ("Qwen2_5_VL", "Qwen3VL")]
#: A frame of InternVL is a picture of the same getter; the others have a getter for each.
MIXED = ("Qwen2_5_VL", "Qwen3VL", "Qwen3_5", "InternVL", "Gemma4")
_CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
_LIMITS = {"max_num_batched_tokens": 1024, "max_model_len": 1024, "kv_memory": 64 * MIB}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[VideoCase, VideoAnswer]]:
    """Of all classes, by one start of the other environment."""
    folder = tmp_path_factory.mktemp("videos")
    clip = make_clip()
    cases = {entry.family: entry.case(folder, clip) for entry in CLASSES}
    cases |= {f"{name} with a picture": replace(cases[name], picture=picture(1, 28, 20)) for name in MIXED}
    given = zip(cases.values(), reference(list(cases.values()), folder), strict=True)
    return dict(zip(cases, given, strict=True))


@pytest.mark.parametrize("entry", CLASSES, ids=lambda entry: entry.family)
def test_a_video_is_prepared_placed_and_answered_as_by_transformers(entry, answers):
    case, expected = answers[entry.family]
    decoder = DECODER.load(case.model, **_CPU, attn_implementation=ATTENTION_NAME)
    check(case, expected, Sides(case.model, ENCODER.load(case.model, **_CPU), decoder))


@pytest.mark.parametrize("entry", OWN_FAMILY, ids=lambda entry: entry.family)
def test_the_family_of_its_own_gives_the_same(entry, answers):
    case, expected = answers[entry.family]
    decoder = load_decoder(case.model, **_CPU, attn_implementation=ATTENTION_NAME)
    sides = Sides(case.model, load_encoder(case.model, **_CPU), decoder)
    assert type(sides.encoder) is not ENCODER
    check(case, expected, sides)


@pytest.mark.parametrize("name", MIXED)
def test_a_picture_and_a_video_in_one_prompt_are_answered_as_by_transformers(name, answers):
    case, expected = answers[f"{name} with a picture"]
    assert not expected.error
    decoder = load_decoder(case.model, **_CPU, attn_implementation=ATTENTION_NAME)
    sides = Sides(case.model, load_encoder(case.model, **_CPU), decoder)
    items = [sides.encoder.preprocess(case.picture, {}), prepared(case, sides.encoder)]
    plans = [plan_of(item, sides.encoder.width, number) for number, item in enumerate(items)]
    prompt = built(case, decoder, *plans)
    assert list(prompt.token_ids) == expected.prompt
    rows = sides.encoder.encode(items)
    with engine_cell(sides, **_LIMITS) as cell:
        assert answered(cell, decoder, prompt, rows) == expected.output


def check(case: VideoCase, expected: VideoAnswer, sides: Sides) -> None:
    assert not expected.error
    item = prepared(case, sides.encoder)
    for name, tensor in item.tensors.items():
        assert torch.equal(tensor, expected.tensors[name]), name
    prompt = built(case, sides.decoder, plan_of(item, sides.encoder.width))
    assert list(prompt.token_ids) == expected.prompt
    rows = sides.encoder.encode([item])
    with engine_cell(sides, **_LIMITS) as cell:
        assert answered(cell, sides.decoder, prompt, rows) == expected.output
        # The answer is about the clip: without its rows it is another one.
        other = built(case, sides.decoder, plan_of(item, sides.encoder.width, 1))
        blank = [torch.zeros_like(part) for part in rows]
        assert answered(cell, sides.decoder, other, blank) != expected.output
