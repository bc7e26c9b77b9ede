"""Both sides of encoder-decoder models give the numbers of transformers."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, VisionEncoderDecoderModel

from support.data.checkpoints import build_checkpoint
from support.data.pictures import picture
from support.data.sounds import Sound, sound
from support.encdec.checkpoints import FAMILIES
from support.encdec.oracle import audio_inputs, encoder_rows, greedy, model_of, text_inputs, tokenizer_of
from support.encdec.oracle import decoder_logits as whole_logits
from support.encdec.reference import NAME, decoder_logits
from triptych.base.errors import ConfigError, InvalidRequest, TooLarge
from triptych.models.base import DecoderSide, EncoderSide
from triptych.models.families.whisper import WhisperPrompts
from triptych.models.registry import load_decoder, load_encoder

CPU = torch.device("cpu")
TEXT_FAMILIES = tuple(family for family in FAMILIES if family not in ("whisper", "trocr"))
TEXTS = ("A calm sea.", "def main(): return 3", "größer als " * 9)


@functools.cache
def sides(path: Path) -> tuple[EncoderSide, DecoderSide]:
    encoder = load_encoder(path, device=CPU, dtype=torch.float32)
    return encoder, load_decoder(path, device=CPU, dtype=torch.float32, attn_implementation=NAME)


@functools.cache
def said(path: Path, text: str) -> list[int]:
    """The decoder prompt and 32 greedy tokens of transformers."""
    result = greedy(path, text_inputs(path, text), max_new_tokens=32)
    return [*result.prompt_token_ids, *result.token_ids]


@pytest.mark.parametrize("variant", ["", "hub+sharded", "scaled", "tied"])
@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_encoder_rows_equal_transformers(family: str, variant: str) -> None:
    path = build_checkpoint(family, variant=variant)
    encoder, _ = sides(path)
    for text in TEXTS:
        [rows] = encoder.encode([encoder.preprocess(text.encode(), {})])
        torch.testing.assert_close(rows, encoder_rows(path, text_inputs(path, text)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_texts_of_several_lengths_in_one_batch_equal_one_by_one(family: str) -> None:
    encoder, _ = sides(build_checkpoint(family))
    items = [encoder.preprocess(("word " * count).encode(), {}) for count in (9, 12, 1, 11, 40)]
    for item, rows in zip(items, encoder.encode(items), strict=True):
        assert rows.shape == (item.rows, encoder.width)
        assert rows.untyped_storage().nbytes() == rows.numel() * rows.element_size()
        torch.testing.assert_close(rows, encoder.encode([item])[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", ["", "hub", "scaled", "tied"])
@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_logits_of_a_ragged_batch_equal_transformers(family: str, variant: str) -> None:
    path = build_checkpoint(family, variant=variant)
    encoder, decoder = sides(path)
    prompts = [said(path, text)[: 3 + 9 * number] for number, text in enumerate(TEXTS, 1)]
    rows = encoder.encode([encoder.preprocess(text.encode(), {}) for text in TEXTS])
    for text, prompt, logits in zip(TEXTS, prompts, decoder_logits(decoder, prompts, rows), strict=True):
        wanted = whole_logits(path, text_inputs(path, text), prompt)
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_token_ids_are_encoded_as_the_text_that_they_stand_for(family: str) -> None:
    path = build_checkpoint(family)
    encoder, _ = sides(path)
    ids = text_inputs(path, TEXTS[1])["input_ids"][0].tolist()
    data = b"".join(token.to_bytes(4, "little") for token in ids)
    text, tokens = encoder.encode(
        [encoder.preprocess(TEXTS[1].encode(), {}), encoder.preprocess(data, {"form": "token_ids"})]
    )
    torch.testing.assert_close(text, tokens, atol=0, rtol=0)


def test_a_text_beyond_all_tokens_is_refused_before_it_is_tokenised() -> None:
    encoder, _ = sides(build_checkpoint("bart"))
    with pytest.raises(TooLarge, match="characters"):
        encoder.preprocess(b"x" * (256 * 128 + 1), {})
    with pytest.raises(TooLarge, match="tokens are more"):
        encoder.preprocess(b"x y" * 2000, {})


def test_a_text_with_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """As BART's `<mask>` is in checkpoints whose vocabulary was cut."""
    path = build_checkpoint("bart", tmp_path / "bart")
    size = json.loads((path / "config.json").read_text())["vocab_size"]
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens([f"<extra_{n}>" for n in range(size - len(tokenizer) + 1)], special_tokens=True)
    tokenizer.save_pretrained(path)
    encoder, _ = sides(path)
    last = tokenizer.convert_ids_to_tokens(size)
    with pytest.raises(
        InvalidRequest, match=f"the token {size}, and the model's vocabulary ends at {size - 1}"
    ):
        encoder.preprocess(f"some {last}".encode(), {})
    assert encoder.preprocess(b"some words", {}).rows


