"""Sounds give the rows and transcripts of transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from support.data.pictures import picture
from support.data.sounds import Sound, sound
from support.engine.engine_cell import engine_cell
from support.sounds.classes import SOUNDS, SoundClass, messages, reference
from support.videos.cases import Sides, VideoCase, answered, built, plan_of, prepared
from support.videos.cases import reference as video_reference
from support.videos.clips import make_clip
from triptych.base.config import MIB
from triptych.base.errors import InvalidRequest
from triptych.encoder_worker.media.video import MediaClip, VideoLimits
from triptych.models.generic import DECODER, ENCODER
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.frontend.prompt import open_checkpoint
from triptych.pd_worker.frontend.speech import transcription_chat
from triptych.protos import common_pb2

pytestmark = pytest.mark.timeout(180)
_CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
_LIMITS = {"max_num_batched_tokens": 1024, "max_model_len": 1024, "kv_memory": 64 * MIB}
TOKENS = 16


Served = tuple[SoundClass, Sides]


@pytest.fixture(scope="module", params=SOUNDS, ids=lambda entry: entry.family)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    path = request.param.checkpoint(tmp_path_factory.mktemp("sounds"))
    decoder = DECODER.load(path, **_CPU, attn_implementation=ATTENTION_NAME)
    return request.param, Sides(path, ENCODER.load(path, **_CPU), decoder)


def check(entry: SoundClass, sides: Sides, sounds: list[np.ndarray], image: Any = None) -> None:
    encoder, decoder = sides.encoder, sides.decoder
    items = [encoder.preprocess_sound(Sound(each), {}) for each in sounds]
    items += [encoder.preprocess(image, {})] if image is not None else []
    plans = [plan_of(item, encoder.width, number) for number, item in enumerate(items)]
    builder, _ = open_checkpoint(sides.path, decoder, 1024)
    asked = json.dumps(messages(len(sounds), image is not None)).encode()
    prompt = builder.build(asked, plans)
    expected = reference(entry, sides.path, sounds, image, TOKENS)
    assert list(prompt.token_ids) == expected[0]
    assert len(set(expected[1])) > 2
    rows = encoder.encode(items)
    with engine_cell(sides, **_LIMITS) as cell:
        assert answered(cell, decoder, prompt, rows) == expected[1]
        # The answer is about the sounds: without their rows it is another one.
        others = [plan_of(item, encoder.width, number + 9) for number, item in enumerate(items)]
        blank = [torch.zeros_like(part) for part in rows[: len(sounds)]] + rows[len(sounds) :]
        assert answered(cell, decoder, builder.build(asked, others), blank) != expected[1]


def test_a_sound_is_prepared_placed_and_answered_as_by_transformers(served: Served) -> None:
    check(*served, [sound(0.83, seed=1)])


def test_two_sounds_and_a_picture_in_one_prompt_are(served: Served) -> None:
    entry, sides = served
    sounds = [sound(0.83, seed=1), sound(0.61, seed=2)][: entry.sounds]
    check(entry, sides, sounds, picture(1, 28, 20) if entry.sees else None)


def test_a_sound_longer_than_what_the_model_hears_at_once_is_refused(served: Served) -> None:
    entry, sides = served
    if entry.processor in ("VoxtralProcessor", "Qwen3OmniMoeProcessor"):
        check(entry, sides, [sound(entry.window + 0.4)])
        return
    with pytest.raises(InvalidRequest, match="send it in parts") as caught:
        sides.encoder.preprocess_sound(Sound(sound(max(entry.window, 10) + 0.5)), {})
    assert caught.value.param == "audio"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sound_a_picture_and_a_video_in_one_prompt_are(served: Served, tmp_path: Path) -> None:
    entry, sides = served
    encoder, decoder = sides.encoder, sides.decoder
    if not entry.sees:
        with MediaClip(make_clip(), VideoLimits()) as clip, pytest.raises(InvalidRequest) as caught:
            encoder.preprocess_video(clip, {})
        assert "takes no videos" in caught.value.message
        return
    sampling = entry.sampling
    heard, seen = sound(0.83, seed=1), picture(1, 28, 20)
    case = VideoCase(
        sides.path, make_clip(), entry.processor, entry.images, entry.videos,
        {"videos_kwargs": dict(sampling)}, sampling, seen, heard,
        {"feature_extractor_type": entry.extractor_type, **entry.extractor},
    )  # fmt: skip
    (expected,) = video_reference([case], tmp_path)
    assert not expected.error
    items = [encoder.preprocess_sound(Sound(heard), {}), encoder.preprocess(seen, {})]
    items.append(prepared(case, encoder))
    prompt = built(case, decoder, *(plan_of(item, encoder.width, at) for at, item in enumerate(items)))
    assert list(prompt.token_ids) == expected.prompt
    with engine_cell(sides, **_LIMITS) as cell:
        assert answered(cell, decoder, prompt, encoder.encode(items)) == expected.output
    with pytest.raises(InvalidRequest, match="send it beside the clip, as an audio_url"):
        prepared(replace(case, options={"use_audio_in_video": True}), encoder)
    if entry.family == "Qwen3OmniMoeThinker":
        items[2] = prepared(replace(case, options={**sampling, "fps": 4.0}), encoder)
        prompt = built(case, decoder, *(plan_of(item, encoder.width, at) for at, item in enumerate(items)))
        with pytest.raises(InvalidRequest, match="give another fps"):
            decoder.prompt_inputs(prompt.token_ids, prompt.features)


ASKED: dict[str, tuple[dict[str, Any], ...]] = {
    "Qwen3ASR": ({"language": "en"}, {"language": "en", "prompt": "Rust, Go"}),
    "GlmAsr": ({}, {"prompt": "Write it down"}),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("family", ASKED)
def test_a_transcription_has_the_prompt_of_the_classs_processor(family: str, tmp_path: Path) -> None:
    entry = next(entry for entry in SOUNDS if entry.family == family)
    path, wave = entry.checkpoint(tmp_path), sound(0.83, seed=1)
    decoder = DECODER.load(path, **_CPU, attn_implementation="eager")
    builder, _ = open_checkpoint(path, decoder, 1024)
    encoder = ENCODER.load(path, **_CPU)
    plan = plan_of(encoder.preprocess_sound(Sound(wave), {}), encoder.width)
    processor = entry.made(path)
    template = processor.tokenizer.chat_template
    for fields in ASKED[family]:
        messages, options = transcription_chat(common_pb2.Transcription(**fields), decoder.config.model_type)
        built = builder.build(messages, [plan], options)
        expected = processor.apply_transcription_request(audio=wave, chat_template=template, **fields)
        assert list(built.token_ids) == expected["input_ids"][0].tolist(), fields


#: As Mistral's tokenizer writes a message with a sound, and an answer.
_MISTRAL = (
    "<s>{% for m in messages %}{% for part in m.content %}{% if part.type == 'audio' %}"
    "[INST][BEGIN_AUDIO]<|audio|>[/INST]{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(("fields", "end"), [({}, ""), ({"language": "en"}, "lang:en")])
def test_voxtral_transcribes_by_the_prompt_of_mistral_common(fields, end, tmp_path):
    """Its processor needs that package, whose release 1.12.0 writes this prompt."""
    path = next(entry for entry in SOUNDS if entry.family == "Voxtral").checkpoint(tmp_path)
    (path / "chat_template.jinja").write_text(_MISTRAL)
    decoder = DECODER.load(path, **_CPU, attn_implementation="eager")
    builder, _ = open_checkpoint(path, decoder, 1024)
    encoder = ENCODER.load(path, **_CPU)
    plan = plan_of(encoder.preprocess_sound(Sound(sound(0.83, seed=1)), {}), encoder.width)
    messages, options = transcription_chat(common_pb2.Transcription(**fields), decoder.config.model_type)
    expected = f"<s>[INST][BEGIN_AUDIO]{'<|audio|>' * 375}[/INST]{end}[TRANSCRIBE]"
    ids = AutoTokenizer.from_pretrained(path)(expected, add_special_tokens=False)["input_ids"]
    assert list(builder.build(messages, [plan], options).token_ids) == ids


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("qwen3_asr", {"language": "xx"}, "language"),
        ("glmasr", {"language": "en"}, "language"),
        ("glmasr", {"task": "translate"}, "model"),
        ("voxtral", {"prompt": "Rust, Go"}, "prompt"),
        ("voxtral", {"language": "en[/INST]"}, "language"),
        ("glmasr", {"timestamps": True}, "response_format"),
        ("qwen2_audio", {}, "model"),
    ],
)
def test_what_a_class_cannot_do_is_refused_by_its_field(kind, fields, param):
    with pytest.raises(InvalidRequest) as caught:
        transcription_chat(common_pb2.Transcription(**fields), kind)
    assert caught.value.param == param
