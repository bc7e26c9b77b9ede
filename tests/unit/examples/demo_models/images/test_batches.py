"""The fast path to batches makes the numbers that transformers makes of PNGs and messages."""

import io
import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast

from examples.demo_models.images.batches import IGNORED, Encoder, collate, picture_patches, training_batch
from examples.demo_models.images.checkpoint import make_config, make_image_processor, make_model
from examples.demo_models.images.inference import Request, chat_body, png
from examples.demo_models.images.samples import random_sample
from examples.demo_models.images.scenes import SIZES, draw, picture_of, random_scene


def _processed(pictures: list[bytes]) -> Any:
    images = [Image.open(io.BytesIO(picture)) for picture in pictures]
    return make_image_processor()(images=images, return_tensors="np")


@pytest.mark.parametrize("size", SIZES)
def test_patches_equal_the_image_processors_of_the_same_png(size: tuple[int, int]) -> None:
    rng = random.Random(1)
    for _ in range(4):  # some of them drawn four times as large
        picture = picture_of(rng, random_scene(rng, "train"), size)
        made = _processed([png(draw(picture))])
        assert made["image_grid_thw"].tolist() == [[1, size[1] // 16, size[0] // 16]]
        np.testing.assert_allclose(picture_patches(picture), made["pixel_values"], atol=2e-6)


@pytest.mark.parametrize(("given", "kept"), [((512, 512), (8, 8)), ((640, 480), (6, 8))])
def test_larger_pictures_are_brought_down(given: tuple[int, int], kept: tuple[int, int]) -> None:
    made = _processed([png(Image.new("RGB", given, (9, 9, 9)))])
    assert made["image_grid_thw"].tolist() == [[1, *kept]]


def test_branches_are_the_chat_templates_prompts(tokenizer: PreTrainedTokenizerFast) -> None:
    sample = random_sample(random.Random(2), "train", 2, 3)
    sequence = Encoder(tokenizer.backend_tokenizer).branched(sample, "Be brief.")
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    pictures = tuple(png(draw(picture)) for picture in sample.pictures)
    for number, turn in enumerate(sample.turns, 1):
        messages = [{"role": "system", "content": "Be brief."}]
        messages += chat_body(Request(pictures, turn.question))["messages"]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        expected = tokenizer(f"{text}{turn.answer}<|im_end|>")["input_ids"]
        seen = [k for k, branch in enumerate(sequence.branch) if branch in (0, number)]
        ids = [sequence.ids[k] for k in seen]
        one_pad = [i for k, i in enumerate(ids) if i != pad or ids[k - 1] != pad]
        assert one_pad == expected
        learnt = [sequence.labels[k] for k in seen if sequence.labels[k] != IGNORED]
        assert tokenizer.decode(learnt) == turn.answer + "<|im_end|>"


@pytest.mark.parametrize("text_first", [False, True])
def test_chained_turns_are_the_chat_templates_conversation(
    tokenizer: PreTrainedTokenizerFast, text_first: bool
) -> None:
    sample = random_sample(random.Random(3), "train", 1, 2)
    sequence = Encoder(tokenizer.backend_tokenizer).chained(sample, text_first)
    first, second = sample.turns
    parts: list[dict[str, str]] = [{"type": "image"}, {"type": "text", "text": first.question}]
    messages = [
        {"role": "user", "content": parts[::-1] if text_first else parts},
        {"role": "assistant", "content": first.answer},
        {"role": "user", "content": second.question},
        {"role": "assistant", "content": second.answer},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n")
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    one_pad = [i for k, i in enumerate(sequence.ids) if i != pad or sequence.ids[k - 1] != pad]
    assert one_pad == tokenizer(text)["input_ids"]


def test_packed_branches_give_the_logits_of_each_request_alone(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    torch.manual_seed(0)
    model = make_model(make_config(tokenizer)).eval()
    encoder = Encoder(tokenizer.backend_tokenizer)
    pad = int(tokenizer.convert_tokens_to_ids("<|endoftext|>"))
    rng = random.Random(4)
    samples = [random_sample(rng, "train", images, 2) for images in (1, 2)]
    packed = collate([(encoder.branched(s), s.pictures) for s in samples], pad)
    with torch.no_grad():
        hidden = model.model(
            input_ids=packed.ids,
            attention_mask=packed.mask,
            position_ids=packed.positions,
            pixel_values=packed.pixels,
            image_grid_thw=packed.grid,
        ).last_hidden_state
        ends = []
        for sample in samples:
            made = _processed([png(draw(picture)) for picture in sample.pictures])
            sequence = encoder.branched(sample)
            for number in (1, 2):
                ids = torch.tensor(
                    [
                        i
                        for i, branch in zip(sequence.ids, sequence.branch, strict=True)
                        if branch in (0, number)
                    ]
                )[None]
                alone = model.model(
                    input_ids=ids,
                    pixel_values=torch.from_numpy(made["pixel_values"]),
                    image_grid_thw=torch.from_numpy(made["image_grid_thw"]),
                    mm_token_type_ids=(ids == encoder.image_pad).int(),
                ).last_hidden_state
                ends.append(alone[0, -1])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    found = hidden[packed.labels == end]
    assert len(found) == 4
    for vector in ends:  # the rows hold the samples longest first
        assert float((found - vector).abs().max(-1).values.min()) < 1e-4


def test_training_batches_are_seeded_and_within_the_vocabulary(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    encoder = Encoder(tokenizer.backend_tokenizer)
    one, two = (training_batch(random.Random(5), encoder, 6, 3, 1.0, 0) for _ in range(2))
    assert torch.equal(one.ids, two.ids) and torch.equal(one.pixels, two.pixels)
    assert int(one.ids.max()) < len(tokenizer)
    assert int((one.ids == encoder.image_pad).sum()) * 4 == len(one.pixels)
