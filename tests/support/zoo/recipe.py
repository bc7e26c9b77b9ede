"""A recipe: the shrunk config of one class of transformers, and what its processor gives for one item."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]

#: Token ids 3 to 258 are the bytes; the special tokens are at the end of the vocabulary.
VOCAB_SIZE = 320
HIDDEN = 64
IMAGE, VIDEO, AUDIO, START, END, BREAK = 319, 318, 317, 316, 315, 314
AUDIO_START, AUDIO_END, FIRST_TILE = 313, 312, 300
PAD, BOS, EOS, FIRST_BYTE = 0, 1, 2, 3

_TEXT = {
    "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
    "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS,
}  # fmt: skip
_TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_channels": 3, "patch_size": 4,
}  # fmt: skip
_QWEN_TOWER = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "in_channels": 3, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": HIDDEN,
}  # fmt: skip
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN_IDS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START,
    "vision_end_token_id": END,
}  # fmt: skip
#: Grids of the items 0, 1 and 2, in patches.
GRIDS = ((1, 4, 6), (1, 8, 4), (1, 6, 6))


@dataclass(frozen=True)
class Item:
    """One picture, clip or sound: the processor's tensors, and the tokens that stand for it in a prompt."""

    tensors: Tensors
    token_ids: list[int]


@dataclass(frozen=True)
class Recipe:
    """How one class is built small. `variation` tells recipes of one class apart.

    `join` names the dimension along which a prompt's items are joined, for tensors of which it is not 0.
    `token_types` makes the processor's token types out of token ids [1, T], by name; others: 1 images, 2 videos.
    `seed` draws weights with which the answers are varied.
    """

    architecture: str
    config: Config
    item: Callable[[int], Item]
    modality: str = "image"
    variation: str = ""
    join: Mapping[str, int] = field(default_factory=dict)
    token_types: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    seed: int = 0

    @property
    def name(self) -> str:
        return self.architecture + (f"-{self.variation}" if self.variation else "")


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


def pixels(number: int, *shape: int) -> torch.Tensor:
    """Values of an item's picture: another number gives another picture."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 + number))


def grid_item(*patch: int, key: str = "image_grid_thw", merge: int = 2) -> Callable[[int], Item]:
    """Pictures as rows of patches [patches, *patch] with their grid."""

    def make(number: int) -> Item:
        grid = GRIDS[number]
        count = grid[0] * grid[1] * grid[2]
        tensors = {"pixel_values": pixels(number, count, *(patch or (96,))), key: torch.tensor([grid])}
        return Item(tensors, [START, *[IMAGE] * (count // merge**2), END])

    return make


def square_item(
    size: int, rows: int, before: tuple[int, ...] = (START,), after: tuple[int, ...] = (END,), **extra: int
) -> Callable[[int], Item]:
    """Pictures of one size; `extra` names integer inputs that each picture has."""

    def make(number: int) -> Item:
        tensors = {"pixel_values": pixels(number, 1, 3, size, size)}
        tensors |= {name: torch.tensor([value]) for name, value in extra.items()}
        return Item(tensors, [*before, *[IMAGE] * rows, *after])

    return make


def tiled_item(size: int, rows: int, *, mask: bool = True) -> Callable[[int], Item]:
    """Pictures of one or three tiles, each with a token before its rows: runs with text between."""

    def make(number: int) -> Item:
        tiles = 1 if number == 1 else 3
        tensors = {"pixel_values": pixels(number, 1, tiles, 3, size, size)}
        if mask:
            tensors["pixel_attention_mask"] = torch.ones(1, tiles, size, size, dtype=torch.long)
        token_ids = [token for t in range(tiles) for token in (START, FIRST_TILE + t, *[IMAGE] * rows)]
        return Item(tensors, [*token_ids, END])

    return make


def unpadded_item(rows: int, side: int) -> Callable[[int], Item]:
    """Pictures of a base view and tiles, whose rows of the grid end with a newline (LLaVA-NeXT)."""

    def make(number: int) -> Item:
        height, width = ((16, 32), (32, 32), (32, 16))[number]
        tiles = 1 + height * width // 256
        grid = (height // side) * (width // side + 1)
        tensors = {
            "pixel_values": pixels(number, 1, tiles, 3, 16, 16),
            "image_sizes": torch.tensor([[height, width]]),
        }
        return Item(tensors, [START, *[IMAGE] * (rows + grid), END])

    return make


def pixtral_item(number: int) -> Item:
    """Pictures of any size, each row of placeholders followed by a break."""
    height, width = ((16, 24), (32, 16), (24, 24))[number]
    padding = (0, 32 - width, 0, 32 - height)
    body = [*[IMAGE] * (width // 8), BREAK] * (height // 8)
    tensors = {
        "pixel_values": torch.nn.functional.pad(pixels(number, 1, 3, height, width), padding),
        "image_sizes": torch.tensor([[height, width]]),
    }
    return Item(tensors, [*body[:-1], END])


def sound_item(frames: int, rows: int, before: int = AUDIO_START, mask: str = "") -> Callable[[int], Item]:
    """Sounds of 16 mel bins; with `mask` of three lengths, which that input names."""

    def make(number: int) -> Item:
        length = frames if not mask or number != 1 else frames // 2
        tensors = {"input_features": pixels(number, 1, 16, frames)}
        if mask:
            tensors[mask] = (torch.arange(frames) < length).int()[None]
        return Item(tensors, [before, *[AUDIO] * (rows * length // frames), AUDIO_END])

    return make
