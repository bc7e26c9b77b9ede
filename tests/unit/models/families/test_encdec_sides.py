"""Both sides of every encoder-decoder family against the whole model in transformers."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from support.data.checkpoints import build_checkpoint
from support.encdec.checkpoints import FAMILIES
from support.encdec.oracle import decoder_logits as whole_logits
from support.encdec.oracle import encoder_rows, greedy, text_inputs
from support.encdec.reference import NAME, decoder_logits
from triptych.base.errors import TooLarge
from triptych.models.base import DecoderSide, EncoderSide
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
