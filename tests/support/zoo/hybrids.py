"""Recipes of classes with recurrent layers: linear attention, short convolutions, Mamba."""

from __future__ import annotations

import torch

from support.zoo.recipe import (
    END,
    IMAGE,
    MOE,
    QWEN_IDS,
    START,
    VIDEO,
    Item,
    Recipe,
    grid_item,
    pixels,
    qwen_tower,
    rope,
    text,
    tower,
)

_LINEAR = {
    "num_hidden_layers": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, **rope((2, 1, 1), partial_rotary_factor=0.5),
}  # fmt: skip


def _patch_strip_item(number: int) -> Item:
    """Patches side by side in one row, with the grid that they make (MiniCPM-V)."""
    height, width = ((4, 8), (8, 8), (8, 4))[number]
    tensors = {
        "pixel_values": pixels(number, 1, 3, 4, height * width * 4),
        "target_sizes": torch.tensor([[height, width]]),
    }
    return Item(tensors, [START, *[IMAGE] * (height * width // 16), END])


def _padded_patches_item(number: int) -> Item:
    height, width = ((4, 6), (8, 4), (6, 6))[number]
    count = height * width
    tensors = {
        "pixel_values": torch.nn.functional.pad(pixels(number, 1, count, 48), (0, 0, 0, 40 - count)),
        "spatial_shapes": torch.tensor([[height, width]]),
        "pixel_attention_mask": (torch.arange(40) < count).int()[None],
    }
    return Item(tensors, [START, *[IMAGE] * (count // 4), END])


HYBRIDS = (
    Recipe(
        "Qwen3_5ForConditionalGeneration",
        {"text_config": text(**_LINEAR), "vision_config": qwen_tower(num_position_embeddings=64), **QWEN_IDS},
        grid_item(),
    ),
    Recipe(
        "Qwen3_5MoeForConditionalGeneration",
        {
            "text_config": text(shared_expert_intermediate_size=32, **_LINEAR, **MOE),
            "vision_config": qwen_tower(num_position_embeddings=64),
            **QWEN_IDS,
        },
        grid_item(),
    ),
    *(
        Recipe(
            f"{family}ForConditionalGeneration",
            {
                "text_config": text("qwen3_5_text", **_LINEAR), "vision_config": tower(image_size=32),
                "insert_layer_id": 0, "image_token_id": IMAGE, "video_token_id": VIDEO, **sizes,
            },
            _patch_strip_item,
            join={"pixel_values": 3},
        )
        for family, sizes in (
            ("MiniCPMV4_6", {"image_size": 32}),
            ("MiniCPMV4_7", {"image_size": 32}),
            ("MiniCPMOcr", {"downsample_mode": "16x"}),
        )
    ),
    Recipe(
        "Lfm2VlForConditionalGeneration",
        {
            "text_config": text(
                "lfm2", conv_L_cache=3, layer_types=["conv", "full_attention", "conv"],
                block_auto_adjust_ff_dim=False,
            ),
            "vision_config": tower(
                "siglip2_vision_model", image_size=None, num_patches=64, vision_use_head=False
            ),
            "image_token_id": IMAGE, "projector_hidden_size": 48,
        },
        _padded_patches_item,
    ),
    Recipe(
        "Lfm3VlForConditionalGeneration",
        {
            "text_config": text("lfm3", num_hidden_layers=5, sliding_window=8),
            "vision_config": tower(image_size=None, num_channels=None, num_key_value_heads=2),
            "projector_hidden_size": 48, **QWEN_IDS,
        },
        grid_item(),
    ),
)