RATE = 16_000


@pytest.fixture(scope="module")
def path() -> Path:
    return build_checkpoint("whisper")


def ids_of(path: Path, *texts: str) -> tuple[int, ...]:
    return tuple(tokenizer_of(path).convert_tokens_to_ids(list(texts)))


@pytest.mark.parametrize("seconds", [0.001, 1.3, 30.0])
def test_features_of_a_short_file_equal_the_extractors(path: Path, seconds: float) -> None:
    encoder, _ = sides(path)
    waveform = sound(seconds, seed=1)
    item = encoder.preprocess(Sound(waveform), {})
    wanted = audio_inputs(path, waveform)["input_features"][0]
    assert torch.equal(item.tensors["input_features"], wanted)
    frames = max(1, len(waveform) // 160)
    assert (item.rows, item.length, item.grid_thw) == (1500, 0, (0, frames, frames))


def test_windows_of_a_long_file_are_slices_of_the_whole_files_features(path: Path) -> None:
    encoder, _ = sides(path)
    waveform = sound(47.0, seed=2)
    waveform[RATE * 40 :] *= 30  # the loudest part is not in the first window, and sets its floor
    whole = audio_inputs(path, waveform)["input_features"][0]
    assert whole.shape[1] == 4700
    for start, real in ((0, 3000), (1234, 3000), (2750, 1950), (4699, 1)):
        item = encoder.preprocess(Sound(waveform), {"start_frame": start})
        features = item.tensors["input_features"]
        assert item.grid_thw == (start, real, 4700)
        assert torch.equal(features[:, :real], whole[:, start : start + real])
        assert not features[:, real:].any()
    cut = audio_inputs(path, waveform[: RATE * 30])["input_features"][0]
    assert not torch.allclose(cut, whole[:, :3000], atol=1e-3)


@pytest.mark.parametrize(
    "options", [{"start_frame": -1}, {"start_frame": True}, {"start": 1}, {"start_frame": "1"}]
)
def test_unknown_options_of_audio_are_refused(path: Path, options: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="start_frame"):
        sides(path)[0].preprocess(Sound(sound(1.0)), options)


def test_a_window_behind_the_files_end_is_refused(path: Path) -> None:
    with pytest.raises(InvalidRequest, match="none at 100"):
        sides(path)[0].preprocess(Sound(sound(1.0)), {"start_frame": 100})


def test_rows_of_a_batch_equal_transformers_one_by_one(path: Path) -> None:
    encoder, _ = sides(path)
    waveforms = [sound(2.0, seed=4), sound(9.0, seed=5)]
    batch = encoder.encode([encoder.preprocess(Sound(waveform), {}) for waveform in waveforms])
    for waveform, rows in zip(waveforms, batch, strict=True):
        wanted = encoder_rows(path, audio_inputs(path, waveform))
        torch.testing.assert_close(rows, wanted, atol=1e-5, rtol=0)


def test_logits_of_a_ragged_batch_equal_transformers_and_output_varies(path: Path) -> None:
    encoder, decoder = sides(path)
    waveforms = [sound(2.0, seed=4), sound(9.0, seed=5)]
    start = list(decoder.prompt_defaults({}).token_ids)
    inputs = [audio_inputs(path, waveform) for waveform in waveforms]
    outputs = [greedy(path, each, max_new_tokens=64, decoder_ids=start).token_ids for each in inputs]
    assert min(len(set(output)) for output in outputs) >= 20
    prompts = [[*start, *outputs[0]], [*start, *outputs[1][:20]]]
    rows = encoder.encode([encoder.preprocess(Sound(waveform), {}) for waveform in waveforms])
    for each, prompt, logits in zip(inputs, prompts, decoder_logits(decoder, prompts, rows), strict=True):
        torch.testing.assert_close(logits, whole_logits(path, each, prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({}, ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")),
        ({"timestamps": True}, ("<|startoftranscript|>", "<|en|>", "<|transcribe|>")),
        (
            {"language": "German", "task": "translate"},
            ("<|startoftranscript|>", "<|de|>", "<|translate|>", "<|notimestamps|>"),
        ),
        ({"detect_language": True}, ("<|startoftranscript|>",)),
    ],
)
def test_the_decoder_prompt_follows_the_task(path, options, texts):
    assert sides(path)[1].prompt_defaults(options).token_ids == ids_of(path, *texts)


def test_the_default_prompt_is_what_transformers_begins_with(path: Path) -> None:
    model = model_of(path)
    for options in ({"language": "fr", "task": "transcribe"}, {"language": "de", "task": "translate"}):
        wanted = model._retrieve_init_tokens(None, 1, _generation(model, **options), model.config, 3000, {})
        assert sides(path)[1].prompt_defaults(options).token_ids == tuple(wanted[0].tolist())


def test_text_that_went_before_stands_in_front_and_keeps_its_end(path: Path) -> None:
    before = tuple(range(10, 310))
    ids = sides(path)[1].prompt_defaults({"prompt_ids": before}).token_ids
    assert ids[:1] == ids_of(path, "<|startofprev|>")
    assert ids[1:224] == before[-223:]
    assert ids[224] == ids_of(path, "<|startoftranscript|>")[0]


@pytest.mark.parametrize(
    ("options", "param"), [({"language": "klingon"}, "language"), ({"task": "sing"}, "task")]
)
def test_what_the_checkpoint_cannot_do_names_the_field(path, options, param):
    with pytest.raises(InvalidRequest) as refused:
        sides(path)[1].prompt_defaults(options)
    assert refused.value.param == param


@pytest.mark.parametrize("options", [{"task": "translate"}, {"language": "fr"}, {"detect_language": True}])
def test_an_english_checkpoint_says_what_to_send_instead(options: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=r"English only: use POST /v1/audio/transcriptions, .* send en"):
        WhisperPrompts(1, {"is_multilingual": False}, 448).of(options)


def _generation(model: object, **values: object) -> object:
    config = model.generation_config  # type: ignore[attr-defined]
    config = type(config).from_dict(config.to_dict())
    for name, value in values.items():
        setattr(config, name, value)
    return config


PICTURES = [picture(1, 90, 40), picture(2, 48, 48)]


@pytest.mark.parametrize("variant", ["", "hub"])
def test_rows_and_logits_of_a_ragged_batch_equal_transformers_and_output_varies(variant: str) -> None:
    path = build_checkpoint("trocr", variant=variant)
    whole = VisionEncoderDecoderModel.from_pretrained(build_checkpoint("trocr")).eval()
    encoder = load_encoder(path, device=CPU, dtype=torch.float32)
    decoder = load_decoder(path, device=CPU, dtype=torch.float32, attn_implementation=NAME)
    items = [encoder.preprocess(image, {}) for image in PICTURES]
    rows = encoder.encode(items)
    start = list(decoder.prompt_defaults({}).token_ids)
    assert start == [2]
    pixels = torch.cat([item.tensors["pixel_values"] for item in items])
    said = whole.generate(pixels, max_new_tokens=64, eos_token_id=None, num_beams=1, do_sample=False)
    prompts = [said[0].tolist(), said[1].tolist()[:20]]
    assert len(set(prompts[0])) >= 20
    for number, logits in enumerate(decoder_logits(decoder, prompts, rows)):
        with torch.no_grad():
            wanted = whole(pixels[number : number + 1], decoder_input_ids=torch.tensor([prompts[number]]))
            tower = whole.encoder(pixels[number : number + 1]).last_hidden_state[0]
        torch.testing.assert_close(rows[number], tower, atol=1e-5, rtol=0)
        torch.testing.assert_close(logits, wanted.logits[0], atol=1e-4, rtol=0)


def test_options_of_a_picture_are_refused() -> None:
    encoder = load_encoder(build_checkpoint("trocr"), device=CPU, dtype=torch.float32)
    with pytest.raises(InvalidRequest, match="unknown"):
        encoder.preprocess(PICTURES[0], {"size": 9})


def test_another_tower_is_refused(tmp_path: Path) -> None:
    path = build_checkpoint("trocr", tmp_path / "model")
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(config.replace('"model_type": "vit"', '"model_type": "deit"'))
    with pytest.raises(ConfigError, match="deit and trocr"):
        load_encoder(path, device=CPU, dtype=torch.float32)
