"""The prompts by which decoder-only models transcribe: those of their own processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from support.data.sounds import Sound, sound
from support.sounds.classes import SOUNDS
from support.videos.cases import plan_of
from triptych.base.errors import InvalidRequest
from triptych.models.generic import DECODER, ENCODER
from triptych.pd_worker.frontend.prompt import open_checkpoint
from triptych.pd_worker.frontend.speech import transcription_chat
from triptych.protos import common_pb2

_CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
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
