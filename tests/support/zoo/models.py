"""Tiny models of the recipes: weights with effect, prompts, and what `generate` answers."""

from __future__ import annotations

import copy
import inspect
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from support.zoo.others import HYBRIDS, SOUNDS
from support.zoo.plain import PLAIN
from support.zoo.positions import POSITIONS, SPANS
from support.zoo.recipe import Item, Recipe, Tensors
from support.zoo.seeds import SEEDS

#: Of every release of transformers that the table names.
ALL_RECIPES = {recipe.name: recipe for recipe in (*PLAIN, *POSITIONS, *SPANS, *HYBRIDS, *SOUNDS)}
#: Of the installed one.
RECIPES = {name: recipe for name, recipe in ALL_RECIPES.items() if hasattr(transformers, recipe.architecture)}


@dataclass(frozen=True)
class Prompt:
    """Token ids with the placeholders of `items`, in their order."""

    token_ids: list[int]
    items: tuple[Item, ...] = ()


@dataclass(frozen=True)
class Reference:
    """Greedy tokens, and the logits [tokens, vocabulary] that they are the best of."""

    token_ids: list[int]
    logits: torch.Tensor


def build_model(recipe: Recipe) -> PreTrainedModel:
    """The class with random weights, in float32."""
    cls = getattr(transformers, recipe.architecture)
    torch.manual_seed(0)
    model = cls(cls.config_class(**copy.deepcopy(recipe.config))).float()
    randomise(model, zlib.crc32(recipe.name.encode()) + SEEDS.get(recipe.name, 0))
    return model.eval()


@torch.no_grad()
def randomise(model: PreTrainedModel, seed: int) -> None:
    """Weights large enough that pictures and attention decide: with 0.02 everywhere nothing would."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim < 2:
            parameter += 0.15 * noise
        elif "embed" in name and parameter.ndim == 2:
            parameter.copy_(noise * 0.06)
        else:
            # What a layer adds outweighs the token itself, which a head tied to the embedding would repeat.
            gain = 3.0 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.2
            inputs = parameter.shape[-1] if "experts" in name else parameter[0].numel()
            parameter.copy_(noise * gain / inputs**0.5)
    model.tie_weights()


def make_prompt(recipe: Recipe, seed: int, numbers: Sequence[int]) -> Prompt:
    """Text, an item, text, an item, text."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        return torch.randint(10, 250, (count,), generator=generator).tolist()

    token_ids, items = draw(5 + seed), []
    for number in numbers:
        items.append(recipe.item(number))
        token_ids += [*items[-1].token_ids, *draw(4)]
    return Prompt(token_ids, tuple(items))


def prompts(recipe: Recipe) -> list[Prompt]:
    """One item, two items, and none, as far as the class takes them."""
    numbers = ((1, (0,)), (2, (1, 2)), (18, ()))
    taken = [each for each in numbers if not (recipe.one_item and len(each[1]) > 1)]
    taken = [each for each in taken if each[1] or not recipe.needs_item]
    return [make_prompt(recipe, seed, items) for seed, items in taken]


def joined(recipe: Recipe, items: Sequence[Item]) -> Tensors:
    """The tensors of a prompt as its processor makes them: smaller items are padded to the largest."""
    out = {}
    for name in items[0].tensors if items else ():
        tensors, dim = [item.tensors[name] for item in items], recipe.join.get(name, 0)
        shape = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
        padded = []
        for tensor in tensors:
            missing = [0 if d == dim else shape[d] - size for d, size in enumerate(tensor.shape)]
            padded.append(
                torch.nn.functional.pad(tensor, [n for size in reversed(missing) for n in (0, size)])
            )
        out[name] = torch.cat(padded, dim)
    return out


def token_types(recipe: Recipe, model: PreTrainedModel, token_ids: torch.Tensor) -> Tensors:
    """The processor's token types under the names that the class has for them."""
    names = set(inspect.signature(model.forward).parameters)
    names |= set(inspect.signature(getattr(model, "model", model).forward).parameters)
    config = model.config
    kinds = (token_ids == getattr(config, "image_token_id", -1)).int()
    kinds += 2 * (token_ids == getattr(config, "video_token_id", -1)).int()
    known = {"mm_token_type_ids": kinds, "token_type_ids": kinds, "moe_mm_token_type_ids": kinds}
    known |= {name: make(token_ids) for name, make in recipe.token_types.items()}
    return {name: value for name, value in known.items() if name in names}


@torch.no_grad()
def generate(recipe: Recipe, model: PreTrainedModel, prompt: Prompt, count: int) -> Reference:
    """What transformers itself answers, greedily, without an end."""
    token_ids = torch.tensor([prompt.token_ids])
    options: dict[str, Any] = {
        **token_types(recipe, model, token_ids),
        **joined(recipe, prompt.items),
        "generation_config": transformers.GenerationConfig(
            do_sample=False, max_new_tokens=count, pad_token_id=0, return_dict_in_generate=True,
            output_logits=True,
        ),
    }  # fmt: skip
    if hasattr(getattr(model, "model", None), "rope_deltas"):
        model.model.rope_deltas = None
    out = model.generate(input_ids=token_ids, attention_mask=torch.ones_like(token_ids), **options)
    return Reference(out.sequences[0, len(prompt.token_ids) :].tolist(), torch.cat(list(out.logits)))
