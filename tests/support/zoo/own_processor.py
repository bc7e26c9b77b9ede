"""Pictures through a class's own processor: transformers' answer, and the same question for the engine."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from PIL import Image
from transformers import ProcessorMixin

from support.data.pictures import picture
from support.zoo.checkpoint import checkpoint, model_of, own_processor
from support.zoo.models import RECIPES, Reference
from support.zoo.processors import make_processor
from triptych.base.types import ItemPlan, Options
from triptych.models.base import DecoderSide, EncoderSide
from triptych.pd_worker.frontend.prompt import Prompt, open_checkpoint

TEXT = "What is this?"
_NONE: Mapping[str, Any] = {}


def pictures(count: int) -> list[Image.Image]:
    """Pictures of different sizes and forms."""
    return [picture(seed, *size) for seed, size in zip(range(count), ((28, 20), (24, 40)), strict=False)]


def messages(count: int) -> list[dict[str, Any]]:
    content = [*({"type": "image"} for _ in range(count)), {"type": "text", "text": TEXT}]
    return [{"role": "user", "content": content}]


@functools.cache
def processor_of(name: str) -> ProcessorMixin:
    own = own_processor(RECIPES[name])
    assert own is not None
    return make_processor(own)


def reference(
    name: str, images: Sequence[Image.Image], count: int, options: Options = _NONE
) -> tuple[list[int], Reference]:
    """As `generated`, of a recipe's checkpoint."""
    return generated(model_of(name), processor_of(name), images, count, options)


@torch.no_grad()
def generated(
    model: Any, processor: Any, images: Sequence[Image.Image], count: int, options: Options = _NONE
) -> tuple[list[int], Reference]:
    """The prompt's ids and the greedy answer, by transformers' processor under `options` and `generate`."""
    text = processor.tokenizer.apply_chat_template(
        messages(len(images)), tokenize=False, add_generation_prompt=True
    )
    with warnings.catch_warnings():
        # `min_pixels` and `max_pixels` are deprecated names.
        warnings.simplefilter("ignore", FutureWarning)
        inputs = processor(text=[text], images=[list(images)], return_tensors="pt", **options)
    tensors = {key: value for key, value in inputs.items() if torch.is_tensor(value) and key != "labels"}
    # In the model's dtype, as its own example asks: Llama 4's processor gives bfloat16.
    tensors = {key: value.float() if value.is_floating_point() else value for key, value in tensors.items()}
    if hasattr(getattr(model, "model", None), "rope_deltas"):
        model.model.rope_deltas = None
    config = transformers.GenerationConfig(
        do_sample=False,
        max_new_tokens=count,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    out = model.generate(**tensors, generation_config=config)
    prompt = tensors["input_ids"][0].tolist()
    return prompt, Reference(out.sequences[0, len(prompt) :].tolist(), torch.cat(list(out.logits)))


def ask(
    name: str,
    encoder: EncoderSide,
    decoder: DecoderSide,
    images: Sequence[Image.Image],
    options: Options = _NONE,
) -> tuple[Prompt, list[torch.Tensor]]:
    """The prompt as a PD worker builds it, and the rows as an encoder worker makes them."""
    plans, rows = [], []
    for number, image in enumerate(images):
        item = encoder.preprocess(image, options)
        rows += encoder.encode([item])
        plans.append(
            ItemPlan(
                f"{number:064x}", "n" * 64, "image", item.rows, encoder.width, "float32", item.length,
                item.runs, item.grid_thw, item.layout,
            )
        )  # fmt: skip
    builder, _ = open_checkpoint(checkpoint(name), decoder, decoder.geometry.max_position_embeddings)
    return builder.build(json.dumps(messages(len(images))).encode(), plans), rows
