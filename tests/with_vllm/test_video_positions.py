"""The positions that vLLM counts of the places and grids that it is sent are those of our decoders."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
import torch

from support.data.pictures import picture
from support.videos.cases import VideoCase, plan_of
from support.videos.classes import CLASSES
from support.videos.clips import make_clip
from support.vllm_engine.server import HOME, ROOT, vllm_environment
from triptych.base.types import SEGMENT, ItemPlan
from triptych.encoder_worker.media.video import MediaClip, VideoLimits
from triptych.models.base import DecoderSide, EncoderSide
from triptych.models.registry import load_decoder, load_encoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.frontend.prompt import open_checkpoint
from triptych.pd_worker.vllm.http.call import _metadata, place_of

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]

#: The modules of vLLM's classes.
MODULES = {
    "Qwen3VL": "qwen3_vl",
    "Qwen3VLMoe": "qwen3_vl_moe",
    "Qwen3_5": "qwen3_5",
    "Qwen3_5Moe": "qwen3_5",
    "Glm4v": "glm4_1v",
    "Glm4vMoe": "glm4_1v",
    "Qwen2_5_VL": "qwen2_5_vl",
    "Qwen2VL": "qwen2_vl",
}
SEGMENTED = ("Qwen3VL", "Qwen3_5", "Glm4v")
CASES = (*MODULES, *(f"{family} in segments" for family in SEGMENTED))
_CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
Counted = dict[str, tuple[dict[str, Any], dict[str, Any]]]


def plans(case: VideoCase, encoder: EncoderSide, *, segments: bool) -> list[ItemPlan]:
    """Of a picture, then of a clip, whole or in segments."""
    items = [encoder.preprocess(picture(1, 32, 16), {})]
    with MediaClip(case.clip, VideoLimits()) as clip:
        info = clip.info
    extra = encoder.extra_video_rows() if segments else None
    ends = [] if extra is None else [end for end, _ in encoder.video_segments(info, {}, 2, extra)]
    for start, end in zip([0, *ends], ends or [0], strict=False):
        with MediaClip(case.clip, VideoLimits()) as clip:
            options = {SEGMENT: [start, end, extra]} if ends else {}
            items.append(encoder.preprocess_video(clip, options))
    return [plan_of(item, encoder.width, number) for number, item in enumerate(items)]


def job_of(family: str, case: VideoCase, decoder: DecoderSide, given: list[ItemPlan]) -> dict[str, Any]:
    """What vLLM is sent, and what our decoder counts."""
    builder, _ = open_checkpoint(case.model, decoder, 4096)
    content = [{"type": "image"}, {"type": "video"}, {"type": "text", "text": "What happens?"}]
    prompt = builder.build(json.dumps([{"role": "user", "content": content}]).encode(), given)
    counted = decoder.prompt_inputs(prompt.token_ids, prompt.features)
    items = []
    for feature in prompt.features:
        place, runs = place_of(feature)
        modality, metadata = feature.plan.modality, _metadata(feature.plan)
        items.append({"modality": modality, "place": place, "runs": runs, "metadata": metadata})
    assert counted.positions is not None
    return {
        "name": family,
        "checkpoint": str(case.model),
        "architecture": f"{family}ForConditionalGeneration",
        "module": MODULES[family],
        "tokens": list(prompt.token_ids),
        "items": items,
        "ours": {"positions": counted.positions.tolist(), "delta": counted.delta},
    }


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    """Of all cases, by one start of the other environment."""
    folder, jobs = tmp_path_factory.mktemp("positions"), []
    for family in MODULES:
        entry = next(entry for entry in CLASSES if entry.family == family)
        case = entry.case(folder, make_clip(frames=24, size=(96, 64)))
        encoder = load_encoder(case.model, **_CPU)
        decoder = load_decoder(case.model, **_CPU, attn_implementation=ATTENTION_NAME)
        jobs.append(job_of(family, case, decoder, plans(case, encoder, segments=False)))
        if family in SEGMENTED:
            divided = plans(case, encoder, segments=True)
            assert len(divided) > 2
            jobs.append({**job_of(family, case, decoder, divided), "name": f"{family} in segments"})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    subprocess.run(
        [
            str(HOME / "venv" / "bin" / "python"),
            str(ROOT / "tests" / "support" / "vllm_engine" / "own_positions.py"),
            str(folder / "jobs.json"),
            str(folder / "out.json"),
        ],
        env=vllm_environment() | {"PYTHONPATH": ""},
        stdin=subprocess.DEVNULL,
        timeout=500,
        check=True,
    )
    theirs = json.loads((folder / "out.json").read_text())
    return {job["name"]: (job["ours"], found) for job, found in zip(jobs, theirs, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_vllm_counts_a_videos_positions_as_our_decoder_does(name: str, counted: Counted) -> None:
    ours, theirs = counted[name]
    assert theirs == ours
