"""Videos, whole and in segments, give the rows of transformers."""

from __future__ import annotations

from collections.abc import Sequence
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
from triptych.base.types import SEGMENT, ItemPlan
from triptych.encoder_worker.media.video import MediaClip, VideoLimits
from triptych.models.base import DecoderSide, EncoderSide, PreparedItem
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


#: A compression between frames, or placeholders that cannot be computed without pixels.
WHOLE = ("VideoLlama3", "LlavaNextVideo")
DIVIDED = [entry for entry in CLASSES if entry.family not in WHOLE]
Answers = dict[str, tuple[VideoCase, VideoAnswer]]


@pytest.fixture(scope="module")
def segment_answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder, clip = tmp_path_factory.mktemp("videos"), make_clip(frames=40, size=(32, 24))
    cases = {entry.family: entry.case(folder, clip) for entry in CLASSES}
    given = zip(cases.values(), reference(list(cases.values()), folder), strict=True)
    return dict(zip(cases, given, strict=True))


def segments(case: VideoCase, encoder: EncoderSide, frames: int) -> list[PreparedItem]:
    """The items of a clip, each decoded alone as an encoder worker does."""
    extra = encoder.extra_video_rows()
    assert extra is not None
    with MediaClip(case.clip, VideoLimits()) as clip:
        found = encoder.video_segments(clip.info, case.options, frames, extra)
        # Each ends where the next one begins, the last one with the clip.
        assert [seconds for _, seconds in found] == sorted({seconds for _, seconds in found})
        assert not found or found[-1][1] == clip.info.frames / clip.info.fps
        ends = [end for end, _ in found]
    items = []
    for start, end in zip([0, *ends], ends, strict=False):
        with MediaClip(case.clip, VideoLimits()) as clip:
            options = {**case.options, SEGMENT: [start, end, extra]}
            items.append(encoder.preprocess_video(clip, options))
    return items


def positions(case: VideoCase, decoder: DecoderSide, plans: Sequence[ItemPlan]) -> torch.Tensor:
    prompt = built(case, decoder, *plans)
    return decoder.positions(prompt.token_ids, prompt.features)[0]


@pytest.mark.parametrize("entry", DIVIDED, ids=lambda entry: entry.family)
def test_a_clip_in_segments_is_placed_and_answered_as_by_transformers(entry, segment_answers):
    case, expected = segment_answers[entry.family]
    assert not expected.error
    encoder = load_encoder(case.model, **_CPU)
    decoder = load_decoder(case.model, **_CPU, attn_implementation=ATTENTION_NAME)
    whole = prepared(case, encoder)
    (rows,) = encoder.encode([whole])
    for frames in (2, 4):
        items = segments(case, encoder, frames)
        if frames == 4 and not items:
            continue  # it samples four in all
        assert len(items) > 1
        parts = [encoder.encode([item])[0] for item in items]
        torch.testing.assert_close(torch.cat(parts), rows, rtol=0, atol=1e-5)
        plans = [plan_of(item, encoder.width, number) for number, item in enumerate(items)]
        prompt = built(case, decoder, *plans)
        assert list(prompt.token_ids) == expected.prompt
        assert positions(case, decoder, plans).equal(
            positions(case, decoder, [plan_of(whole, encoder.width)])
        )
        with engine_cell(Sides(case.model, encoder, decoder), **_LIMITS) as cell:
            assert answered(cell, decoder, prompt, parts) == expected.output


@pytest.mark.parametrize("family", WHOLE)
def test_a_class_that_cannot_be_divided_keeps_its_clips_whole(family: str, segment_answers: Answers) -> None:
    case, _ = segment_answers[family]
    encoder = load_encoder(case.model, **_CPU)
    extra = encoder.extra_video_rows()
    with MediaClip(case.clip, VideoLimits()) as clip:
        assert encoder.video_segments(clip.info, case.options, 2, extra or 0) == []
