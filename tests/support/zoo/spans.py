"""Recipes of classes that attend in both directions within a picture, and of Gemma 4's other inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from support.zoo.recipe import (
    AUDIO,
    AUDIO_END,
    AUDIO_START,
    END,
    HIDDEN,
    IMAGE,
    START,
    VIDEO,
    VOCAB_SIZE,
    Item,
    Recipe,
    pixels,
    siglip,
    square_item,
    text,
    tower,
)

_GEMMA4_TOWER = tower(
    image_size=None, num_channels=None, num_key_value_heads=4, head_dim=8, pooling_kernel_size=2,
    position_embedding_size=64,
)  # fmt: skip
_GEMMA4_IDS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "boi_token_id": START, "eoi_token_id": END,
    "audio_token_id": AUDIO, "boa_token_id": AUDIO_START, "eoa_token_index": AUDIO_END,
}  # fmt: skip
_WINDOWS = ["sliding_attention", "sliding_attention", "full_attention"]


def _patches_item(patches_per_row: int) -> Callable[[int], Item]:
    """Patches with their places, padded to 36."""

    def make(number: int) -> Item:
        height, width = ((4, 6), (4, 4), (6, 6))[number]
        count = height * width
        places = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(1)[None]
        padding = (0, 0, 0, 36 - count)
        tensors = {
            "pixel_values": torch.nn.functional.pad(pixels(number, 1, count, 48).sigmoid(), padding),
            "image_position_ids": torch.nn.functional.pad(places, padding, value=-1),
        }
        return Item(tensors, [START, *[IMAGE] * (count // patches_per_row), END])

    return make


SPANS = (
    Recipe(
        "Gemma3ForConditionalGeneration",
        {
            "text_config": text(
                "gemma3_text", sliding_window=6, query_pre_attn_scalar=16, final_logit_softcapping=20.0,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            ),
            "vision_config": siglip(), "image_token_index": IMAGE, "boi_token_index": START,
            "eoi_token_index": END, "mm_tokens_per_image": 4,
        },
        square_item(16, 4),
    ),
    Recipe(
        "PaliGemmaForConditionalGeneration",
        {
            "text_config": text("gemma"), "vision_config": siglip(projection_dim=HIDDEN),
            "image_token_index": IMAGE, "projection_dim": HIDDEN, "hidden_size": HIDDEN,
        },
        square_item(16, 16, (), ()),
        token_types={"token_type_ids": torch.zeros_like},
    ),
    Recipe(
        "Gemma4ForConditionalGeneration",
        {
            "text_config": text(
                num_hidden_layers=6, sliding_window=6, layer_types=_WINDOWS * 2, num_kv_shared_layers=3,
                hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB_SIZE,
                final_logit_softcapping=20.0,
            ),
            "vision_config": _GEMMA4_TOWER, **_GEMMA4_IDS,
        },
        _patches_item(4),
        variation="per-layer-inputs",
    ),
    Recipe(
        "Gemma4ForConditionalGeneration",
        {
            "text_config": text(
                sliding_window=6, layer_types=_WINDOWS, hidden_size_per_layer_input=0,
                vocab_size_per_layer_input=VOCAB_SIZE, use_bidirectional_attention="vision",
                attention_k_eq_v=True, enable_moe_block=True, num_experts=8, top_k_experts=2,
                moe_intermediate_size=32,
            ),
            "vision_config": _GEMMA4_TOWER, **_GEMMA4_IDS,
        },
        _patches_item(4),
        variation="experts",
    ),
    Recipe(
        "Gemma4UnifiedForConditionalGeneration",
        {
            "text_config": text(
                sliding_window=3, layer_types=_WINDOWS, use_bidirectional_attention="vision"
            ),
            "vision_config": {
                "patch_size": 2, "pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 64,
                "output_proj_dims": 32,
            },
            "audio_config": None, **_GEMMA4_IDS,
        },
        _patches_item(1),
    ),
)
