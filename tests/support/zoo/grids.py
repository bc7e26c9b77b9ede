"""Recipes of classes with M-RoPE, with DeepStack, or with both."""

from __future__ import annotations

import torch

from support.zoo.recipe import (
    AUDIO,
    AUDIO_END,
    AUDIO_START,
    BREAK,
    END,
    FIRST_TILE,
    GRIDS,
    HIDDEN,
    IMAGE,
    MOE,
    QWEN_IDS,
    START,
    VIDEO,
    Config,
    Item,
    Recipe,
    grid_item,
    pixels,
    qwen_tower,
    rope,
    text,
    tower,
)

_DEEP_TOWER = qwen_tower(num_position_embeddings=64, deepstack_visual_indexes=[0, 1])
_GLM_IDS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "image_start_token_id": START, "image_end_token_id": END,
    "video_start_token_id": AUDIO_START, "video_end_token_id": AUDIO_END,
}  # fmt: skip
_GLM_TOWER = qwen_tower(image_size=32)
_GLM_ROPE = rope(partial_rotary_factor=1.0)
_SOUND_TOWER = {
    "num_mel_bins": 16, "max_source_positions": 8, "encoder_layers": 2, "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "d_model": 32, "n_window": 4, "output_dim": HIDDEN,
}  # fmt: skip
_OMNI: Config = {
    "text_config": text(**rope()),
    "vision_config": qwen_tower(window_size=16, fullatt_block_indexes=[1]),
    "audio_config": _SOUND_TOWER,
    "image_token_index": IMAGE, "video_token_index": VIDEO, "audio_token_index": AUDIO,
    "vision_start_token_id": START, "vision_end_token_id": END, "audio_start_token_id": AUDIO_START,
    "audio_end_token_id": AUDIO_END, "position_id_per_seconds": 25,
}  # fmt: skip
_QWEN3_VL: Config = {"text_config": text(**rope()), "vision_config": _DEEP_TOWER, **QWEN_IDS}


