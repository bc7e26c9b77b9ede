"""Tiny late-interaction retrievers, and the vectors and scores that transformers itself gives."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

from support.zoo.models import RECIPES, randomise
from support.zoo.processors import PROCESSORS, OwnProcessor, make_tokenizer

#: Numbers of a token's vector.
WIDTH = 24
#: By class: the recipe that it is around, and what its processor writes around a picture and before a query.
RETRIEVERS = {
    "ColQwen2ForRetrieval": (
        "Qwen2VL",
        {
            "visual_prompt_prefix": "<s>user\n<|vision_start|><image><|vision_end|>Describe it.</s>",
            "query_prefix": "Ask: ",
        },
    ),
    "ColPaliForRetrieval": ("PaliGemma", {"visual_prompt_prefix": "Describe it."}),
}


def build_retriever(architecture: str, folder: Path, seed: int = 0) -> Path:
    """Writes a checkpoint of the class, with its processor."""
    inner, options = RETRIEVERS[architecture]
    recipe = RECIPES[f"{inner}ForConditionalGeneration"]
    cls = getattr(transformers, architecture)
    wrapped = getattr(transformers, recipe.architecture).config_class
    torch.manual_seed(0)
    config = cls.config_class(
        vlm_config=wrapped(**copy.deepcopy(recipe.config)).to_dict(), embedding_dim=WIDTH
    )
    model = cls(config).float()
    randomise(model, 7 + seed)
    model.save_pretrained(folder)
    own = PROCESSORS[inner]
    make_tokenizer(OwnProcessor("", "", {})).save_pretrained(folder)
    name = architecture.removesuffix("ForRetrieval") + "Processor"
    settings = {"image_processor_type": own.image_processor.removesuffix("Pil"), **own.settings}
    for file, values in (
        ("preprocessor_config.json", {"processor_class": name, **settings}),
        ("processor_config.json", {"processor_class": name, **options}),
    ):
        (folder / file).write_text(json.dumps(values, indent=1), encoding="utf-8")
    return folder


@functools.cache
def _open(path: Path) -> tuple[Any, Any]:
    name = json.loads((path / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(path, dtype=torch.float32).eval()
    settings = json.loads((path / "preprocessor_config.json").read_text())
    images = getattr(transformers, f"{settings['image_processor_type']}Pil").from_pretrained(path)
    options = json.loads((path / "processor_config.json").read_text())
    cls = getattr(transformers, options.pop("processor_class"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    return model, cls(image_processor=images, tokenizer=tokenizer, **options)


def processed(path: Path, given: str | Image.Image) -> dict[str, torch.Tensor]:
    """A query, or a picture, as the checkpoint's processor prepares it."""
    _, processor = _open(path)
    if isinstance(given, str):
        return dict(processor.process_queries(text=[given], return_tensors="pt"))
    return dict(processor.process_images(images=[given.convert("RGB")], return_tensors="pt"))


@torch.no_grad()
def vectors(path: Path, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """A vector of each token, [tokens, width], from the processor's output."""
    model, _ = _open(path)
    given = {name: value for name, value in inputs.items() if name not in ("labels", "mm_token_type_ids")}
    vectors: torch.Tensor = model(**given).embeddings[0]
    return vectors


def with_text(path: Path, given: Sequence[str | Image.Image]) -> dict[str, torch.Tensor]:
    """One prompt: pictures as the processor writes them, texts as they are, in order."""
    _, processor = _open(path)
    ids: list[int] = []
    pixels = []
    for part in given:
        if isinstance(part, str):
            ids += processor.tokenizer(part, add_special_tokens=False)["input_ids"]
        else:
            pixels.append(processed(path, part))
            ids += pixels[-1]["input_ids"][0].tolist()
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
    if "image_grid_thw" in (pixels[0] if pixels else {}):
        grids = torch.cat([each["image_grid_thw"] for each in pixels])
        most = max(each["pixel_values"].shape[1] for each in pixels)
        padded = [
            torch.nn.functional.pad(each["pixel_values"], (0, 0, 0, most - each["pixel_values"].shape[1]))
            for each in pixels
        ]
        return inputs | {"image_grid_thw": grids, "pixel_values": torch.cat(padded)}
    inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    if pixels:
        inputs["pixel_values"] = torch.cat([each["pixel_values"] for each in pixels])
    return inputs


def score(path: Path, query: torch.Tensor, document: torch.Tensor) -> float:
    """The MaxSim of transformers' own processor."""
    _, processor = _open(path)
    return float(processor.score_retrieval([query], [document])[0, 0])
