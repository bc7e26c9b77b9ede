"""Videos as segments: rows, prompt, positions and greedy answer of the whole video, and of `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from support.engine.engine_cell import engine_cell
from support.videos.cases import VideoAnswer, VideoCase, answered, built, plan_of, prepared, reference
from support.videos.classes import CLASSES
from support.videos.clips import make_clip
from triptych.base.config import MIB
from triptych.base.types import SEGMENT, ItemPlan
from triptych.encoder_worker.media.video import MediaClip, VideoLimits
from triptych.models.base import DecoderSide, EncoderSide, PreparedItem
from triptych.models.registry import load_decoder, load_encoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
_CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
_LIMITS = {"max_num_batched_tokens": 1024, "max_model_len": 1024, "kv_memory": 64 * MIB}
#: A compression between frames, or placeholders that cannot be computed without pixels.
WHOLE = ("VideoLlama3", "LlavaNextVideo")
DIVIDED = [entry for entry in CLASSES if entry.family not in WHOLE]
Answers = dict[str, tuple[VideoCase, VideoAnswer]]


@dataclass
class Sides:
    path: Path
    encoder: EncoderSide
    decoder: DecoderSide


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
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
def test_a_clip_in_segments_is_placed_and_answered_as_by_transformers(entry, answers):
    case, expected = answers[entry.family]
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
def test_a_class_that_cannot_be_divided_keeps_its_clips_whole(family: str, answers: Answers) -> None:
    case, _ = answers[family]
    encoder = load_encoder(case.model, **_CPU)
    extra = encoder.extra_video_rows()
    with MediaClip(case.clip, VideoLimits()) as clip:
        assert encoder.video_segments(clip.info, case.options, 2, extra or 0) == []
