"""A recipe: the shrunk config of one class of transformers, and what its processor gives for one item."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]

#: Token ids 3 to 258 are the bytes; the special tokens are at the end of the vocabulary.
VOCAB_SIZE = 320
HIDDEN = 64
IMAGE, VIDEO, AUDIO, START, END, BREAK = 319, 318, 317, 316, 315, 314
AUDIO_START, AUDIO_END, FIRST_TILE = 313, 312, 300
PAD, BOS, EOS, FIRST_BYTE = 0, 1, 2, 3

_TEXT: Config = {
    "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
    "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS,
}  # fmt: skip
_TOWER: Config = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_channels": 3, "patch_size": 4,
}  # fmt: skip
_QWEN_TOWER: Config = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "in_channels": 3, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": HIDDEN,
}  # fmt: skip
MOE: Config = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN_IDS: Config = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START,
    "vision_end_token_id": END,
}  # fmt: skip


@dataclass(frozen=True)
class Item:
    """One picture, clip or sound: the processor's tensors, and the tokens that stand for it in a prompt."""

    tensors: Tensors
    token_ids: list[int]


@dataclass(frozen=True)
class Recipe:
    """How one class is built small. `variation` tells recipes of one class apart.

    `join` names the dimension along which a prompt's items are joined, for tensors of which it is not 0.
    `token_types` makes the processor's token types out of token ids [1, T], by name, where they are not the
    usual ones.
    With `needs_item` the class takes no text alone, with `one_item` one picture in a prompt: with more of
    them each has other rows.
    """

    architecture: str
    config: Config
    item: Callable[[int], Item]
    modality: str = "image"
    variation: str = ""
    join: Mapping[str, int] = field(default_factory=dict)
    token_types: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    needs_item: bool = False
    one_item: bool = False

    @property
    def name(self) -> str:
        return self.architecture + (f"-{self.variation}" if self.variation else "")


def recipe(
    family: str,
    item: Callable[[int], Item],
    text_config: Config,
    vision_config: Config | None = None,
    *,
    variation: str = "",
    modality: str = "image",
    join: Mapping[str, int] | None = None,
    token_types: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] | None = None,
    needs_item: bool = False,
    one_item: bool = False,
    **config: Any,
) -> Recipe:
    """A row of the table; `family` is the architecture without its usual ending."""
    architecture = family if hasattr(transformers, family) else f"{family}ForConditionalGeneration"
    config["text_config"] = text_config
    if vision_config is not None:
        config["vision_config"] = vision_config
    return Recipe(
        architecture, config, item, modality, variation, join or {}, token_types or {}, needs_item, one_item
    )


def text(model_type: str = "", **changes: Any) -> Config:
    """A text config; None takes a field away."""
    values = {**_TEXT, **changes, **({"model_type": model_type} if model_type else {})}
    return {name: value for name, value in values.items() if value is not None}


def rope(sections: tuple[int, ...] = (4, 2, 2), **changes: Any) -> Config:
    """The field `rope_parameters` for M-RoPE."""
    values = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections), **changes}
    return {"rope_parameters": values}


def tower(model_type: str = "", **changes: Any) -> Config:
    """A vision config of a plain ViT on pictures of 16 x 16 pixels."""
    values = {**_TOWER, "image_size": 16, **changes, **({"model_type": model_type} if model_type else {})}
    return {name: value for name, value in values.items() if value is not None}


def siglip(**changes: Any) -> Config:
    return tower("siglip_vision_model", vision_use_head=False, **changes)


def clip(**changes: Any) -> Config:
    return tower("clip_vision_model", projection_dim=32, **changes)


def qwen_tower(**changes: Any) -> Config:
    """A vision config of Qwen's towers, over grids of patches."""
    return {name: value for name, value in {**_QWEN_TOWER, **changes}.items() if value is not None}
