"""Both sides of every family together give transformers' logits for whole prompts with images."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from support.data.checkpoints import FAMILIES, build_checkpoint
from support.data.model_prompts import ModelPrompt, batch_logits, model_prompt, question
from support.data.oracle import oracle, teacher_forced_logits
from support.data.pictures import picture
from support.engine.reference_attention import NAME
from support.matrix import matrix
from triptych.models.base import DecoderSide, EncoderSide, MergedEmbeds
from triptych.models.registry import load_decoder, load_encoder

CPU = torch.device("cpu")
VARIANTS = ("", "hub+sharded", "tied", "small")
IMAGES = [picture(1, 64, 64), picture(2, 96, 48), picture(3, 40, 90)]


def sides(path: Path, dtype: torch.dtype = torch.float32) -> tuple[EncoderSide, DecoderSide]:
    encoder = load_encoder(path, device=CPU, dtype=dtype)
    return encoder, load_decoder(path, device=CPU, dtype=dtype, attn_implementation=NAME)


@functools.cache
def reference(path: Path, images: tuple[int, ...]) -> tuple[list[int], torch.Tensor]:
    """A question about IMAGES by number with eight greedy tokens after it, and the logits of those nine."""
    pictures = [IMAGES[number] for number in images]
    result = oracle(path, question(len(images)), pictures, max_new_tokens=8)
    logits = teacher_forced_logits(path, question(len(images)), pictures, result.token_ids)
    return [*result.prompt_token_ids, *result.token_ids], logits


def prompt(path: Path, encoder: EncoderSide, decoder: DecoderSide, images: tuple[int, ...]) -> ModelPrompt:
    pictures = [IMAGES[number] for number in images]
    return model_prompt(encoder, decoder, reference(path, images)[0], pictures)


@pytest.mark.parametrize("variant", matrix(VARIANTS, quick=2))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_prompt_with_three_images_equal_transformers(family: str, variant: str) -> None:
    path = build_checkpoint(family, variant=variant)
    encoder, decoder = sides(path)
    logits = batch_logits(decoder, [prompt(path, encoder, decoder, (0, 1, 2))])
    torch.testing.assert_close(logits[-9:], reference(path, (0, 1, 2))[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_flattened_batch_of_text_and_images_gives_each_prompt_its_own_logits(family: str) -> None:
    path = build_checkpoint(family)
    encoder, decoder = sides(path)
    cases: list[tuple[int, ...]] = [(0,), (), (1, 2)]
    prompts = [prompt(path, encoder, decoder, images) for images in cases]
    logits = batch_logits(decoder, prompts, shuffle=True).split([len(each.token_ids) for each in prompts])
    for images, part in zip(cases, logits, strict=True):
        torch.testing.assert_close(part[-9:], reference(path, images)[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_images_of_several_sizes_in_one_tower_call_equal_one_by_one(family: str) -> None:
    encoder = load_encoder(build_checkpoint(family), device=CPU, dtype=torch.float32)
    items = [encoder.preprocess(image, {}) for image in IMAGES]
    for item, rows in zip(items, encoder.encode(items), strict=True):
        assert rows.shape == (item.rows, encoder.width)
        torch.testing.assert_close(rows, encoder.encode([item])[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_equal_transformers_image_features(family: str) -> None:
    path = build_checkpoint(family, variant="hub")
    encoder = load_encoder(path, device=CPU, dtype=torch.float32)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    items = [encoder.preprocess(image, {}) for image in IMAGES]
    if family == "llava":
        pixels = torch.cat([item.tensors["pixel_values"] for item in items])
    else:
        pixels = encoder.pixels(items)
    grids = {} if family == "llava" else {"image_grid_thw": torch.tensor([item.grid_thw for item in items])}
    with torch.no_grad():
        features = model.model.get_image_features(pixel_values=pixels, return_dict=True, **grids)
    # Lists of images in some releases, whole tensors in others.
    levels = [torch.cat(tuple(features.pooler_output))]
    for level in features.get("deepstack_features") or ():
        levels.append(level if isinstance(level, torch.Tensor) else torch.cat(tuple(level)))
    expected = torch.cat(levels, dim=-1).split([item.rows for item in items])
    for rows, wanted in zip(encoder.encode(items), expected, strict=True):
        torch.testing.assert_close(rows, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_item_has_storage_of_its_own(family: str) -> None:
    encoder = load_encoder(build_checkpoint(family), device=CPU, dtype=torch.float32)
    for rows in encoder.encode([encoder.preprocess(image, {}) for image in IMAGES]):
        assert rows.is_contiguous()
        assert rows.untyped_storage().nbytes() == rows.numel() * rows.element_size()


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_of_the_caller_are_left_as_they_were(family: str) -> None:
    path = build_checkpoint(family)
    encoder, decoder = sides(path)
    asked = prompt(path, encoder, decoder, (0,))
    embeds = decoder.embed(torch.tensor(asked.token_ids))
    before = embeds.clone()
    positions, _ = decoder.positions(asked.token_ids, asked.features)
    start = asked.features[0].placement.offset
    merged = MergedEmbeds(torch.arange(start, start + len(asked.rows[0])), asked.rows[0])
    decoder.forward(embeds, positions, merged, [len(asked.token_ids)])
    assert torch.equal(embeds, before)


@pytest.mark.parametrize(("variant", "original"), matrix([("", True), ("hub", False), ("", False)], quick=2))
@pytest.mark.parametrize("family", FAMILIES)
def test_what_save_pretrained_writes_is_loaded_alike(family, variant, original, tmp_path):
    source = build_checkpoint(family, variant=variant)
    saved = build_checkpoint(family, tmp_path / "saved", variant=variant)
    (saved / "model.safetensors").unlink()
    model = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)
    model.save_pretrained(saved, save_original_format=original)
    for before, after in zip(sides(source), sides(saved), strict=True):
        held, wanted = (
            {name: parameter.to_dense() for name, parameter in side.module.named_parameters()}
            for side in (after, before)
        )
        assert held.keys() == wanted.keys()
        assert all(torch.equal(held[name], value) for name, value in wanted.items())