def _clip_item(number: int) -> Item:
    """A clip of one or two pairs of frames, each with a timestamp before it."""
    frames, height, width = ((2, 4, 4), (1, 4, 6), (2, 4, 4))[number]
    tensors = {
        "pixel_values_videos": pixels(number, frames * height * width, 96),
        "video_grid_thw": torch.tensor([[frames, height, width]]),
    }
    rows = [VIDEO] * (height * width // 4)
    return Item(tensors, [t for f in range(frames) for t in (FIRST_TILE + f, START, *rows, END)])


def _omni_sound(number: int) -> Item:
    frames, rows = ((16, 4), (12, 3), (16, 4))[number]
    tensors = {
        "input_features": pixels(number, 1, 16, 16),
        "feature_attention_mask": (torch.arange(16) < frames).int()[None],
    }
    return Item(tensors, [AUDIO_START, *[AUDIO] * rows, AUDIO_END])


def _hunyuan_item(number: int) -> Item:
    """Its rows hold newlines, begin and end themselves."""
    _, height, width = GRIDS[number]
    tensors = {
        "pixel_values": pixels(number, height * width, 48),
        "image_grid_thw": torch.tensor([GRIDS[number]]),
    }
    return Item(tensors, [START, *[IMAGE] * ((height // 2) * (width // 2 + 1) + 2), END])


def _docling_item(number: int) -> Item:
    mask = torch.ones(1, 1, dtype=torch.bool)
    tensors = {"pixel_values": pixels(number, 1, 1, 3, 32, 32), "pixel_attention_mask": mask}
    return Item(tensors, [START, *[IMAGE] * 4, END])


def _between_start_and_end(token_ids: torch.Tensor) -> torch.Tensor:
    return ((token_ids >= END) & (token_ids <= IMAGE)).int()


GRID = (
    Recipe("Qwen3VLForConditionalGeneration", _QWEN3_VL, grid_item()),
    Recipe("Qwen3VLForConditionalGeneration", _QWEN3_VL, _clip_item, "video", "video"),
    Recipe(
        "Qwen3VLMoeForConditionalGeneration",
        {"text_config": text(**rope(), **MOE), "vision_config": _DEEP_TOWER, **QWEN_IDS},
        grid_item(),
    ),
    Recipe("Cosmos3OmniForConditionalGeneration", _QWEN3_VL, grid_item()),
    Recipe(
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": text(**rope()),
            "vision_config": {
                "depth": 2, "embed_dim": 32, "hidden_size": HIDDEN, "mlp_ratio": 2, "num_heads": 4,
                "patch_size": 4,
            },
            **QWEN_IDS,
        },
        grid_item(),
    ),
    Recipe(
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": text(**rope()),
            "vision_config": qwen_tower(window_size=16, fullatt_block_indexes=[1]),
            **QWEN_IDS,
        },
        grid_item(),
    ),
    Recipe(
        "Glm4vForConditionalGeneration",
        {"text_config": text(**_GLM_ROPE), "vision_config": _GLM_TOWER, **_GLM_IDS},
        grid_item(),
    ),
    Recipe(
        "Glm46VForConditionalGeneration",
        {
            "text_config": text("glm4v_text", **_GLM_ROPE),
            "vision_config": {"model_type": "glm4v_vision", **_GLM_TOWER},
            **_GLM_IDS,
        },
        grid_item(),
    ),
    Recipe(
        "GlmOcrForConditionalGeneration",
        {"text_config": text(**_GLM_ROPE), "vision_config": _GLM_TOWER, **_GLM_IDS},
        grid_item(),
    ),
    Recipe(
        "Glm4vMoeForConditionalGeneration",
        {
            "text_config": text(
                n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, **_GLM_ROPE
            ),
            "vision_config": _GLM_TOWER,
            **_GLM_IDS,
        },
        grid_item(),
    ),
    Recipe(
        "Ernie4_5_VLMoeForConditionalGeneration",
        {
            "text_config": text(
                moe_intermediate_size=[32, 32], moe_num_experts=4, moe_k=2, moe_num_shared_experts=1,
                **rope((2, 2, 4)),
            ),
            "vision_config": qwen_tower(temporal_patch_size=None, out_hidden_size=None, temporal_merge_size=2),
            **_GLM_IDS,
        },
        grid_item(48),
        token_types={"moe_mm_token_type_ids": _between_start_and_end},
    ),
    Recipe(
        "PaddleOCRVLForConditionalGeneration",
        {"text_config": text(**rope()), "vision_config": tower(spatial_merge_size=2), **QWEN_IDS},
        grid_item(3, 4, 4),
    ),
    Recipe(
        "HunYuanVLForConditionalGeneration",
        {
            "text_config": text(**rope((2, 2, 2, 2))),
            "vision_config": tower(
                image_size=None, out_hidden_size=HIDDEN, text_hidden_size=HIDDEN, max_image_size=32,
                min_image_size=8,
            ),
            "image_token_id": IMAGE, "im_start_id": START, "im_end_id": END, "im_newline_id": BREAK,
        },
        _hunyuan_item,
    ),
    Recipe("Qwen2_5OmniThinkerForConditionalGeneration", _OMNI, grid_item()),
    Recipe("Qwen2_5OmniThinkerForConditionalGeneration", _OMNI, _omni_sound, "audio", "audio"),
    Recipe(
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        {
            "text_config": text(**rope(mrope_interleaved=True), **MOE),
            "vision_config": _DEEP_TOWER,
            "audio_config": {
                **_SOUND_TOWER, "n_window_infer": 8, "conv_chunksize": 8, "downsample_hidden_size": 16
            },
            "image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": AUDIO,
            "audio_start_token_id": AUDIO_START, "vision_start_token_id": START, "vision_end_token_id": END,
        },
        grid_item(),
    ),
    Recipe(
        "CohereCompassForConditionalGeneration",
        {
            "text_config": text(
                sliding_window=8, logit_scale=0.25,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                rope_parameters=dict.fromkeys(
                    ("sliding_attention", "full_attention"), rope()["rope_parameters"]
                ),
            ),
            "vision_config": _DEEP_TOWER,
            **QWEN_IDS,
        },
        grid_item(),
    ),
    Recipe(
        "Cosmos3EdgeForConditionalGeneration",
        {
            "text_config": text(**rope()),
            "vision_config": tower(image_size=None, num_patches=64, spatial_merge_size=2),
            "projector_hidden_size": 48, **QWEN_IDS,
        },
        grid_item(48),
    ),
    Recipe(
        "GraniteDoclingForConditionalGeneration",
        {
            "text_config": text(attention_multiplier=0.25, logits_scaling=4.0),
            "vision_config": tower(
                image_size=32, scale_factor=4, out_hidden_size=HIDDEN, deepstack_visual_indexes=[0, 1]
            ),
            "image_token_id": IMAGE, "pad_token_id": 0,
        },
        _docling_item,
        join={"pixel_values": 1, "pixel_attention_mask": 1},
    ),
)
