"""TrOCR's two sides, pictures by cross-attention, against the whole model in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import VisionEncoderDecoderModel

from support.data.checkpoints import build_checkpoint
from support.data.pictures import picture
from support.encdec.reference import NAME, decoder_logits
from triptych.base.errors import ConfigError, InvalidRequest
from triptych.models.registry import load_decoder, load_encoder

CPU = torch.device("cpu")
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
